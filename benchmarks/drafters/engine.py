"""Tokens per step of one drafter's engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEMPERATURES = (0.0, 0.6, 1.0)
MODELS = Path(__file__).parents[2] / "examples" / "models"
METHODS = {"draft": "draft_model", "eagle3": "eagle3", "dflash": "dflash"}
HOW = ("chain", "drawn chain", "tree")
AT_ONCE = 4  # prompts: groups that standard errors take as independent
_COUNTERS = ("drafts", "accepted_tokens")


def tokens_per_step(
    target: str, kind: str, draft: str, how: str, depth: int, nodes: int, count: int, tokens: int,
    temperatures: Sequence[float],
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """Tokens per step by temperature, and their standard error; in a process of its own.

    Args:
        how: "chain" (vLLM's, drafting what is likeliest), "drawn chain" (vLLM's, drawing its
            drafts) or "tree".
        depth: Drafts of a chain, levels of a tree.
        tokens: Generated for each; chats may end before.
    """
    from vllm import SamplingParams

    from benchmarks.soak.chats import prompts_for
    from tests.support.engines import metric, running, sequoia
    from tests.support.models import TARGET

    config: dict[str, Any] = sequoia(size=nodes, depth=depth, draft=draft)
    if how != "tree":
        drawn = {"draft_sample_method": "probabilistic"} if how == "drawn chain" else {}
        config = {"method": kind, "model": draft, "num_speculative_tokens": depth, **drawn}
    asked = prompts_for(target, count, count)
    found = {}
    with running(config, target, kv_cache_memory_bytes=512 << 20) as llm:
        for temperature in temperatures:
            if how == "drawn chain" and temperature == 0:
                continue
            params = SamplingParams(
                temperature=temperature, max_tokens=tokens, ignore_eos=target == TARGET
            )
            groups = []
            for first in range(0, len(asked), AT_ONCE):
                before = [metric(llm, f"vllm:spec_decode_num_{name}") for name in _COUNTERS]
                llm.generate(asked[first : first + AT_ONCE], params, use_tqdm=False)
                after = [metric(llm, f"vllm:spec_decode_num_{name}") for name in _COUNTERS]
                groups.append(np.subtract(after, before))
            found[f"{temperature:g}"] = ratio(np.array(groups))
    return found


def ratio(groups: NDArray[np.float64]) -> tuple[float, float]:
    """Tokens per step, and its standard error over groups of prompts.

    Args:
        groups: Steps and accepted drafts of each group, ``[groups, 2]``. One has no error: NaN.
    """
    steps, accepted = groups.T
    mean = accepted.sum() / steps.sum()
    left = accepted - mean * steps
    if len(steps) < 2:
        return 1 + float(mean), float("nan")
    error = np.sqrt((left**2).sum() * len(steps) / (len(steps) - 1)) / steps.sum()
    return 1 + float(mean), float(error)
