"""Our errors in vLLM's commands: a line and exit code 2, as those of the command line itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sequoia_vllm.errors import SequoiaError

USAGE_ERROR = 2


@contextmanager
def short_in_commands() -> Iterator[None]:
    """Ends vLLM's own commands at an error of ours; any other program sees the exception."""
    try:
        yield
    except SequoiaError as error:
        if not is_vllms_command():
            raise
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_ERROR) from None


def is_vllms_command() -> bool:
    """Whether this process is ``vllm ...``, or ``python -m vllm...``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = spec.name if spec is not None else ""
    return module.startswith("vllm.") or Path(sys.argv[0]).stem == "vllm"
