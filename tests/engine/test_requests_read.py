"""The draft reads no request that can use no tree. Where no request can, it does not run."""

import pytest
from vllm import SamplingParams

from sequoia_vllm.engine.common.request_options import MOST_DRAFTS
from tests.support.engines import running, tokens_of, whole_trees
from tests.support.models import prompts

pytestmark = pytest.mark.engine

LEVELS = 4  # passes of the draft for one tree: its prompt's is one of them
TEXTS = prompts(4)
GREEDY = {"temperature": 0, "ignore_eos": True}
DRAFTED = SamplingParams(**GREEDY, max_tokens=24)
UNDRAFTED = {
    "none asked for": SamplingParams(**GREEDY, max_tokens=12, extra_args={MOST_DRAFTS: 0}),
    "one token": SamplingParams(**GREEDY, max_tokens=1),
    "two tokens": SamplingParams(**GREEDY, max_tokens=2),
    "stopped at once": SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[*range(4096)]),
}


@pytest.fixture(scope="module")
def passes():
    """By case: requests and tokens of each pass of the draft, and what the requests got."""
    short = SamplingParams(**GREEDY, max_tokens=3)
    cases = {name: ([params] * 4, TEXTS) for name, params in UNDRAFTED.items()}
    cases |= {
        "three tokens": ([short], TEXTS[:1]),
        "alone": ([DRAFTED], TEXTS[:1]),
        "among others": ([DRAFTED, *list(UNDRAFTED.values())[:3]], TEXTS),
        "cached by others": ([UNDRAFTED["none asked for"]], TEXTS[:1]),
        "then drafted": ([DRAFTED], TEXTS[:1]),
        "cached by itself": ([DRAFTED], TEXTS[:1]),
    }
    found = {}
    with running(whole_trees(), block_size=32, enable_prefix_caching=True) as llm:
        for name, (params, texts) in cases.items():
            llm.collective_rpc("sequoia_stats", args=(True, True))
            if name not in ("then drafted", "cached by itself"):
                assert llm.reset_prefix_cache()
            outputs = llm.generate(texts, params, use_tqdm=False)
            [stats] = llm.collective_rpc("sequoia_stats", args=(False, True))
            trace = [tuple(one[1:3]) for one in stats["trace"] if one[0] == "draft"]
            found[name] = trace, tokens_of(outputs), len(outputs[0].prompt_token_ids)
    return found


@pytest.mark.parametrize("name", [*UNDRAFTED, "cached by others"])
def test_nothing_runs_where_no_request_can_use_a_tree(name, passes):
    assert passes[name][0] == []


def test_the_step_of_the_last_tokens_does_not_draft(passes):
    """Before the last of three tokens a tree gains nothing."""
    trace, [tokens], prompt = passes["three tokens"]
    assert len(tokens) == 3
    assert trace[0] == (1, prompt + 1)
    assert len(trace) == LEVELS


def test_one_that_drafts_among_others_is_read_as_alone(passes):
    alone, tokens, _ = passes["alone"]
    trace, among, _ = passes["among others"]
    assert trace == alone
    assert among[:1] == tokens


def test_what_others_left_in_the_prefix_cache_is_read_when_one_drafts(passes):
    alone, tokens, prompt = passes["alone"]
    trace, found, _ = passes["then drafted"]
    assert trace == alone
    assert found == tokens
    # And then it is known to have been read.
    again, found, _ = passes["cached by itself"]
    assert 0 < again[0][1] <= prompt + 1 - 32
    assert again[1:] == alone[1:]
    assert found == tokens
