"""The real ``vllm serve`` as a process, and the openai client to call it with."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.quick_start.quick_imports import FORK_ENGINES
from tests.support.ending import wait_until

ROOT = Path(__file__).parents[2]
TARGET = "examples/models/target"
DRAFT = "examples/models/draft"
VLLM = Path(sys.executable).with_name("vllm")

OPTIONS = (
    "--host=127.0.0.1", "--dtype=float32", "--enforce-eager", "--max-model-len=512",
    "--max-num-seqs=8", "--kv-cache-memory-bytes=67108864",
)  # fmt: skip
# A kept connection may be closed by the server just as it is used again.
FRESH = {"Connection": "close"}
START_DEADLINE = 240.0  # seconds; an idle two-core machine needs 20
STOP_DEADLINE = 60.0  # an idle one needs 1, or 7 to drain a request first


def environment(forks: bool = False) -> dict[str, str]:
    """This process's, less what the in-process engine tests, and their engines, left in it.

    `forks`: a server forks its engine, which is quicker; else it spawns it, as users' do on CPUs.
    """
    theirs = ("VLLM_", "TORCHINDUCTOR_")
    return {key: value for key, value in os.environ.items() if not key.startswith(theirs)} | {
        "OMP_NUM_THREADS": "1",
        # True, as 1 is; but for 1 vLLM gives a lone rank on a CPU a process beside its engine's.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server pins itself to core 0
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        FORK_ENGINES: "1" if forks else "",
    }


def free_port() -> int:
    """A port of this machine, and not one that it gives to others until a server listens there."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return free.getsockname()[1]


def http_client(url: str = "", timeout: float = 5) -> httpx.Client:
    """To be kept: making one takes as long as a hundred requests."""
    return httpx.Client(base_url=url, headers=FRESH, trust_env=False, timeout=timeout)


class Session:
    """A command in a session of its own, by which all that it starts are known."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, directory: Path = ROOT
    ) -> None:
        self.log_file = log
        with log.open("wb") as output:
            self.process = psutil.Popen(
                command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def tail(self) -> str:
        return "the end of the log:\n" + self.log[-8000:]

    def family(self) -> list[psutil.Process]:
        """All processes of the session that have not ended."""
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and not has_ended(process):
                    found.append(process)
        return found

    def check_running(self) -> bool:
        """False, so that it can be said while waiting for something."""
        if self.process.poll() is not None:
            raise AssertionError(f"ended with status {self.process.returncode}; {self.tail}")
        return False

    def kill(self) -> None:
        while family := self.family():  # again, for those that were started meanwhile
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=1)
        self.process.wait()


class Server(Session):
    """One ``vllm serve`` process, with those that it starts.

    As a context it is healthy within, and killed behind it.
    `variables`: its environment, if not that of a machine without a GPU; then all
    of its options are given. For `forks` see `environment`.
    """

    def __init__(
        self, log: Path, *options: str, model: str = TARGET,
        variables: dict[str, str] | None = None, forks: bool = False,
        start_deadline: float = START_DEADLINE,
    ) -> None:  # fmt: skip
        port, self.start_deadline = free_port(), start_deadline
        common = OPTIONS if variables is None else ("--host=127.0.0.1",)
        if variables is None:
            variables = environment(forks)
        self.model = model
        self.url = f"http://127.0.0.1:{port}"
        self.openai_options: dict[str, Any] = {
            "base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0,
            "default_headers": FRESH,
        }  # fmt: skip
        command = [str(VLLM), "serve", model, f"--port={port}", *common, *options]
        super().__init__(command, variables, log)

    def __enter__(self) -> "Server":
        try:
            self.wait_until_healthy()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    def fail(self, what: str) -> NoReturn:
        raise AssertionError(f"{what}; {self.tail}")

    def wait_until_healthy(self) -> None:
        def is_healthy() -> bool:
            with suppress(httpx.TransportError):
                return self._http.get("/health").status_code == 200
            return False

        wait_until(
            lambda: self.check_running() or is_healthy(), self.start_deadline,
            "the start of vllm serve", 0.2,
        )  # fmt: skip

    def wait_until_idle(self, seconds: float = 120) -> None:
        """Until no request is left, and none holds any of the KV cache."""
        names = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"

        def is_idle() -> bool:
            values = [one.value for one in self.samples() if one.name in names]
            return len(values) >= len(names) and not any(values)

        wait_until(is_idle, seconds, "the end of all requests", 0.1)

    @cached_property
    def _http(self) -> httpx.Client:
        return http_client(self.url, timeout=30)  # a starved machine answers late

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            **self.openai_options,
            timeout=120,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # no proxy to localhost
        )

    def complete(self, **request):
        return self.client.completions.create(model=self.model, **request)

    def samples(self) -> list[Sample]:
        """Everything that ``/metrics`` lists."""
        text = self._http.get("/metrics").raise_for_status().text
        families = text_string_to_metric_families(text)
        return [sample for family in families for sample in family.samples]

    def metric(self, name: str) -> list[float]:
        """The values of ``name``, in the order in which ``/metrics`` lists them."""
        return [sample.value for sample in self.samples() if sample.name == name]

    def stop(self, signal_number: signal.Signals) -> None:
        """Sends the signal, then checks the end as `check_clean_end` does."""
        family = self.process.children(recursive=True)
        assert len(family) >= 2, "engine cores or their workers were expected"
        self.process.send_signal(signal_number)
        self.check_clean_end(family)

    def check_clean_end(self, family: list[psutil.Process]) -> None:
        """The server ends in time with status 0, without orphans or unexpected tracebacks."""
        deadline = time.monotonic() + STOP_DEADLINE
        try:
            status = self.process.wait(STOP_DEADLINE)
        except psutil.TimeoutExpired:
            self.fail(f"still running {STOP_DEADLINE:.0f} s after the signal")
        if status != 0:
            self.fail(f"vllm serve ended with exit status {status}")
        if orphans := wait_for_end(family, deadline - time.monotonic()):
            self.fail(f"the server left processes behind: {orphans}")
        if trouble := unexpected_tracebacks(self.log):
            self.fail(trouble)


def has_ended(process: psutil.Process) -> bool:
    """Also true of a zombie: in a container without an init nobody collects orphans."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Processes that still run after at most so many seconds."""
    deadline = time.monotonic() + seconds
    while running := [process for process in processes if not has_ended(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return running


def unexpected_tracebacks(log: str) -> str | None:
    """What is wrong with this log of a server that was told to end, if anything.

    vLLM's API server races with its own engine client there, and now and then
    logs an `EngineDeadError` of its output handler, also without speculation.
    """
    running, triggered, ending = log.partition("[shutdown] API server: shutdown triggered")
    if not triggered:
        return "the log does not mention the shutdown"
    if "Traceback (most recent call last)" in running:
        return "there is a traceback in the server's log"
    of_vllm = ending.count("vllm.v1.engine.exceptions.EngineDeadError: ")
    if ending.count("Traceback (most recent call last)") != of_vllm or "sequoia_vllm" in ending:
        return "there is a traceback in the log of the server's shutdown"
    return None
