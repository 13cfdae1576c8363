"""Errors of the measuring tools."""

from sequoia_vllm.errors import SequoiaError


class CalibrationError(SequoiaError, ValueError):
    """A measurement that cannot be made; says what to do."""
