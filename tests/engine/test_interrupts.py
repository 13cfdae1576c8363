"""Real engines end with their command, at whatever moment it is interrupted."""

import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.ending import ENDED, in_the_background, still_there, wait_until
from tests.support.serving import DRAFT, ROOT, TARGET, environment

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

OURS = str(Path(sys.executable).with_name("sequoia-vllm"))
PAIR = "--model", TARGET, "--draft-model", DRAFT
TUNE = OURS, "tune", *PAIR, "--dtype", "float32", "--kv-cache-gib", "0.1", "--eager"
SECONDS_TO_BEGIN = 400.0


def has_worker(process: psutil.Process, log: Path) -> bool:
    """Whether the engine core runs, and its worker."""
    lines = [" ".join(one.cmdline()) for one in process.children(recursive=True)]
    return sum("spawn_main" in line or "VLLM::" in line for line in lines) > 1


def has_answered(process: psutil.Process, log: Path) -> bool:
    return b"tokens/s" in log.read_bytes()


@pytest.mark.parametrize(
    ("command", "has_processes", "moment", "number"),
    [
        (TUNE, "1", has_worker, signal.SIGTERM),
        (TUNE, "1", has_worker, signal.SIGKILL),
        ((OURS, "demo", *PAIR, "--chain", "2"), "0", has_answered, signal.SIGTERM),
    ],
)
def test_engines_end(tmp_path, command, has_processes, moment, number):
    """While an engine starts; and in the demo's process, after its first answer."""
    log, mark = tmp_path / "log", f"SEQUOIA_TEST_{uuid.uuid4().hex}"
    places = ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "SEQUOIA_VLLM_TREES")
    own = {name: str(tmp_path / name) for name in places}
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": has_processes, mark: ""}
    with log.open("wb") as output:
        process = psutil.Popen(
            command, cwd=ROOT, env={**environment(), **own}, stdout=output, stderr=output,
            preexec_fn=in_the_background,
        )  # fmt: skip
    known: list[psutil.Process] = []

    def has_come() -> bool:
        assert process.poll() is None, "the command ended by itself"
        with suppress(psutil.NoSuchProcess):  # a process below it has just ended
            return moment(process, log)
        return False

    try:
        wait_until(has_come, SECONDS_TO_BEGIN, "the moment", 0.1)
        time.sleep(0.5)
        assert process.poll() is None, log.read_text()
        known = process.children(recursive=True)
        process.send_signal(number)
        assert process.wait(60) in ENDED[number], log.read_text()
        wait_until(lambda: not still_there(mark, known), 60, "the end of all its processes", 0.05)
    finally:
        for one in still_there(mark, known):
            one.kill()
