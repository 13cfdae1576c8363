"""The one error this script raises on purpose."""


class PairError(Exception):
    """A corpus or a pair that cannot be used; the message says why."""
