"""The other side of `tests.support.forking`: imports modules, then forks for each order it reads.

Forks are safe as long as there is one thread. A module, not an argument of the interpreter:
engines are spawned, and spawning runs the main module again.
"""

import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.called import call_and_save


def prepare(order: dict[str, Any]) -> None:
    """Makes the process that was just forked what it would be, had it been started."""
    os.setsid()
    with Path(os.devnull).open() as nothing, Path(order["log"]).open("ab") as log:
        for descriptor, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    folders = order["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder not in sys.path]


def main() -> None:
    """In each process that is forked this ends with its call, in the first one with its orders."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or collections would copy all of it
    threads = [thread.name for thread in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"imports started threads, which forks would not have: {threads}"
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.flush()
        number = os.fork()
        if number == 0:
            answers.close()
            prepare(order)
            return call_and_save(*order["call"])
        _, status = os.waitpid(number, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    return None


if __name__ == "__main__":
    main()
