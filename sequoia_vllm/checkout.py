"""Finds a checkout of this repository, which has more than the installed package."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
_IS_OURS = 'name = "sequoia-vllm"'


def find_checkout() -> Path | None:
    """The checkout that the package lies in, or that the current directory lies in.

    Returns:
        Its root; None: there is none.
    """
    here = Path.cwd()
    return next(filter(_is_checkout, (_PACKAGE.parent, here, *here.parents)), None)


def _is_checkout(folder: Path) -> bool:
    try:
        project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return _IS_OURS in project.splitlines()
