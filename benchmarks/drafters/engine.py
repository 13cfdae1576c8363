"""Tokens per step of one drafter's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPERATURES = (0.0, 0.6, 1.0)
MODELS = Path(__file__).parents[2] / "examples" / "models"
METHODS = {"draft": "draft_model", "eagle3": "eagle3", "dflash": "dflash"}
_COUNTERS = ("drafts", "accepted_tokens")


def tokens_per_step(
    folder: str, how: str, depth: int, nodes: int, count: int, tokens: int
) -> dict[str, float]:
    """Mean tokens per step by temperature; in a process of its own.

    Args:
        folder: Of the drafter, in `MODELS`.
        how: "chain" (vLLM's, drafting what is likeliest), "drawn chain" (vLLM's, drawing its
            drafts) or "tree".
        depth: Drafts of a chain, levels of a tree.
        nodes: Of a tree.
        count: Prompts.
        tokens: Generated for each.
    """
    from vllm import SamplingParams

    from tests.support.engines import metric, running, sequoia
    from tests.support.models import prompts

    draft = str(MODELS / folder)
    config: dict[str, Any] = sequoia(size=nodes, depth=depth, draft=draft)
    if how != "tree":
        drawn = {"draft_sample_method": "probabilistic"} if how == "drawn chain" else {}
        config = {
            "method": METHODS[folder], "model": draft, "num_speculative_tokens": depth, **drawn,
        }  # fmt: skip
    found, before = {}, dict.fromkeys(_COUNTERS, 0.0)
    with running(config) as llm:
        for temperature in TEMPERATURES:
            if how == "drawn chain" and temperature == 0:
                continue
            params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
            llm.generate(prompts(count), params, use_tqdm=False)
            now = {name: metric(llm, f"vllm:spec_decode_num_{name}") for name in _COUNTERS}
            drafts, accepted = (now[name] - before[name] for name in _COUNTERS)
            found[f"{temperature:g}"] = 1 + accepted / drafts
            before = now
    return found
