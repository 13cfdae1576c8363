"""The base class of all our errors, and that of measuring tools.

A docstring says that a function *refuses* something where callers pass the error on: its
message tells the user what to do. Otherwise a section "Raises" names the class.
"""


class SequoiaError(Exception):
    """Something that the user can mend; the message says how."""


class CalibrationError(SequoiaError, ValueError):
    """A measurement that cannot be made; says what to do."""
