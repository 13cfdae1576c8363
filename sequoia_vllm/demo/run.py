"""Runs one engine over the demo's prompts and measures it."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DemoSettings:
    """What the demo runs.

    Attributes:
        target, draft: Model names or paths.
        prompts: Texts to continue.
        max_tokens: Tokens per completion.
        tree_size, tree_depth: Sequoia's tree.
        chain_length: Drafts of vLLM's chain speculation.
        batch_size: Requests at once.
        dtype: Of weights and activations.
        eager: Without compilation.
    """

    target: str
    draft: str
    prompts: tuple[str, ...]
    max_tokens: int
    tree_size: int
    tree_depth: int
    chain_length: int
    batch_size: int
    dtype: str
    eager: bool


@dataclass(frozen=True)
class EngineRun:
    """What one engine did.

    Attributes:
        name: Which engine.
        texts: Completions.
        token_ids: Their tokens.
        seconds: Wall time of generating them, after a warm-up.
        tokens_per_step: Tokens per request and step of the target.
        stats: Sequoia's counters (`StepStats.to_dict`), None for the others.
    """

    name: str
    texts: list[str]
    token_ids: list[list[int]]
    seconds: float
    tokens_per_step: float
    stats: dict[str, Any] | None

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time."""
        return sum(map(len, self.token_ids)) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the rate."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def speculative_configs(settings: DemoSettings) -> dict[str, dict[str, Any] | None]:
    """The engines to compare, by name."""
    return {
        "plain vLLM": None,
        "vLLM chain": {
            "method": "draft_model",
            "model": settings.draft,
            "num_speculative_tokens": settings.chain_length,
        },
        "Sequoia": {
            "method": "sequoia",
            "model": settings.draft,
            "tree": {"size": settings.tree_size, "depth": settings.tree_depth},
        },
    }


def load_prompts(path: Path, count: int) -> tuple[str, ...]:
    """The first prompts of a ``.jsonl`` file with a "prompt" per line."""
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    return tuple(json.loads(line)["prompt"] for line in lines)


def run_engine(name: str, settings: DemoSettings) -> EngineRun:
    """Starts one engine, warms it up, and generates the completions greedily."""
    from vllm import LLM, SamplingParams

    speculative_config = speculative_configs(settings)[name]
    llm = LLM(
        model=settings.target,
        speculative_config=speculative_config,
        dtype=settings.dtype,
        enforce_eager=settings.eager,
        max_model_len=1024,
        max_num_seqs=settings.batch_size,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=512 << 20,
        disable_log_stats=False,
        seed=0,
    )
    greedy = SamplingParams(temperature=0, max_tokens=settings.max_tokens, ignore_eos=True)
    prompts = list(settings.prompts)
    llm.generate(prompts[: settings.batch_size], greedy, use_tqdm=False)
    is_sequoia = name == "Sequoia"
    if is_sequoia:
        llm.collective_rpc("sequoia_stats", args=(True,))
    before = _counters(llm)
    start = time.perf_counter()
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    drafts, accepted = (now - then for now, then in zip(_counters(llm), before, strict=True))
    run = EngineRun(
        name=name,
        texts=[output.outputs[0].text for output in outputs],
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        seconds=seconds,
        tokens_per_step=1 + accepted / drafts if drafts else 1.0,
        stats=llm.collective_rpc("sequoia_stats")[0] if is_sequoia else None,
    )
    del llm
    gc.collect()
    return run


def _counters(llm: Any) -> tuple[float, float]:
    """vLLM's own counts of drafts made and drafted tokens accepted."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return (
        values.get("vllm:spec_decode_num_drafts", 0),
        values.get("vllm:spec_decode_num_accepted_tokens", 0),
    )
