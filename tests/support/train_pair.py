"""The modules of `examples/train_pair`, for tests that call them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_pair"
MODULES = ("heads", "eagle3", "dflash", "frozen_target", "head_data", "head_quality", "training")


@contextmanager
def script_modules() -> Iterator[SimpleNamespace]:
    """Imported within the block alone: their names are common ones."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT)
        yield SimpleNamespace(**{name: import_module(name) for name in MODULES})
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(SCRIPT)):
            del sys.modules[name]
