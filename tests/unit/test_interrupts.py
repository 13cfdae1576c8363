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

import pytest

from sequoia_vllm import orphans
from sequoia_vllm.measuring import interrupts
from sequoia_vllm.measuring.interrupts import Terminated, interrupts_get_through, processes_end_here
from tests.support.ending import ENDED, still_there

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
        env={**os.environ, mark: "", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "begins\n"
        time.sleep(rng.uniform(0, 2))
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) in ENDED[number]
        deadline = time.monotonic() + 60
        while still_there(mark):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for left in still_there(mark):
            left.kill()
        process.wait()


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
    with processes_end_here(), interrupts_get_through():
        with suppress(KeyboardInterrupt):  # as vLLM's zmq_socket_ctx
            os.kill(os.getpid(), number)
            time.sleep(60)
        waited.append("for ever")


def test_a_signal_while_engines_end_ends_the_command(monkeypatch):
    """It must not get lost: the next engine would start."""
    monkeypatch.setattr(
        interrupts, "end_processes", lambda spared: os.kill(os.getpid(), signal.SIGTERM)
    )
    ended = []
    with pytest.raises(Terminated):
        _end(ended)
    assert ended == ["the block"]


def _end(ended: list[str]) -> None:
    with processes_end_here():
        ended.append("the block")


def test_signals_of_forks_are_theirs(monkeypatch):
    killed = []
    monkeypatch.setattr(interrupts, "SECONDS_TO_END", 0.0)
    monkeypatch.setattr(interrupts, "kill_processes", killed.append)
    with processes_end_here():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join()
        time.sleep(0.3)
    assert child.exitcode == -signal.SIGTERM
    assert interrupts._Signals.first is None
    assert killed == []


# -- processes that die with their parent --------------------------------------------


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
    number = {"own": os.getpid(), "gone": gone.pid, None: None}[parent]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), **os.environ}
    if number is not None:
        environment["SEQUOIA_VLLM_PARENT"] = str(number)
    command = [sys.executable, "-c", "import sequoia_vllm"]
    assert subprocess.run(command, env=environment, check=False).returncode == code


def test_the_environment_is_as_before():
    before = dict(os.environ)
    with processes_end_here():
        assert os.environ.get("SEQUOIA_VLLM_PARENT") == str(os.getpid())
    assert dict(os.environ) == before


def test_a_clean_up_that_fails_after_a_signal_does_not_keep_the_command():
    """A second interrupt may end vLLM's clean-up in any error; its threads would be waited for."""
    code = (
        "import os, signal, threading, time\n"
        "from sequoia_vllm import cli\n"
        "from sequoia_vllm.measuring.interrupts import signals_end_this\n"
        "def app():\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    with signals_end_this(()):\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            time.sleep(600)\n"
        "        except KeyboardInterrupt:\n"
        "            raise RuntimeError('clean-up failed') from None\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert ended.returncode == 128 + signal.SIGINT
