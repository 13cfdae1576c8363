"""The versions of the Python distributions that are installed here."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed(name: str) -> str | None:
    """The version of the distribution of this name; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of these distributions that are installed, by name."""
    found = {name: installed(name) for name in names}
    return {name: number for name, number in found.items() if number is not None}
