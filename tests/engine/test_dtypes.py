"""Half precision: every emitted token is one that plain vLLM finds (nearly) likeliest."""

import pytest
from vllm import SamplingParams

from tests.support.engines import running, sequoia
from tests.support.models import prompts

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.mark.parametrize(
    ("dtype", "tie"),
    # Logits of this pair reach 20, where bfloat16 is spaced 1/8 and float16 1/64.
    [("bfloat16", 0.5), ("float16", 0.1)],
)
def test_greedy_tokens_are_plain_vllms_up_to_rounding(dtype, tie):
    """Token for token they may differ: two roundings of one model. So plain vLLM judges.

    It reads prompt and completion as one prompt and gives each token's logprob
    beside the best one. A wrong mask, position or commit is off by far more.
    """
    texts = prompts(8)
    with running(sequoia(), dtype=dtype) as llm:
        outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
        [stats] = llm.collective_rpc("sequoia_stats")
    assert stats["tokens"] > 1.5 * stats["tree_steps"]
    whole = [
        {"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids]}
        for output in outputs
    ]
    with running(None, dtype=dtype) as llm:
        judge = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        judged = llm.generate(whole, judge, use_tqdm=False)
    for output, verdict in zip(outputs, judged, strict=True):
        emitted = list(output.outputs[0].token_ids)
        for token, options in zip(emitted, verdict.prompt_logprobs[-len(emitted) :], strict=True):
            best = max(option.logprob for option in options.values())
            assert options[token].logprob > best - tie
