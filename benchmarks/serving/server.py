"""One ``vllm serve``, the loads that it gets, and ``vllm bench serve`` against it."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from benchmarks import PROMPTS, TARGET
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.measuring.interrupts import engines_end_here
from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

_START_SECONDS = 600.0
BATCH = 16  # most requests that a server runs at once
PROMPT_TOKENS = {"short": 32, "long": 512}  # tokens of a prompt, by its kind


@dataclass(frozen=True)
class Load:
    """Requests that arrive by a Poisson process, ``rate`` per second, or all at once (infinite).
    The warm-up keeps ``running`` requests running, as the load will."""

    key: str
    title: str
    rate: float
    requests: int
    running: int
    prompts: str = "short"
    temperature: float = 0.0

    def options(self, folder: Path, tokens: int, warm_up: int | None = None) -> list[str]:
        """Options of ``vllm bench serve``; prompts lie in the folder, answers have these tokens. To
        warm up with so many, other prompts come, and each answer brings the next request."""
        requests, how = self.requests, [f"--request-rate={self.rate:g}"]
        if warm_up is not None:
            requests = math.ceil(warm_up / tokens)
            how = [f"--max-concurrency={self.running}", "--seed=1"]
        # vLLM reads files of this data set without pandas.
        return [
            "--dataset-name=sharegpt", f"--dataset-path={folder / self.prompts}.json",
            f"--sharegpt-output-len={tokens}", "--ignore-eos",
            f"--temperature={self.temperature:g}", "--percentile-metrics=ttft,tpot,itl,e2el",
            "--metric-percentiles=99", "--disable-tqdm", f"--num-prompts={requests}", *how,
        ]  # fmt: skip


def make_loads(rates: Sequence[float], requests: Sequence[float]) -> list[Load]:
    """All loads, in the order in which a server gets them.

    Args:
        rates: Arrivals per second with which 1 request runs, 4 run, and a full batch; and of
            requests with long prompts.
        requests: Their number at the first three rates, in the burst, at temperature 1, and with
            long prompts.
    """
    one, four, full, long = rates
    sent = [int(count) for count in requests]
    return [
        Load("one", f"{one:g} a second", one, sent[0], 1),
        Load("four", f"{four:g} a second", four, sent[1], 4),
        Load("full", f"{full:g} a second", full, sent[2], BATCH),
        Load("burst", f"{sent[3]} at once", math.inf, sent[3], BATCH),
        Load("sampled", f"{four:g} a second, T = 1", four, sent[4], 4, temperature=1.0),
        Load("long", f"{long:g} a second, long prompts", long, sent[5], 2, prompts="long"),
    ]


def server_options(tokens: int) -> list[str]:
    """Options of ``vllm serve``: room for `BATCH` of the longest requests, all prompts read."""
    longest = max(PROMPT_TOKENS.values()) + tokens + 64  # prompts are tokenized again
    return [
        f"--max-num-seqs={BATCH}", f"--max-model-len={longest}", "--max-num-batched-tokens=512",
        f"--kv-cache-memory-bytes={1 << 29}", "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def write_prompts(folder: Path) -> None:
    """Writes ``short.json`` and ``long.json`` for ``vllm bench serve``. The prompts in
    ``examples/models`` are one text: each begins where one of them does, and long ones go on with
    the next."""
    tokenizer = load_tokenizer(TARGET)
    encoded = encode_prompts(load_prompts(Path(PROMPTS), 200), tokenizer)
    for kind, length in PROMPT_TOKENS.items():
        following = (chain.from_iterable(encoded[start:]) for start in range(len(encoded)))
        cut = [list(islice(ids, length)) for ids in following]
        texts = tokenizer.batch_decode(
            [ids for ids in cut if len(ids) == length], skip_special_tokens=True
        )
        data = [{"conversations": [{"value": text}, {"value": ""}]} for text in texts]
        (folder / f"{kind}.json").write_text(json.dumps(data), encoding="utf-8")


class ServingError(SequoiaError, ValueError):
    """A server, a load or a setting that failed; the message says where to look."""


@contextmanager
def running_server(model: str, options: list[str], log: Path, trees: Path) -> Iterator[str]:
    """Starts ``vllm serve``, waits until it answers, yields its URL without a path, and ends it.

    Args:
        options: Of ``vllm serve``, besides model, host and port.
        log: The file that its output goes to.
        trees: The user's directory of trees that it reads and writes.

    Raises:
        ServingError: It ended, or did not answer in time.
    """
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
