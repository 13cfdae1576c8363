"""What the GPU engine's limits allow: requests at once."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import sequoia
from tests.support.generating import random_prompts
from tests.support.heads import save_dflash
from tests.support.models import save_llama
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import generate, rehearsing

pytestmark = pytest.mark.engine

REQUESTS, NODES, TOKENS = 6, 8, 5


def run_many(models: str) -> dict[str, Any]:
    """Six requests with a DFlash head, where four trees' nodes fill a step."""
    from vllm import SamplingParams

    target = str(save_llama(Path(models) / "target", seed=3, vocab_size=6))
    config = sequoia(
        size=NODES,
        depth=3,
        draft=save_dflash(Path(models) / "head", target),
        num_speculative_tokens_per_batch_size=[[1, 1, NODES - 1], [2, REQUESTS, 0]],
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    limits = {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 4 * NODES, "max_model_len": 64}
    with rehearsing(config, model=target, **limits) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        together = requests_by_step(scheduler)
        generate(llm, random_prompts([3] * REQUESTS, vocab=6), params)
        return {
            "together": max(together),
            "limit": scheduler.scheduler_config.max_num_active_seqs,
        }


def requests_by_step(scheduler: Any) -> list[int]:
    """From now on: how many requests each step schedules."""
    original, found = scheduler.schedule, []

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        found.append(len(output.num_scheduled_tokens))
        return output

    scheduler.schedule = schedule
    return found


def test_a_head_that_drafts_blocks_limits_no_requests(tmp_path):
    assert call_on_gpu(run_many, tmp_path, models=str(tmp_path)) == {
        "together": REQUESTS,
        "limit": None,
    }
