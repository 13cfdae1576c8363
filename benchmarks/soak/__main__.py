"""``python -m benchmarks.soak``: see the package."""

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


@app.callback()
def soak() -> None:
    """Send random requests, as users mix them, through Sequoia and plain vLLM."""


@app.command()
def engine(
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the first requests; others have the next.")] = 0,
    verification: Annotated[str, typer.Option(help="As in the configuration.")] = "sequoia",
    model: Annotated[str, typer.Option(help="Folder of the target.")] = TARGET,
    draft_model: Annotated[str, typer.Option(help="Folder of the draft.")] = DRAFT,
    kv_cache: Annotated[int, typer.Option(help="MiB of ours; SmolLM2 needs 40.", min=1)] = 12,
) -> None:
    """Through engines in this process, with a KV cache too small for them."""
    plain = _plain(model)
    ours = _ours(model, draft_model, verification, kv_cache)
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


_COMMON = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
    "disable_log_stats": False,
}  # fmt: skip


def _plain(model: str) -> Any:
    """Plain vLLM with memory for all; it stops on CPUs where a seeded prompt is read in chunks."""
    from vllm import LLM

    return LLM(model, max_num_batched_tokens=8192, kv_cache_memory_bytes=512 << 20, **_COMMON)


def _ours(model: str, draft_model: str, verification: str, kv_cache: int) -> Any:
    """Sequoia with a KV cache of so many MiB."""
    from vllm import LLM

    return LLM(
        model, max_num_batched_tokens=96, kv_cache_memory_bytes=kv_cache << 20,
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


if __name__ == "__main__":
    app()
