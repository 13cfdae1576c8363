"""``python -m benchmarks.soak``: see the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchmarks.soak.random_requests import RandomRequest, random_requests

TARGET, DRAFT = "examples/models/target", "examples/models/draft"
_VOCABULARY = 4096
_AT_A_TIME = 200

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Seed = Annotated[int, typer.Option(help="Of the first requests; the next ones have the next.")]


@app.command()
def engine(
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 10_000,
    seed: Seed = 0,
    verification: Annotated[str, typer.Option(help="As in the configuration.")] = "sequoia",
) -> None:
    """Through engines in this process, with a KV cache too small for them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    from benchmarks.soak.in_engine import answers, differences, kv_cache_usage

    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8}
    # Plain vLLM stops on CPUs where a seeded prompt is read in chunks.
    plain = LLM(TARGET, max_num_batched_tokens=8192, kv_cache_memory_bytes=64 << 20, **common)
    ours = LLM(
        TARGET, max_num_batched_tokens=96, kv_cache_memory_bytes=12 << 20, block_size=32,
        speculative_config={
            "method": "sequoia", "model": DRAFT, "adapt": False, "verification": verification,
            "tree": {"size": 16, "depth": 4},
        },
        **common,
    )  # fmt: skip
    sent = found = 0
    process = psutil.Process()
    for batch in _batches(requests, seed):
        different = differences(ours, batch, answers(plain, batch, leaving=False))
        sent += len(batch)
        found += len(different)
        typer.echo(
            f"{sent} requests, {found} different, KV cache in use "
            f"{kv_cache_usage(ours):.0%}, {process.memory_info().rss / 2**20:.0f} MiB"
        )
        for request in different:
            typer.echo(str(request))
    raise typer.Exit(code=int(found > 0))


@app.command()
def server(
    url: Annotated[str, typer.Option(help="Of the server with Sequoia.")],
    plain_url: Annotated[str, typer.Option(help="Of one without, otherwise the same.")],
    model: Annotated[str, typer.Option(help="Its name on both.")] = TARGET,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 10_000,
    seed: Seed = 0,
) -> None:
    """Through ``vllm serve``, some streamed and left; both servers listen on this machine."""
    from benchmarks.soak.over_http import Endpoint, Tally, compare_all

    ours, plain, tally = Endpoint(url, model), Endpoint(plain_url, model), Tally()
    emitted = ours.metric("vllm:generation_tokens_total")
    listener = _listener(url)
    typer.echo(f"{_memory(listener) / 2**20:.0f} MiB before")
    for batch in _batches(requests, seed):
        compare_all(ours, plain, batch, tally)
        typer.echo(
            f"{tally.answered} answered, {tally.left} left, {len(tally.different)} different, "
            f"{len(tally.hung)} hung, {tally.tokens} tokens returned of "
            f"{ours.metric('vllm:generation_tokens_total') - emitted:.0f} generated, "
            f"{ours.metric('vllm:num_preemptions_total'):.0f} preemptions, "
            f"{_memory(listener) / 2**20:.0f} MiB"
        )
    for request in (*tally.different, *tally.hung):
        typer.echo(str(request))
    raise typer.Exit(code=int(bool(tally.different or tally.hung)))


def _batches(requests: int, seed: int) -> Iterator[list[RandomRequest]]:
    """So many, a part at a time."""
    for first in range(0, requests, _AT_A_TIME):
        count = min(_AT_A_TIME, requests - first)
        yield random_requests(_prompts(), count, seed + first // _AT_A_TIME, _VOCABULARY)


def _prompts() -> list[str]:
    from sequoia_vllm.prompts import load_prompts

    loaded = load_prompts(Path("examples/models/prompts.jsonl"), 32)
    return [prompt.prompt for prompt in loaded if prompt.prompt is not None]


def _listener(url: str) -> psutil.Process:
    """The process that listens there."""
    port = int(url.rsplit(":", 1)[1])
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if listens and connection.pid:
            return psutil.Process(connection.pid)
    raise typer.BadParameter(f"no process of this machine listens at {url}")


def _memory(process: psutil.Process) -> int:
    """Memory of a process and of those that it started, in bytes."""
    family = [process, *process.children(recursive=True)]
    return sum(member.memory_info().rss for member in family)


if __name__ == "__main__":
    app()
