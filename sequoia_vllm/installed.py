"""Versions of installed distributions."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Of these distributions, the versions of those that are installed."""
    found = {name: installed(name) for name in names}
    return {name: number for name, number in found.items() if number is not None}
