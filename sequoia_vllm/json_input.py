"""JSON that users write: read strictly and with bounds, with errors they can act on.

Without pydantic, which not every machine has that runs a GPU check.
"""

import json
from pathlib import Path
from typing import Any

MOST_MIB = 16  # size of the largest file that is read; the largest of ours have a tenth of it
MOST_PROBLEMS = 8  # problems of one file or configuration that a message lists, at most


def read_json(path: Path, what: str, error: type[ValueError]) -> Any:
    """The JSON value of a file.

    Args:
        what: What the file should be ("profile"), for the message.

    Raises:
        ValueError: Of the class ``error``. It is missing, larger than `MOST_MIB`, or is not JSON.
    """
    try:
        with expanded(path).open("rb") as file:  # pipes, too, whose size nobody knows
            text = file.read((MOST_MIB << 20) + 1)
    except OSError as problem:
        raise error(f"cannot read {what} file {path}: {problem.strerror or problem}") from problem
    except ValueError as problem:  # a name that no file can have
        raise error(f"cannot read {what} file {str(path)!r}: {problem}") from problem
    if len(text) > MOST_MIB << 20:
        raise error(f"{what} file {path} has more than {MOST_MIB} MiB: is it the right one?")
    try:
        return parse_json(text.decode("utf-8"))
    except ValueError as problem:  # not JSON, or not UTF-8
        raise error(f"{what} file {path} is not JSON: {problem}") from problem


def expanded(path: Path | str) -> Path:
    """``path`` with ``~`` as the user's home, where there is one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def parse_json(text: str) -> Any:
    """The value of JSON text, as its standard has it: without NaN and Infinity.

    Raises:
        ValueError: It is not JSON, or nested deeper than Python follows.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shortened(value: Any, length: int = 60) -> str:
    """``value`` as Python writes it, cut to so many characters, for messages."""
    if isinstance(value, int) and value.bit_length() > 4 * length:
        return "a number of very many digits"
    if isinstance(value, str):
        value = value[: length + 1]
    elif isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def key_name(key: Any) -> str:
    """A key, or an index, as it stands in a file; quoted and cut where it is a strange one."""
    text = str(key)
    return text if text.isprintable() and 0 < len(text) <= 60 else shortened(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
