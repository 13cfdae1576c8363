"""Trees are refused in a pipeline, and why: two stages of vLLM's own engine."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.cores import needs_two_cores
from tests.support.engines import sequoia
from tests.support.generating import completions, random_prompts, save_related_pair
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

PROMPTS = random_prompts([9, 14, 6])
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
MODEL = {"num_hidden_layers": 2}
# What a stage but the first says when nobody hands it hidden states.
NO_STAGE_BEFORE = "assert intermediate_tensors is not None"


def generate(config: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Greedy tokens on an engine of its own."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with rehearsing(config, **options) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
        return {"tokens": completions(outputs)}


def refusal(config: dict[str, Any], target: str) -> str:
    """What an engine of two stages says that does not start."""
    with pytest.raises(Exception) as error:  # noqa: PT011 -- vLLM has many kinds
        generate(config, model=target, **STAGES)
    return str(error.value)


def generate_in_stages(target: str, draft: str) -> dict[str, Any]:
    """On one stage and on two, plainly; on two with a chain."""
    chain = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    return {
        "one stage": generate(None, model=target),
        "two stages": generate(None, model=target, **STAGES),
        "draft in a stage": refusal(chain, target),
    }


def test_trees_are_refused_with_the_fix(tmp_path: Path) -> None:
    target, draft = save_related_pair(tmp_path, **MODEL)
    message = call_on_gpu(refusal, tmp_path, config=sequoia(draft=draft), target=target)
    assert "builds a draft model as a stage of the target's pipeline" in message
    assert "use tensor parallelism" in message


@pytest.mark.upstream
@needs_two_cores
def test_vllm_builds_a_draft_as_the_last_stage_of_a_pipeline(tmp_path: Path) -> None:
    """Plain decoding works; with vLLM's `draft_model` the engine does not start.

    Models ask for the process's pipeline stage when they are built and run, and so does the
    draft, of which the last stage has the only copy. When this fails, vLLM builds drafts whole,
    and the refusal in `sequoia_vllm/engine/frontend/refusals.py` has lost its reason.
    """
    target, draft = save_related_pair(tmp_path, **MODEL)
    found = call_on_gpu(generate_in_stages, tmp_path, target=target, draft=draft)
    assert found["two stages"]["tokens"] == found["one stage"]["tokens"]
    assert NO_STAGE_BEFORE in found["draft in a stage"]
