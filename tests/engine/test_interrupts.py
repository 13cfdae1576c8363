"""Real engines end with their command within ten seconds, at whatever moment a signal comes."""

import random
import signal
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.ending import (
    ENDED,
    in_the_background,
    in_the_foreground,
    still_there,
    wait_until,
)
from tests.support.serving import DRAFT, ROOT, TARGET, environment, wait_for_end

pytestmark = pytest.mark.engine

OURS = str(Path(sys.executable).with_name("sequoia-vllm"))
PAIR = "--model", TARGET, "--draft-model", DRAFT
OF_ENGINES = "--dtype", "float32", "--kv-cache-gib", "0.1", "--eager"
# All that start engines. Any of them works for longer than these tests wait.
COMMANDS = {
    "tune": (OURS, "tune", *PAIR, *OF_ENGINES),
    "bench": (OURS, "bench", *PAIR, *OF_ENGINES),
    "demo": (OURS, "demo", *PAIR, "--num-prompts", "16", "--max-tokens", "64"),
    "draft-data": (
        sys.executable, "examples/train_drafter", "draft-data", "--target", TARGET, "--out",
        "{folder}/data",
    ),
}  # fmt: skip
SECONDS_TO_BEGIN = 400.0
SECONDS_TO_END = 10.0


def logs(words: str) -> Callable[[psutil.Process, Path], bool]:
    return lambda process, log: words.encode() in log.read_bytes()


def has_worker(process: psutil.Process, log: Path) -> bool:
    """Whether the engine core runs, and its worker."""
    lines = [" ".join(one.cmdline()) for one in process.children(recursive=True)]
    return sum("spawn_main" in line or "VLLM::" in line for line in lines) > 1


# What vLLM's first engine does, by its log.
MOMENTS = {
    "imports": logs(""),
    "starts": logs("Initializing a V1 LLM engine"),
    "profiles": logs("Loading weights took"),
    "works": logs("init engine (profile"),
}


def seconds_to_end(
    command: str, processes: str, moment: Callable[[psutil.Process, Path], bool], seconds: float,
    number: signal.Signals, folder: Path, begin: Callable[[], None] = in_the_background,
) -> float:  # fmt: skip
    """Interrupts a command so long after a moment; seconds until all its processes had ended.

    Args:
        processes: What `VLLM_ENABLE_V1_MULTIPROCESSING` is. "0": engines run in the command's
            process, the default on CPUs of all but `tune`. "1": each has a core and a worker.
    """
    log, mark = folder / "log", f"SEQUOIA_TEST_{uuid.uuid4().hex}"
    places = ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "SEQUOIA_VLLM_TREES")
    own = {name: str(folder / name) for name in places}
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": processes, mark: ""}
    with log.open("wb") as output:
        process = psutil.Popen(
            [word.format(folder=folder) for word in COMMANDS[command]],
            cwd=ROOT, env={**environment(), **own}, stdout=output, stderr=output,
            preexec_fn=begin,
        )  # fmt: skip
    known: list[psutil.Process] = []

    def has_come() -> bool:
        assert process.poll() is None, f"the command ended by itself: {log.read_text()}"
        with suppress(psutil.NoSuchProcess):  # a process below it has just ended
            return moment(process, log)
        return False

    try:
        wait_until(has_come, SECONDS_TO_BEGIN, "the moment", 0.1)
        time.sleep(seconds)
        assert process.poll() is None, log.read_text()
        known, began = process.children(recursive=True), time.monotonic()
        process.send_signal(number)
        assert process.wait(60) in ENDED[number], log.read_text()
        wait_for_end(known, 60)
        took = time.monotonic() - began
        # Looking at all processes of a busy machine takes seconds by itself.
        wait_until(lambda: not still_there(mark, known), 60, "the end of all its processes", 0.05)
        return took
    finally:
        for one in still_there(mark, known):
            one.kill()


@pytest.mark.sharded
@pytest.mark.parametrize(
    ("command", "processes", "moment", "number"),
    [
        ("tune", "1", has_worker, signal.SIGTERM),
        ("tune", "1", has_worker, signal.SIGKILL),
        ("demo", "0", logs("tokens/s"), signal.SIGTERM),
    ],
)
def test_engines_end(tmp_path, command, processes, moment, number):
    """While an engine starts; and in the demo's process, after its first answer."""
    took = seconds_to_end(command, processes, moment, 0.5, number, tmp_path)
    assert took < SECONDS_TO_END


# The first four have each command and each moment once.
IN_SHARDS = [pytest.param(seed, marks=pytest.mark.sharded) for seed in range(4, 10)]


@pytest.mark.parametrize("seed", [*range(4), *IN_SHARDS])
def test_random_moments(tmp_path, seed):
    """Each command meets both signals. Engines run where users' do on CPUs, then as on GPUs."""
    rng = random.Random(seed)
    round_, place = divmod(seed, len(COMMANDS))
    command, number = list(COMMANDS)[place], (signal.SIGINT, signal.SIGTERM)[round_ % 2]
    moment, seconds = list(MOMENTS)[(place + round_) % len(MOMENTS)], rng.uniform(0, 4)
    processes = "1" if command == "tune" or round_ == 2 else "0"
    begin = in_the_foreground if moment == "imports" else in_the_background
    took = seconds_to_end(command, processes, MOMENTS[moment], seconds, number, tmp_path, begin)
    print(f"{command} ({processes}), {moment} + {seconds:.1f} s, {number.name}: {took:.1f} s")
    assert took < SECONDS_TO_END
