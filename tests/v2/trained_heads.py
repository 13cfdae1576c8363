"""vLLM's own chains of the trained heads, in the processes that `call_on_v2` starts."""

from typing import Any

from tests.support.engines import metric, runner_of, running, tokens_of
from tests.support.models import prompts


def generate_with_a_head(
    kind: str, head: str, drafts: int, prompt_count: int, max_tokens: int
) -> dict[str, Any]:
    """Greedy tokens of the first prompts, and vLLM's counts of drafts.

    `kind`: vLLM's method; `drafts`: those of a step.
    """
    from vllm import SamplingParams

    config = {"method": kind, "model": head, "num_speculative_tokens": drafts}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with running(config) as llm:
        outputs = llm.generate(prompts(prompt_count), params, use_tqdm=False)
        return {
            "speculator": type(runner_of(llm).speculator).__name__,
            "tokens": tokens_of(outputs),
            "steps": metric(llm, "vllm:spec_decode_num_drafts"),
            "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
        }
