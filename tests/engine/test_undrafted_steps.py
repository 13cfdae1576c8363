"""What a step without drafts costs beside plain vLLM's, on both runners, for each reason.

The table says what a step of two requests launches more than plain vLLM's, by name, and how often
it calls functions of our engine. A new launch or call fails here.
"""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.linear_rows import pays_here
from tests.support.engines import running, undrafted, whole_trees
from tests.support.heads import EAGLE3
from tests.support.interpreted import call_on_v2
from tests.support.models import prompts
from tests.support.step_costs import CALLS, decoding_step, surplus
from tests.v2.launches import DRAFT

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS = {
    "structured_outputs_config": {"backend": "outlines"},  # no tree follows its grammars
    "reasoning_config": {"reasoning_start_str": "(", "reasoning_end_str": "return"},
}
PROCESSORS = {
    "V1": "tests.support.processors:EvenTokensOnly", "V2": "tests.v2.processors:NoTokenTwiceAlone"
}  # fmt: skip
# What requests say, by the reason for which they get no drafts.
REASONS: dict[str, dict[str, Any]] = {
    "asked": {"extra_args": {MOST_DRAFTS: 0}},
    "structured_outputs": {"structured_outputs": StructuredOutputsParams(regex=r"[a-z]{40,}")},
}
# On V1 one of plain vLLM's fills is a copy. With AVX2 alone our linear layers stand in for vLLM's:
# four in each of the target's layers, and the last.
_V1 = {"copy_": 1, **({"linear_rows": 17} if pays_here(torch.float32) else {})}
# On V2 vLLM stores the drafts that a step does not have. A kernel of ours writes the keys of the
# four layers, in place of vLLM's.
_V2 = {"fill_": 1, "index": 1, "index_put_": 1, "write_cache_kernel": 4}
# "decided": the engine drafts nothing at this load, as adaptation may decide. "of a head": it reads
# each token, as requests that draft share its blocks of the prefix cache.
SURPLUS: dict[str, dict[str, dict[str, int]]] = {
    "V1": {
        "asked": {**_V1, CALLS: 58},
        "structured_outputs": {**_V1, CALLS: 60},
        "decided": {**_V1, CALLS: 56},
        "custom_processors": {**_V1, CALLS: 51},
    },
    "V2": {
        "asked": {**_V2, CALLS: 69},
        # vLLM brings the drafts of requests with grammars to the host, though there are none.
        "structured_outputs": {**_V2, "_to_copy": 1, CALLS: 78},
        "decided": {**_V2, CALLS: 69},
        "custom_processors": {**_V2, CALLS: 64},
        "asked, of a head": {
            **_V2, "copy from the host": 1, "zero_": 1,
            "begin_drafting_kernel": 1, "committed_inputs_kernel": 1,
            "gather_target_states_kernel": 1, DRAFT: 19,
            "add": 3,  # of residuals, for the states that it reads
            CALLS: 102,
        },
    },
}  # fmt: skip


def params_with(**keys: Any) -> list[SamplingParams]:
    """A greedy and a seeded request's."""
    common = {"max_tokens": 40, "ignore_eos": True, **keys}
    return [
        SamplingParams(temperature=0, **common), SamplingParams(temperature=0.8, seed=1, **common)
    ]  # fmt: skip


def steps_of(llm: Any, reasons: dict[str, dict[str, Any]]) -> dict[str, Any]:
    texts = prompts(2)
    return {
        reason: decoding_step(llm, texts, params_with(**keys)) for reason, keys in reasons.items()
    }


def count_steps(runner: str) -> dict[str, dict[str, int]]:
    """The surplus of a step, for each reason."""
    custom = {**OPTIONS, "logits_processors": [PROCESSORS[runner]]}
    plain, ours = {}, {}
    with running(None, **OPTIONS) as llm:
        plain |= steps_of(llm, {**REASONS, "decided": {}})
    with running(whole_trees(), **OPTIONS) as llm:
        ours |= steps_of(llm, REASONS)
        assert undrafted(llm) == dict.fromkeys(REASONS, 2.0)
        llm.collective_rpc("sequoia_limit_drafts", args=(0,))
        ours |= steps_of(llm, {"decided": {}})
    for found, config in ((plain, None), (ours, whole_trees())):
        with running(config, **custom) as llm:
            found |= steps_of(llm, {"custom_processors": {}})
    if runner == "V2":
        with running(whole_trees(draft=EAGLE3), **OPTIONS) as llm:
            ours["asked, of a head"] = steps_of(llm, {"asked": REASONS["asked"]})["asked"]
        plain["asked, of a head"] = plain["asked"]
    return {reason: surplus(step, plain[reason]) for reason, step in ours.items()}


@pytest.mark.parametrize("runner", ["V1", pytest.param("V2", marks=pytest.mark.sharded)])
def test_undrafted_steps_cost_no_more(runner, tmp_path):
    """Fewer than the table has are right, too: then lower it."""
    if runner == "V2":
        found = call_on_v2(count_steps, tmp_path, gpu_attention=True, runner=runner)
    else:
        found = count_steps(runner)
    assert found.keys() == SURPLUS[runner].keys()
    more = {
        (reason, name): count
        for reason, counts in found.items()
        for name, count in counts.items()
        if count > SURPLUS[runner][reason].get(name, 0)
    }
    assert not more, found
