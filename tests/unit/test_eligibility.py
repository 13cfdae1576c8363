"""Which requests get trees: each reason, its edge, and what is read for whom."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core.eligibility import (
    MOST_DRAFTS,
    TreeTerms,
    check_options,
    follows_trees,
    has_branches_on_v2,
    is_longer_than_draft,
    may_branch_on_v2,
    may_carry_placeholders,
    most_drafts,
    processors_without_trees,
    reason_without_drafts,
    requests_to_read,
    wraps_callables,
)
from sequoia_vllm.engine.core.prediction_option import COUNTED, PREDICTION
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED, SKIP


def params(**given) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **given})


def options(**given) -> SamplingParams:
    return params(extra_args=given)


def with_grammar(backend: str | None) -> SamplingParams:
    grammar = StructuredOutputsParams(json={"type": "object"})
    grammar._backend = backend
    return params(structured_outputs=grammar)


def test_most_drafts():
    assert MOST_DRAFTS == "sequoia_max_drafts"
    for nothing in (None, params(), options(), options(other=3)):
        assert most_drafts(nothing) is None
    assert [most_drafts(options(sequoia_max_drafts=n)) for n in (0, 7)] == [0, 7]


@pytest.mark.parametrize(
    "right", [params(), options(), options(sequoia_max_drafts=0), options(other="x"),
              options(sequoia_prediction_counts=True), options(sequoia_prediction_counts=0),
              params(extra_args={7: 1})],
)  # fmt: skip
def test_options_that_are_right_or_not_ours(right):
    check_options(right)


def test_counts_are_asked_for_or_not():
    with pytest.raises(VLLMValidationError, match="counts is true or false, not 'yes'") as error:
        check_options(options(sequoia_prediction_counts="yes"))
    assert error.value.parameter == COUNTED


@pytest.mark.parametrize("value", [-1, True, False, 1.5, "3", None, [1]])
def test_wrong_numbers_of_drafts_are_refused(value):
    with pytest.raises(VLLMValidationError, match="is a number of drafts, 0 or more") as error:
        check_options(options(sequoia_max_drafts=value))
    assert error.value.parameter == MOST_DRAFTS
    assert error.value.value is value


@pytest.mark.parametrize(
    ("name", "suggested"),
    [("sequoia_max_draft", MOST_DRAFTS), ("SEQUOIA_MAX_DRAFTS", MOST_DRAFTS),
     ("sequoia", PREDICTION), ("sequoia_predicted", PREDICTION),
     ("sequoia-zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz", None)],
)  # fmt: skip
def test_unknown_options_of_ours_are_refused(name, suggested):
    """Also after others; the nearest name is suggested, if one is near."""
    hint = f" (did you mean {suggested}?)" if suggested else ""
    message = f"there is no option '{name}'{hint}; there is: {MOST_DRAFTS}, {PREDICTION}, {COUNTED}"
    with pytest.raises(VLLMValidationError, match=re.escape(message)) as error:
        check_options(options(other=1, **{name: 5}))
    assert (error.value.parameter, error.value.value) == (name, 5)


SERVED = (
    params(),
    params(max_tokens=3),
    params(seed=1, logprobs=2, stop=["."], bad_words=["x"], min_tokens=1),
    options(sequoia_max_drafts=1),
    with_grammar("xgrammar"),
    with_grammar("guidance"),
    params(logprob_token_ids=[3], logprobs=1),
    params(thinking_token_budget=0),
)
UNSERVED = (
    (None, "no_generation"),
    (options(sequoia_max_drafts=0), "asked"),
    (with_grammar("outlines"), "structured_outputs"),
    (params(max_tokens=2), "max_tokens"),
    (params(max_tokens=1), "max_tokens"),
)


def test_reasons_without_drafts():
    assert [reason_without_drafts(one) for one in SERVED] == [None] * len(SERVED)
    for one, reason in UNSERVED:
        assert reason_without_drafts(one) == reason


@pytest.mark.parametrize(
    ("draft", "prompt", "longer"),
    [(10, 8, False), (10, 9, True), (10, 10, True), (10, None, False), (100, 99, False),
     (120, 119, False)],
)  # fmt: skip
def test_prompts_that_only_the_target_can_follow(draft, prompt, longer):
    """By the longest of the draft, and of a target whose longest is 100."""
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(max_model_len=draft)),
        model_config=SimpleNamespace(max_model_len=100),
    )
    assert is_longer_than_draft(config, None if prompt is None else [7] * prompt) is longer


class Adapter(AdapterLogitsProcessor):
    """As users write them."""


class Advancing(AdapterLogitsProcessor):
    """It may know more than the output."""

    def update_state(self, batch_update):
        pass


class Said(Advancing):
    """It says that it does not."""

    sequoia_trees = True


class OnV2(LogitsProcessorV2):
    """As users write them."""


class Advances(OnV2):
    """It goes forward in each `apply`."""

    sequoia_trees = False


def test_processors_of_the_engines_user():
    follow = [Adapter, Said, OnV2]
    others = [LogitsProcessor, Advancing, Advances]
    assert list(map(follows_trees, [*follow, *others])) == [True] * 3 + [False] * 3
    assert list(map(wraps_callables, [Adapter, Said, LogitsProcessor])) == [True, False, False]


@pytest.mark.parametrize("v2", [False, True])
def test_processors_that_an_engine_loads(v2, monkeypatch):
    def config(*named):
        model = SimpleNamespace(logits_processors=list(named) or None)
        return SimpleNamespace(model_config=model, use_v2_model_runner=v2)

    follows, alone = (OnV2, Advances) if v2 else (Said, Advancing)
    found = [config(), config(follows), config(f"{__name__}:{alone.__name__}", follows)]
    assert list(map(processors_without_trees, found)) == [[], [], [alone.__name__]]


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (params(), 50),
        (params(max_tokens=4), 12),  # 10 + 4 tokens; a tree gains before the last two
        (params(max_tokens=3), 11),
        (params(max_tokens=2), 0),
        (params(max_tokens=100), 50),
        (None, 0),
    ],
)
def test_how_far_a_request_can_use_trees(given, most):
    assert TreeTerms.of(given, prompt_tokens=10, longest=50).most_committed == most


def test_a_prompt_that_leaves_no_room_uses_no_tree():
    found = [TreeTerms.of(params(), prompt, longest=50) for prompt in (49, 50, 51)]
    assert [terms.most_committed for terms in found] == [50, 0, 0]


def stopping(end: int | None, stops: list[int] | None) -> SamplingParams:
    found = params(stop_token_ids=stops)
    found._eos_token_id = end
    return found


GRAMMAR = with_grammar("xgrammar").structured_outputs


@pytest.mark.parametrize(
    ("given", "mode", "is_static"),
    [
        (params(temperature=0), GREEDY, False),
        (params(temperature=0, seed=5), GREEDY, False),
        (params(temperature=0, repetition_penalty=1.3, min_tokens=4), GREEDY, False),
        (params(temperature=0, structured_outputs=GRAMMAR), GREEDY, True),
        (params(temperature=0.8), SAMPLED, True),
        (params(temperature=0.8, seed=0), SEEDED, True),
        (options(sequoia_max_drafts=0), SKIP, False),  # in nobody's way
        (None, SKIP, False),
    ],
)
def test_how_a_request_drafts(given, mode, is_static):
    terms = TreeTerms.of(given, prompt_tokens=10, longest=50)
    assert (terms.drafts_by, terms.is_static) == (mode, is_static)


def test_a_request_asks_for_fewer_drafts():
    asked = (params(), options(sequoia_max_drafts=7), options(sequoia_max_drafts=0))
    assert [TreeTerms.of(one, 10, 50).most_drafts for one in asked] == [None, 7, 0]


def test_the_draft_reads_requests_that_get_a_tree_now_or_later():
    given = (
        params(), params(), params(max_tokens=4), params(max_tokens=4), stopping(2, None),
        stopping(None, [7, 8]), stopping(2, [7]), options(sequoia_max_drafts=0),
    )  # fmt: skip
    found = requests_to_read(
        [TreeTerms.of(one, prompt_tokens=10, longest=50) for one in given],
        committed=np.array([50, 51, 12, 13, 20, 20, 20, 11]),
        sampled=np.array([[3, 4], [3, 4], [3, 4], [3, 4], [3, 2], [8, -1], [3, 4], [3, 4]]),
    )
    assert found.dtype == np.bool_
    assert found.tolist() == [True, False, True, False, False, False, True, False]


def test_requests_that_may_be_scored_like_those_with_trees():
    refused = None, with_grammar("xgrammar")
    assert [may_carry_placeholders(one) for one in refused] == [False] * 2
    assert may_carry_placeholders(params(thinking_token_budget=0)) is True
    assert may_carry_placeholders(options(sequoia_max_drafts=0)) is True
    assert may_carry_placeholders(params(max_tokens=1)) is True


@pytest.mark.parametrize(
    "against",
    [
        {},
        {"dynamic_tree": False},
        {"is_hybrid": True},
        {"has_inner_state": True},
        {"index_topk": 2048},
        {"logits_processors": [OnV2]},
    ],
    ids=lambda given: " ".join(given) or "nothing",
)
def test_engines_whose_requests_may_have_branches(against, monkeypatch):
    """On Model Runner V2 one thing is enough against them."""
    given = {"is_hybrid": False, "has_inner_state": False, "logits_processors": None, **against}
    text = SimpleNamespace(**{name: given.pop(name) for name in ("index_topk",) if name in given})
    settings = SimpleNamespace(dynamic_tree=given.pop("dynamic_tree", True))
    monkeypatch.setattr(SequoiaSettings, "of", lambda config: settings)
    model = SimpleNamespace(hf_text_config=text, **given)
    config = SimpleNamespace(model_config=model, use_v2_model_runner=True)
    assert has_branches_on_v2(config) is (not against)


def test_requests_that_may_have_branches():
    assert may_branch_on_v2(params())
    assert not may_branch_on_v2(with_grammar("xgrammar"))
