"""Measures the acceptance vector of a model pair on a live engine."""

from __future__ import annotations

import datetime
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sequoia_vllm.calibration.counts import AcceptanceEstimate, estimate_acceptance, spine_tree
from sequoia_vllm.calibration.engines import encode, load_prompts, open_engine
from sequoia_vllm.calibration.provenance import file_hash, provenance
from sequoia_vllm.tree.library_files import AcceptanceFile
from sequoia_vllm.tree.token_tree import TokenTree

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class AcceptanceSettings:
    """What to measure, and how.

    Attributes:
        target, draft: Model names or paths.
        prompts: ``.jsonl`` file with a "prompt" per line.
        num_prompts: Prompts to use.
        max_tokens: Tokens per completion; it may end earlier by itself.
        temperature, top_p: Sampling of every request; temperature 0 is greedy.
        branch: Children offered at a node: entries of the vector.
        depth: Rows of the vector; 1: one row, of the root.
        batch_size: Requests at once.
        dtype: Of weights and activations.
        enforce_eager: Without compilation.
        kv_cache_gib: Memory for the KV cache, GiB.
    """

    target: str
    draft: str
    prompts: Path
    num_prompts: int = 100
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    branch: int = 32
    depth: int = 1
    batch_size: int = 8
    dtype: str = "auto"
    enforce_eager: bool = False
    kv_cache_gib: float = 1.0


def measure_acceptance(
    settings: AcceptanceSettings, name: str, progress: Progress | None = None
) -> AcceptanceFile:
    """Runs the engine with a star of ``branch`` drafts, and counts what is accepted.

    Args:
        settings: What to measure.
        name: Draft strength class of the result.
        progress: Called with (what is done, prompts done, prompts in all).

    Raises:
        CalibrationError: If the prompts or models cannot be used.
    """
    prompts = encode(settings.target, load_prompts(settings.prompts, settings.num_prompts))
    stats = _generate(settings, prompts, spine_tree(settings.branch, settings.depth), progress)
    estimate = estimate_acceptance(stats["offered"], stats["accepted"])
    return acceptance_file(settings, name, estimate, stats)


def acceptance_file(
    settings: AcceptanceSettings, name: str, estimate: AcceptanceEstimate, stats: dict[str, Any]
) -> AcceptanceFile:
    """The file of a measurement; ``stats``: the engine's counters (`StepStats.to_dict`)."""
    how = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    if settings.temperature > 0 and settings.top_p < 1:
        how += f", top-p {settings.top_p:g}"
    shape = slice(None) if settings.depth > 1 else 0
    return AcceptanceFile(
        name=name,
        description=f"{settings.target} with {settings.draft}, {how}, "
        f"{settings.num_prompts} prompts of {settings.prompts.name}.",
        source="measured",
        date=datetime.datetime.now(datetime.UTC).date(),
        target=settings.target,
        draft=settings.draft,
        temperature=settings.temperature,
        top_p=settings.top_p if settings.temperature > 0 else None,
        acceptance=estimate.acceptance[shape],
        trials=estimate.trials[shape],
        low=estimate.low[shape],
        high=estimate.high[shape],
        provenance=provenance(
            settings.target,
            settings.draft,
            settings={**asdict(settings), "prompts": settings.prompts.name},
            prompts_sha256=file_hash(settings.prompts),
            counts={key: stats[key] for key in ("tree_steps", "tokens", "offered", "accepted")},
        ),
    )


def class_name(text: str) -> str:
    """``text`` as the name of a draft strength class."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "measured"


def _generate(
    settings: AcceptanceSettings,
    prompts: list[list[int]],
    tree: TokenTree,
    progress: Progress | None,
) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_tokens
    )
    report = progress or (lambda what, done, total: None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree.json"
        tree.save(path)
        report("starting the engine", 0, len(prompts))
        with open_engine(settings.target, **_engine_options(settings, prompts, tree, path)) as llm:
            for start in range(0, len(prompts), settings.batch_size):
                report("generating", start, len(prompts))
                chunk = prompts[start : start + settings.batch_size]
                requests = [{"prompt_token_ids": tokens} for tokens in chunk]
                llm.generate(requests, params, use_tqdm=False)
            stats: dict[str, Any] = llm.collective_rpc("sequoia_stats", args=(False, False))[0]
    return stats


def _engine_options(
    settings: AcceptanceSettings, prompts: list[list[int]], tree: TokenTree, path: Path
) -> dict[str, Any]:
    # Room for a whole tree after the last token: trees are never trimmed.
    longest = max(map(len, prompts)) + settings.max_tokens + tree.size
    return {
        "speculative_config": {
            "method": "sequoia", "model": settings.draft, "tree": str(path)
        },
        "dtype": settings.dtype,
        "enforce_eager": settings.enforce_eager,
        "max_model_len": longest,
        "max_num_seqs": settings.batch_size,
        # vLLM keeps one slot of each request free for drafting.
        "max_num_batched_tokens": max(2048, longest, settings.batch_size * (tree.size + 1)),
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * (1 << 30)),
    }  # fmt: skip
