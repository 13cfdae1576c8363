"""What commands start ends with them: by itself, by Ctrl-C, by SIGTERM; with all of its files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
from sequoia_vllm.measuring.interrupts import Terminated, engines_end_here
from tests.support.ending import in_the_background

# A command whose "engine" has a worker, an orphan that ignores SIGTERM, shared memory, a
# semaphore and temporary files.
COMMAND = """
import multiprocessing, os, subprocess, sys, tempfile, time
from multiprocessing import shared_memory
from sequoia_vllm.measuring import interrupts
from sequoia_vllm.measuring.interrupts import engines_end_here
from sequoia_vllm.measuring.interrupts import exit_code
interrupts.SECONDS_TO_END = 1

def worker():
    time.sleep(600)

def engine(report):
    context = multiprocessing.get_context("fork")
    memory = shared_memory.SharedMemory(create=True, size=1024)
    semaphore = multiprocessing.get_context("spawn").Lock()
    tempfile.mkstemp()
    first = context.Process(target=worker)
    first.start()
    orphan = "trap '' TERM; exec sleep 600"
    last = subprocess.check_output(["sh", "-c", f"({orphan}) > /dev/null & echo $!"], text=True)
    report.send((os.getpid(), first.pid, int(last), memory.name))
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    multiprocessing.resource_tracker.ensure_running()
    try:
        with engines_end_here():
            receive, send = context.Pipe()
            context.Process(target=engine, args=(send,)).start()
            print(*receive.recv(), tempfile.gettempdir(), flush=True)
            if sys.argv[1] == "wait":
                time.sleep(600)
    except KeyboardInterrupt as interrupt:
        sys.exit(exit_code(interrupt))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(None, 0), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_nothing_stays_behind(tmp_path, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "end" if number is None else "wait"],
        env={
            **os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),  # else torch tells it, which takes its time
        },
        stdout=subprocess.PIPE, text=True, preexec_fn=in_the_background,
    )  # fmt: skip
    *pids, memory, folder = process.stdout.readline().split()
    pids = [int(pid) for pid in pids]
    assert len(pids) == 3
    if number is not None:
        assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
        assert Path("/dev/shm", memory).exists()
        assert list(Path(folder).iterdir())
        process.send_signal(number)
    assert process.wait(60) == code
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert list(tmp_path.glob("sequoia-*")) == []
    assert Path(folder).parent == tmp_path
    _wait_until_gone(Path("/dev/shm", memory))


def _wait_until_gone(path: Path) -> None:
    """Python's resource tracker removes it, just after the last process ended."""
    deadline = time.monotonic() + 30
    while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_other_children_are_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with engines_end_here():
            pass
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_signals_and_temporary_files_are_as_before():
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    names = "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"
    variables = [os.environ.get(name) for name in names]
    with pytest.raises(Terminated):
        _end_by_sigterm()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert variables == [os.environ.get(name) for name in names]


def _end_by_sigterm() -> None:
    with engines_end_here():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
