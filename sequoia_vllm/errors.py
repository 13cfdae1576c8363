"""What all of our errors are."""


class SequoiaError(Exception):
    """Something that the user can mend; the message says how."""
