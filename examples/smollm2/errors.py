"""The one error this script raises on purpose."""


class ModelError(Exception):
    """The model could not be had; the message says why, and what to do."""


class OfflineError(ModelError):
    """Nothing answers where the model would come from."""
