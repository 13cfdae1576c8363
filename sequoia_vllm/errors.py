"""The base class of all our errors."""


class SequoiaError(Exception):
    """Something that the user can mend; the message says how."""
