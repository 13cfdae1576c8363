"""Real engines end with their command, at whatever moment it is interrupted.

``SEQUOIA_VLLM_MOMENTS=10`` adds ten random moments, with compilation, of all commands that start
engines.
"""

import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.ending import ENDED, in_the_background, still_there
from tests.support.serving import DRAFT, ROOT, TARGET, environment

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

RANDOM_MOMENTS = int(os.environ.get("SEQUOIA_VLLM_MOMENTS", "0"))
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
OURS = str(Path(sys.executable).with_name("sequoia-vllm"))
PAIR = "--model", TARGET, "--draft-model", DRAFT
OF_ENGINE = "--dtype", "float32", "--kv-cache-gib", "0.1"
# What follows the last word of each is a place in a folder of the test's.
COMMANDS = {
    "tune": (OURS, "tune", "--quick", *PAIR, *OF_ENGINE, "--prompts"),
    "bench": (OURS, "bench", *PAIR, *OF_ENGINE, "--output"),
    "demo": (OURS, "demo", *PAIR, "--prompts"),
    "draft-data": (
        sys.executable, "examples/train_drafter", "draft-data", "--target", TARGET, "--out",
    ),
}  # fmt: skip
WITH_A_WORKER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
WITHIN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # as the demo's own on CPUs
SECONDS_TO_END = 10.0
SECONDS_TO_BEGIN = 400.0


def spawned(process: psutil.Process) -> list[psutil.Process]:
    """Processes below this one: the engine core, then its worker."""
    found = []
    for one in process.children(recursive=True):
        words = " ".join(one.cmdline())
        if "spawn_main" in words or "VLLM::" in words:
            found.append(one)
    return found


def compiles(process: psutil.Process) -> bool:
    return any(one.name() == "cc1plus" for one in process.children(recursive=True))


MOMENTS: dict[str, Callable[[psutil.Process, Path], bool]] = {
    "imports": lambda process, output: True,
    "engine core": lambda process, output: len(spawned(process)) > 0,
    "worker": lambda process, output: len(spawned(process)) > 1,
    "compilation": lambda process, output: compiles(process),
    "measuring": lambda process, output: any(output.parent.rglob("acceptance.json")),
    "an answer": lambda process, output: b"tokens/s" in output.with_name("log").read_bytes(),
}


def wait_for(moment: str, process: psutil.Process, output: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_BEGIN
    while True:
        try:
            if MOMENTS[moment](process, output):
                return
        except psutil.NoSuchProcess:  # a process below it has just ended
            pass
        assert process.poll() is None, "the command ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def interrupt(
    command: str, folder: Path, moment: str, seconds: float, number: signal.Signals, *options: str
) -> float:
    """Interrupts the command so long after the moment; seconds until all of it had ended."""
    output, mark = folder / "output.jsonl", f"SEQUOIA_TEST_{uuid.uuid4().hex}"
    if command in ("demo", "tune"):
        output.write_text(Path(ROOT, "examples/models/prompts.jsonl").read_text())
    processes = WITHIN if moment == "an answer" else WITH_A_WORKER
    places = ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "SEQUOIA_VLLM_TREES")
    caches = {name: str(folder / name) for name in places}
    with (folder / "log").open("wb") as log:
        process = psutil.Popen(
            [*COMMANDS[command], output, *options],
            cwd=ROOT, env={**environment(), **processes, **caches, mark: ""},
            stdout=log, stderr=log, preexec_fn=in_the_background,
        )  # fmt: skip
    known: list[psutil.Process] = []
    try:
        wait_for(moment, process, output)
        time.sleep(seconds)
        assert process.poll() is None, (folder / "log").read_text()
        known, began = process.children(recursive=True), time.monotonic()
        process.send_signal(number)
        assert process.wait(60) in ENDED[number], (folder / "log").read_text()
        while left := still_there(mark, known):
            assert time.monotonic() < began + 60, left
            time.sleep(0.05)
        return time.monotonic() - began
    finally:
        for one in still_there(mark, known):
            one.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_while_an_engine_starts(tmp_path, number):
    interrupt("tune", tmp_path, "worker", 0.5, number, "--eager")


def test_the_demo_ends_with_the_engines_in_its_process(tmp_path):
    interrupt("demo", tmp_path, "an answer", 0.5, signal.SIGTERM, "--chain", "2")


@pytest.mark.parametrize("seed", range(RANDOM_MOMENTS))
def test_random_moments(tmp_path, seed):
    rng = random.Random(seed)
    command, number = list(COMMANDS)[seed % len(COMMANDS)], rng.choice(SIGNALS)
    # Only tune's output tells that it measures; others do within 20 seconds of their worker.
    moment = rng.choice(list(MOMENTS)[: 5 if command == "tune" else 3])
    seconds = rng.uniform(0, 5 if command == "tune" else 20)
    took = interrupt(command, tmp_path, moment, seconds, number)
    print(f"{command}, {moment} + {seconds:.1f} s, {number.name}: all ended after {took:.1f} s")
    # A compiler ends by itself after its engine was killed.
    assert took < SECONDS_TO_END or (moment == "compilation" and number == signal.SIGKILL)
