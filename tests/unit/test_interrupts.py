"""SIGINT, SIGTERM and SIGKILL of a command end it, and all that it started, at any moment."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sequoia_vllm import orphans
from sequoia_vllm.cli.common import ends_by_signal
from sequoia_vllm.measuring import interrupts
from tests.support.commands import python
from tests.support.ending import ENDED, in_the_background, still_there, wait_until

pytest.importorskip("torch")

# A command that starts one engine after the other, each with a worker. They ignore the signals, as
# an engine core does that is starting. The main thread waits as told while an engine works.
COMMAND = """
import hashlib, multiprocessing, signal, sys, time
from sequoia_vllm.measuring import interrupts
from sequoia_vllm.measuring.interrupts import processes_end_here
interrupts.SECONDS_TO_END = 0.5
STOPPING = signal.SIGINT, signal.SIGTERM

def start(method, workers):
    context = multiprocessing.get_context(method)
    context.Process(target=engine, args=(method, workers)).start()

def engine(method, workers):
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if workers:
        start(method, workers - 1)
    time.sleep(600)

def swallow():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def compute():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def measure():
    time.sleep(0.2)

if __name__ == "__main__":
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    method, work = sys.argv[1:]
    print("begins", flush=True)
    try:
        while True:
            with processes_end_here():
                start(method, 1)
                time.sleep(0.2)
                globals()[work]()
    except KeyboardInterrupt as interrupt:
        sys.exit(interrupts.exit_code(interrupt))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))  # each signal with each way to start processes
def test_any_moment(tmp_path, seed):
    rng = random.Random(seed)
    method = ("fork", "spawn")[seed % 2]
    number = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL][seed % 3]
    work = rng.choice(["measure", "swallow", "compute"])
    script, mark = tmp_path / "command.py", f"SEQUOIA_TEST_{uuid.uuid4().hex}"
    script.write_text(COMMAND)
    process = subprocess.Popen(
        [sys.executable, script, method, work],
        env={**os.environ, mark: ""},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "begins\n"
        time.sleep(rng.uniform(0, 2))
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) in ENDED[number]
        wait_until(lambda: not still_there(mark))
    finally:
        for left in still_there(mark):
            left.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "kind"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, interrupts.Terminated)],
)
def test_interrupts_are_not_swallowed_while_an_engine_starts(number, kind):
    """vLLM swallows them, and would wait for ever for an engine that has gone."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    waited = []

    def start_engine():
        with interrupts.processes_end_here(), interrupts.interrupts_get_through():
            with suppress(KeyboardInterrupt):  # as vLLM's zmq_socket_ctx
                os.kill(os.getpid(), number)
                time.sleep(60)
            waited.append("for ever")

    try:
        with pytest.raises(kind):
            start_engine()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not waited


def test_a_signal_while_engines_end_ends_the_command(monkeypatch):
    """It must not get lost: the next engine would start."""
    monkeypatch.setattr(
        interrupts, "end_processes", lambda spared: os.kill(os.getpid(), signal.SIGTERM)
    )
    ended = []
    with pytest.raises(interrupts.Terminated), interrupts.processes_end_here():
        ended.append("the block")
    assert ended == ["the block"]


def test_signals_of_forks_are_theirs(monkeypatch):
    killed = []
    monkeypatch.setattr(interrupts, "SECONDS_TO_END", 0.0)
    monkeypatch.setattr(interrupts, "kill_processes", killed.append)
    with interrupts.processes_end_here():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join()
        time.sleep(0.3)
    assert child.exitcode == -signal.SIGTERM
    assert interrupts._Signals.first is None
    assert killed == []


def _wait(report) -> None:
    report.send("begins")
    time.sleep(600)


def test_what_another_thread_started_outlives_the_thread():
    """The kernel would kill it with the thread."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe()
    child = context.Process(target=_wait, args=(send,))
    with orphans.children_die_with_this_process():
        thread = threading.Thread(target=child.start)
        thread.start()
        thread.join()
        assert receive.recv() == "begins"
        assert not multiprocessing.connection.wait([child.sentinel], 0.3)
    child.kill()
    child.join()


@pytest.mark.parametrize(("parent", "code"), [("own", 0), ("gone", -signal.SIGKILL), (None, 0)])
def test_a_process_whose_parent_has_gone_ends_as_it_begins(parent, code):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    numbers = {"own": os.getpid(), "gone": gone.pid}
    given = {"SEQUOIA_VLLM_PARENT": str(numbers[parent])} if parent else {}
    python("import sequoia_vllm", env={**os.environ, **given}, ends_with=code)


FAILING = """
import os, signal, threading, time
from sequoia_vllm import cli
from sequoia_vllm.measuring.interrupts import signals_end_this
def app():
    threading.Thread(target=time.sleep, args=(600,)).start()
    with signals_end_this(()):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(600)
        except KeyboardInterrupt:
            raise RuntimeError('clean-up failed') from None
cli.app = app
cli.main()
"""


def test_a_clean_up_that_fails_after_a_signal_does_not_keep_the_command():
    """A second interrupt may end vLLM's clean-up in any error; its threads would be waited for."""
    python(FAILING, ends_with=128 + signal.SIGINT)


# A command whose "engine" has a worker, an orphan that ignores SIGTERM, shared memory, a
# semaphore and temporary files.
WITH_FILES = """
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
        [sys.executable, "-c", WITH_FILES, "end" if number is None else "wait"],
        env={
            **os.environ, "TMPDIR": str(tmp_path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),  # else torch tells it, which takes its time
        },
        stdout=subprocess.PIPE, text=True, preexec_fn=in_the_background,
    )  # fmt: skip
    *pids, memory, folder = process.stdout.readline().split()
    pids, shared = [int(pid) for pid in pids], Path("/dev/shm", memory)
    assert len(pids) == 3
    if number is not None:
        assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
        assert shared.exists()
        assert list(Path(folder).iterdir())
        process.send_signal(number)
    assert process.wait(60) == code
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert list(tmp_path.glob("sequoia-*")) == []
    assert Path(folder).parent == tmp_path
    # Python's resource tracker removes it, just after the last process ended.
    wait_until(lambda: not shared.exists())


def test_other_children_are_left_alone():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with interrupts.engines_end_here():
            pass
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_signals_and_the_environment_are_as_before():
    def seen():
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        return handlers, dict(os.environ)

    def end_by_sigterm() -> None:
        with interrupts.engines_end_here():
            assert os.environ["SEQUOIA_VLLM_PARENT"] == str(os.getpid())
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    before = seen()
    with pytest.raises(interrupts.Terminated):
        end_by_sigterm()
    assert seen() == before


def test_a_later_commands_error_is_not_taken_for_the_signal(monkeypatch):
    """It ended test processes without a word: their next command that failed left by `os._exit`."""

    def end(code: int) -> None:
        pytest.fail(f"the process would have ended with {code}")

    def interrupted() -> None:
        with interrupts.engines_end_here():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    def fail() -> None:
        with ends_by_signal():
            raise SystemExit("error: no such file")

    monkeypatch.setattr(os, "_exit", end)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(interrupts.Terminated):
            interrupted()
        with pytest.raises(SystemExit, match="no such file"):
            fail()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
