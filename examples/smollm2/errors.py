"""The one error this script raises on purpose."""

from __future__ import annotations


class ModelError(Exception):
    """The model could not be had; the message says why, and what to do."""


class OfflineError(ModelError):
    """Nothing answers where the model would come from."""
