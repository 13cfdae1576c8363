"""``python -m benchmarks.soak``: see the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

import psutil
import typer

from benchmarks.embedded_pair import DRAFT, TARGET
from benchmarks.soak.random_requests import RandomRequest, random_requests

_AT_A_TIME = 200
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
Seed = Annotated[int, typer.Option(help="Of the first requests; the next ones have the next.")]
Model = Annotated[str, typer.Option(help="Folder of the target.")]
DraftModel = Annotated[str, typer.Option(help="Folder of the draft.")]
Verification = Annotated[str, typer.Option(help="As in the configuration.")]
KvCache = Annotated[int, typer.Option(help="MiB of ours; SmolLM2 needs 40.", min=1)]


@app.command()
def engine(
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 10_000,
    seed: Seed = 0,
    verification: Verification = "sequoia",
    model: Model = TARGET,
    draft_model: DraftModel = DRAFT,
    kv_cache: KvCache = 12,
) -> None:
    """Through engines in this process, with a KV cache too small for them."""
    plain = _plain(model, "float32")
    ours = _ours(model, draft_model, verification, "float32", kv_cache)
    from benchmarks.soak.in_engine import answers, differences, kv_cache_usage

    sent = found = 0
    process = psutil.Process()
    for batch in _batches(requests, seed, model):
        different = differences(ours, batch, answers(plain, batch, leaving=False))
        sent += len(batch)
        found += len(different)
        typer.echo(
            f"{sent} requests, {found} different, KV cache in use "
            f"{kv_cache_usage(ours):.0%}, {process.memory_info().rss / 2**20:.0f} MiB, "
            + ", ".join(f"{value:.0f} {name}" for name, value in _counters(ours).items())
        )
        for request in different:
            typer.echo(str(request))
    raise typer.Exit(code=int(found > 0))


@app.command()
def rounding(
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 200,
    seed: Seed = 0,
    verification: Verification = "sequoia",
    model: Model = TARGET,
    draft_model: DraftModel = DRAFT,
    kv_cache: KvCache = 12,
    dtype: Annotated[str, typer.Option(help="vLLM's, of both models.")] = "bfloat16",
) -> None:
    """Count answers that rounding changes: ours, and plain vLLM's own.

    Plain vLLM's are those to the same requests in another order, and those in float32.
    """
    plain, ours = _plain(model, dtype), _ours(model, draft_model, verification, dtype, kv_cache)
    exact = _plain(model, "float32")
    from benchmarks.soak.in_engine import answers, first_difference, lead_of_the_best

    counts = dict.fromkeys(
        ("ours", "another order", "float32", "ours from float32"), 0
    )  # of answers that differ
    for batch in _batches(requests, seed, model):
        expected, real = (answers(llm, batch, leaving=False) for llm in (plain, exact))
        found = answers(ours, batch, leaving=False)
        again = answers(plain, batch[::-1], leaving=False)
        for request in batch:
            number = request.number
            differences = {
                "ours": first_difference(found[number], expected[number]),
                "another order": first_difference(again[number], expected[number]),
                "float32": first_difference(real[number], expected[number]),
                "ours from float32": first_difference(found[number], real[number]),
            }
            for name, place in differences.items():
                counts[name] += place is not None
            if (place := differences["ours"]) is None:
                continue
            lead = lead_of_the_best(plain, request, expected[number], *place)
            typer.echo(
                f"request {number}, temperature {request.parameters['temperature']}: differs from "
                f"token {place[1]} on"
                + ("" if lead is None else f", where the best leads {lead:.4f}")
            )
        typer.echo(f"{len(batch)} requests, different: {counts}")


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
    for batch in _batches(requests, seed, model):
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


_COMMON = {
    "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "disable_log_stats": False,
}  # fmt: skip


def _plain(model: str, dtype: str) -> Any:
    """Plain vLLM with memory for all; it stops on CPUs where a seeded prompt is read in chunks."""
    from vllm import LLM

    return LLM(
        model, dtype=dtype, max_num_batched_tokens=8192, kv_cache_memory_bytes=512 << 20, **_COMMON
    )


def _ours(model: str, draft_model: str, verification: str, dtype: str, kv_cache: int) -> Any:
    """Sequoia with a KV cache of so many MiB."""
    from vllm import LLM

    return LLM(
        model, dtype=dtype, max_num_batched_tokens=96, kv_cache_memory_bytes=kv_cache << 20,
        block_size=32,
        speculative_config={
            "method": "sequoia", "model": draft_model, "adapt": False,
            "verification": verification, "tree": {"size": 16, "depth": 4},
        },
        **_COMMON,
    )  # fmt: skip


def _counters(llm: Any) -> dict[str, float]:
    """What an engine has counted of its trees and its KV cache."""
    names = {
        "sequoia:trees": "trees", "sequoia:emitted_tokens": "tokens from them",
        "vllm:num_preemptions": "preemptions",
    }  # fmt: skip
    found = llm.get_metrics()
    return {
        word: sum(one.value for one in found if one.name == name) for name, word in names.items()
    }


def _batches(requests: int, seed: int, model: str) -> Iterator[list[RandomRequest]]:
    """So many, a part at a time."""
    from transformers import AutoConfig

    from benchmarks.soak.chats import prompts_for

    prompts, vocabulary = prompts_for(model), AutoConfig.from_pretrained(model).vocab_size
    for first in range(0, requests, _AT_A_TIME):
        count = min(_AT_A_TIME, requests - first)
        yield random_requests(prompts, count, seed + first // _AT_A_TIME, vocabulary)


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
