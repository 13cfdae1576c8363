"""What commands start ends with them: by itself, by Ctrl-C, by SIGTERM; with all of its files."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
from sequoia_vllm.measuring.engine_processes import (
    Terminated,
    engines_end_here,
    exit_code,
    interrupts_get_through,
)

# A command whose "engine" has a worker, an orphan that ignores SIGTERM, shared memory, a
# semaphore and temporary files.
COMMAND = """
import multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import shared_memory
from sequoia_vllm.measuring import engine_processes
from sequoia_vllm.measuring.engine_processes import engines_end_here, exit_code
engine_processes._SECONDS_TO_END = 1

def worker():
    time.sleep(600)

def orphan():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)

def engine(report):
    context = multiprocessing.get_context("fork")
    memory = shared_memory.SharedMemory(create=True, size=1024)
    semaphore = multiprocessing.get_context("spawn").Lock()
    tempfile.mkstemp()
    first = context.Process(target=worker)
    first.start()
    middle = os.fork()
    if middle == 0:
        if (last := os.fork()) == 0:
            orphan()
        report.send(last)
        os._exit(0)
    os.waitpid(middle, 0)
    report.send((os.getpid(), first.pid, memory.name))
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    multiprocessing.resource_tracker.ensure_running()
    try:
        with engines_end_here():
            receive, send = context.Pipe()
            context.Process(target=engine, args=(send,)).start()
            last, (*pids, memory) = receive.recv(), receive.recv()
            print(*pids, last, memory, tempfile.gettempdir(), flush=True)
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
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE, text=True, preexec_fn=_ctrl_c_works,
    )  # fmt: skip
    *pids, memory, folder = process.stdout.readline().split()
    pids = [int(pid) for pid in pids]
    assert len(pids) == 3
    if number is not None:
        assert all(psutil.pid_exists(pid) for pid in pids)
        assert Path("/dev/shm", memory).exists()
        assert list(Path(folder).iterdir())
        process.send_signal(number)
    assert process.wait(60) == code
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert list(tmp_path.glob("sequoia-*")) == []
    assert Path(folder).parent == tmp_path
    _wait_until_gone(Path("/dev/shm", memory))


def _ctrl_c_works() -> None:
    """Also where the tests run in the background of a shell, which ignores it there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_interrupts_are_not_swallowed_while_an_engine_starts(number, kind):
    """vLLM swallows them, and would wait for ever for an engine that has gone."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    waited = []
    try:
        with pytest.raises(kind):
            _start_engine(number, waited)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not waited


def _start_engine(number: int, waited: list[str]) -> None:
    with engines_end_here(), interrupts_get_through():
        with suppress(KeyboardInterrupt):  # as vLLM's zmq_socket_ctx
            os.kill(os.getpid(), number)
            time.sleep(60)
        waited.append("for ever")


def test_exit_codes_are_the_shells():
    assert exit_code(KeyboardInterrupt()) == 130
    assert exit_code(Terminated()) == 143
