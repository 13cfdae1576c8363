"""Ends engines and removes their files when the command that started them ends, for any reason."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sequoia_vllm.measuring.interrupts import signals_end_this
from sequoia_vllm.measuring.process_tree import adopted_orphans, descendants, end_processes
from sequoia_vllm.orphans import children_die_with_this_process


@contextmanager
def engines_end_here() -> Iterator[None]:
    """Ends all processes started within the block, and removes their temporary files."""
    with _temporary_files(), processes_end_here():
        yield


@contextmanager
def processes_end_here() -> Iterator[None]:
    """Ends all processes started within the block; earlier ones are left alone.

    They end with this process, too, if it is killed. Within the block, SIGTERM raises
    `Terminated`, and either signal ends this process in any case (`signals_end_this`).
    """
    spared = {process.pid for process in descendants()}
    with (
        adopted_orphans(),
        children_die_with_this_process(),
        signals_end_this(spared) as signals,
    ):
        try:
            yield
        finally:
            with signals.held():  # a second signal must not keep them from ending
                end_processes(spared)


@contextmanager
def _temporary_files() -> Iterator[None]:
    """Keeps engines' temporary files in one folder, and removes it at the end.

    Torch's compiled code stays where it is, for later engines.
    """
    kept = {name: os.environ.get(name) for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")}
    previous, compiled = tempfile.tempdir, kept["TORCHINDUCTOR_CACHE_DIR"] or _compiled_files()
    with tempfile.TemporaryDirectory(prefix="sequoia-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = previous
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _compiled_files() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return str(Path(default_cache_dir()).absolute())
