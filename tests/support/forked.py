"""The other side of `tests.support.calling`: imports a module, then forks for each order.

Forks are safe as long as there is one thread. A module, not an argument of the interpreter:
engines are spawned, and spawning runs the main module again.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any, TextIO

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


def follow(orders: TextIO, answers: TextIO) -> None:
    """Forks for each order. In each process that is forked this ends with its call."""
    print(os.getpid(), file=answers, flush=True)
    for line in orders:
        order = json.loads(line)
        number = os.fork()
        if number == 0:
            orders.close()
            answers.close()
            prepare(order)
            return call_and_save(*order["call"])
        _, status = os.waitpid(number, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    return None


def main() -> None:
    """Imports, then has a fork follow the orders of whoever connects, until its input ends.

    In an orphan: commands under test end what is started by their process meanwhile, which may
    serve other workers.
    """
    path, module = sys.argv[1:]
    if os.fork():
        return None
    importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or collections would copy all of it
    threads = [thread.name for thread in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"imports started threads, which forks would not have: {threads}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that follow orders
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            ready, _, _ = select.select([sys.stdin, listener], [], [])
            if sys.stdin in ready:
                return None
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdin.close()
    orders, answers = connection.makefile("r"), connection.makefile("w")
    connection.close()
    return follow(orders, answers)


if __name__ == "__main__":
    main()
