"""Requests with parameters of every kind get plain vLLM's tokens, most with trees; and logprobs."""

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.engine.v1.proposer import TreeProposerV1
from tests.support.editing import SIBLINGS_FIRST
from tests.support.engines import (
    generated,
    noting,
    plain_outputs,
    running,
    sequoia,
    tokens_of,
    undrafted,
    whole_trees,
)
from tests.support.generating import answered, check_logprobs
from tests.support.models import prompts
from tests.support.thinking import SCHEMA

pytestmark = pytest.mark.engine

EDITED = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {300: 4.0, 301: -50.0}},
    "bad_words": {"bad_words": ["self", " in"]},
    "min_tokens": {"min_tokens": 24, "stop_token_ids": list(range(260, 400))},
    "allowed_token_ids": {"allowed_token_ids": list(range(200, 1200))},
}
STRUCTURED = {
    "structured_choice": {
        "structured_outputs": StructuredOutputsParams(choice=["return None", "raise ValueError"])
    },
    "structured_regex": {
        "structured_outputs": StructuredOutputsParams(regex=r"[a-z]{3,8} = \d+( \+ [a-z0-9]{1,5})*")
    },
    "structured_json": {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "structured, edited": {
        "structured_outputs": StructuredOutputsParams(regex=r"(x = \d+\n)+"),
        "repetition_penalty": 1.3,
        "min_tokens": 12,
    },
}
NO_DRAFTS = {MOST_DRAFTS: 0}
WITHOUT_DRAFTS = {"none asked for": {"extra_args": NO_DRAFTS}}
BUDGETS = {
    "thinking budget": {"thinking_token_budget": 5},
    "no thinking": {"thinking_token_budget": 0},
}
# All prompts have a bracket, and hardly any answer this word.
THINKING = {"reasoning_config": {"reasoning_start_str": "(", "reasoning_end_str": "return"}}


def greedy_and_seeded(keys: dict) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=40, **keys),
        SamplingParams(temperature=0.8, seed=5, max_tokens=40, **keys),
    ]


def with_short_budgets() -> list[SamplingParams]:
    """Two more than run at once. Some end amid their thinking, and others move into their rows.

    Those have few drafts, or none: then the sampler sees the row.
    """
    regex = STRUCTURED["structured_regex"]
    few, none = {"extra_args": {MOST_DRAFTS: 2}}, {"extra_args": NO_DRAFTS}
    thinking = {"thinking_token_budget": 7}
    kinds = [
        *[{**thinking, "max_tokens": 3}] * 3, {"thinking_token_budget": 9}, none, {**few, **regex},
        {**none, **regex}, few, *[{**thinking, "max_tokens": 5}] * 2,
    ]  # fmt: skip
    return [SamplingParams(**{"temperature": 0, "max_tokens": 40, **keys}) for keys in kinds]


@pytest.fixture(scope="module")
def special():
    """Tokens by kind, alone, and of all in one batch: ours, plain vLLM's, and our counters.

    Of "ends of budgets" plain vLLM's are of one request after another: it leaves a budget that
    has ended with the request that moves into its row.
    """
    kinds = {
        **EDITED,
        **STRUCTURED,
        **BUDGETS,
        **WITHOUT_DRAFTS,
        "capped": {"extra_args": {MOST_DRAFTS: 2}},
    }
    params = {name: greedy_and_seeded(keys) for name, keys in kinds.items()}
    mixed = [one for pair in params.values() for one in pair]
    params["all"] = [*mixed, *(SamplingParams(temperature=0, max_tokens=40) for _ in range(8))]
    with running(**THINKING) as llm:
        plain = {name: generated(llm, prompts(len(own)), own) for name, own in params.items()}
        params["ends of budgets"] = with_short_budgets()
        plain["ends of budgets"] = [
            generated(llm, text, one)[0]
            for text, one in zip(prompts(10), params["ends of budgets"], strict=True)
        ]
    found = {}
    config = {**sequoia(), "tree": {"parents": SIBLINGS_FIRST}}
    with running(config, **THINKING) as llm:
        for name, own in params.items():
            outputs = llm.generate(prompts(len(own)), own, use_tqdm=False)
            [stats] = llm.collective_rpc("sequoia_stats", args=(True,))
            found[name] = tokens_of(outputs), plain[name], {**stats, "undrafted": undrafted(llm)}
    return found


BATCHES = ["capped", "all", "ends of budgets"]


@pytest.mark.parametrize("name", [*EDITED, *STRUCTURED, *BUDGETS, *WITHOUT_DRAFTS, *BATCHES])
def test_tokens_are_those_of_plain_vllm(name, special):
    found, plain, _ = special[name]
    assert found == plain


@pytest.mark.parametrize("name", [*EDITED, *STRUCTURED, *BUDGETS, *WITHOUT_DRAFTS])
def test_requests_have_trees_unless_none_can_help(name, special):
    _, _, stats = special[name]
    if name in WITHOUT_DRAFTS:
        assert stats["tree_steps"] == 0
    else:
        least = 1.3 if name in EDITED else 1
        assert stats["tokens"] > least * stats["tree_steps"] > 0


def test_requests_without_drafts_are_counted_by_reason(special):
    """Two of each kind alone, and two among all."""
    _, _, stats = special["all"]
    assert stats["undrafted"] == {"asked": 4}


def test_a_thinking_budget_is_kept(special):
    """Else the test above would see nothing."""
    free, *_ = special["none asked for"]
    for name, budget in (("thinking budget", 5), ("no thinking", 0)):
        for ours, without in zip(special[name][0], free, strict=True):
            assert 1491 in ours[: budget + 1]  # the word "return"
            assert ours != without


def test_a_request_may_cap_its_tree(special):
    _, _, stats = special["capped"]
    assert stats["tree_steps"] > 0
    assert stats["depth_counts"][0] > 0
    assert sum(stats["offered"][0][2:]) == 0  # children of the root after the second


@pytest.mark.parametrize("backend", ["guidance", "outlines"])
def test_grammars_of_other_backends_are_followed(backend):
    """With trees where a backend's state goes back as far as it went, else without drafts."""
    options = {"structured_outputs_config": {"backend": backend}}
    pattern = STRUCTURED["structured_regex"]["structured_outputs"].regex
    params = greedy_and_seeded({"structured_outputs": StructuredOutputsParams(regex=pattern)})
    expected = plain_outputs(prompts(2), params, **options)
    with running(sequoia(), **options) as llm:
        assert generated(llm, prompts(2), params) == expected
        [stats] = llm.collective_rpc("sequoia_stats")
    assert (stats["tree_steps"] > 0) == (backend == "guidance")
    assert stats["tokens"] > stats["tree_steps"] or backend == "outlines"


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_logprobs_are_those_of_plain_vllm(mode):
    """Tokens accepted in a tree carry the values of their own node, top tokens included."""
    params = [
        SamplingParams(temperature=0, max_tokens=48, logprobs=5),
        SamplingParams(temperature=0.9, seed=1, max_tokens=48, logprobs=1),
        SamplingParams(temperature=0.7, seed=2, max_tokens=48, logprobs=2, top_p=0.8, min_p=0.02),
        SamplingParams(temperature=0.7, seed=2, max_tokens=24, logprobs=2, extra_args=NO_DRAFTS),
        SamplingParams(temperature=0, max_tokens=48, logprobs=0, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=48, logprobs=3, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=48),
    ]
    texts = prompts(len(params))
    results = []
    for speculative_config in (None, sequoia()):
        with running(speculative_config, logprobs_mode=mode) as llm:
            results.append(answered(llm.generate(texts, params, use_tqdm=False)))
    plain, ours = results
    assert ours["tokens"] == plain["tokens"]
    assert check_logprobs(ours["logprobs"], plain["logprobs"]) > 200
    assert check_logprobs(ours["prompt_logprobs"], plain["prompt_logprobs"]) > 30


# -- what the draft reads --------------------------------------------------------------------


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
    found, trace = {}, []

    def reads(_, committed):
        trace.append((len(committed.counts), len(committed.tokens)))

    def grows(_, below, tokens, *more):
        trace.append((len(tokens), tokens.numel()))

    with (
        running(whole_trees(), block_size=32, enable_prefix_caching=True) as llm,
        noting(TreeProposerV1, "advance", reads),
        noting(TreeProposerV1, "_level_logits", grows),
    ):
        for name, (params, texts) in cases.items():
            trace.clear()
            if name not in ("then drafted", "cached by itself"):
                assert llm.reset_prefix_cache()
            outputs = llm.generate(texts, params, use_tqdm=False)
            found[name] = trace[:], tokens_of(outputs), len(outputs[0].prompt_token_ids)
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
