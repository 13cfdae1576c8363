"""The base class of all our errors, and that of measuring tools."""


class SequoiaError(Exception):
    """Something that the user can mend; the message says how."""


class CalibrationError(SequoiaError, ValueError):
    """A measurement that cannot be made; says what to do."""
