"""Errors of the measuring tools."""


class CalibrationError(ValueError):
    """A measurement that cannot be made; says what to do."""
