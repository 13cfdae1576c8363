"""Items of the GPU program that need neither a GPU nor vLLM."""

import os
import subprocess
import sys
import time

from benchmarks.gpu.item_run import ItemRun


def succeed(run: ItemRun, value: str = "") -> None:
    run.measure("a part", lambda: {"value": value, "argument": run.tiny})


def fail_in_the_middle(run: ItemRun) -> None:
    """Succeeds as soon as the folder has a file "mended"."""

    def second() -> dict[str, bool]:
        if not (run.folder / "mended").exists():
            raise RuntimeError("out of registers")
        return {"is_mended": True}

    run.measure("first", lambda: {"at": time.time()})
    run.measure("second", second)
    run.measure("third", lambda: {"logged": len(run.log_lines())})


def hang(run: ItemRun) -> None:
    """With a process of its own, as an engine has."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    run.record("child", {"pid": child.pid})
    time.sleep(300)


def die(run: ItemRun) -> None:
    run.record("before", {})
    os._exit(9)
