"""One ``vllm serve``, from its start to its end, and ``vllm bench serve`` against it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.measuring.interrupts import engines_end_here

_START_SECONDS = 600.0


class ServingError(SequoiaError, ValueError):
    """A server, a load or a setting that failed; the message says where to look."""


@contextmanager
def running_server(model: str, options: list[str], log: Path, trees: Path) -> Iterator[str]:
    """Starts ``vllm serve``, waits until it answers, yields its URL without a path, and ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, *options]
    with engines_end_here(), log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host=127.0.0.1", f"--port={port}"],
            env=server_environment(trees), stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _wait_until_healthy(url := f"http://127.0.0.1:{port}", process, log)
        yield url


def bench_serve(options: list[str], log: Path) -> dict[str, Any]:
    """Runs ``vllm bench serve`` in this process, as a new one takes both cores for ten seconds;
    returns its JSON object, without single requests."""
    with log.open("a") as output, redirect_stdout(output), redirect_stderr(output):
        from vllm.benchmarks.serve import add_cli_args, main
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        result: dict[str, Any] = main(parser.parse_args(options))
    if result["failed"]:
        raise ServingError(f"{result['failed']} requests failed: see the end of {log}")
    return result


def server_environment(trees: Path) -> dict[str, str]:
    """This process's, with Intel's OpenMP where it is installed, on all cores we may use."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {
        "LD_PRELOAD": str(openmp) if openmp.exists() else "",
        # By itself vLLM would leave a core to the scheduler.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        **os.environ,
        "SEQUOIA_VLLM_TREES": str(trees),
    }


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    import httpx

    deadline = time.monotonic() + _START_SECONDS
    with httpx.Client(trust_env=False, timeout=5) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            time.sleep(0.5)
    raise ServingError(f"vllm serve did not start: see the end of {log}")
