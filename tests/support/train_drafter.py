"""`examples/train_drafter` for tests: its modules, and its commands in this process."""

import io
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_drafter"
MODULES = ("heads", "eagle3", "training")


@contextmanager
def script_modules(*names: str) -> Iterator[SimpleNamespace]:
    """These, or `MODULES`, imported within the block alone: their names are common ones."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT)
        yield SimpleNamespace(**{name: import_module(name) for name in names or MODULES})
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(SCRIPT)):
            del sys.modules[name]


def run_here(*arguments: str | Path) -> CompletedProcess[str]:
    """What `python examples/train_drafter` gives for these arguments; run in this process.

    Importing torch and transformers takes longer than most of its commands on tiny models.
    """
    command = [str(SCRIPT), *map(str, arguments), "--threads", "1"]
    output, errors = io.StringIO(), io.StringIO()
    with (
        script_modules(),
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    code = end.value.code or 0
    if isinstance(code, str):  # which Python prints
        return CompletedProcess(command, 1, output.getvalue(), errors.getvalue() + code)
    return CompletedProcess(command, int(code), output.getvalue(), errors.getvalue())
