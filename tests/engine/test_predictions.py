"""Predictions in V1 engines: plain vLLM's tokens, in fewer steps, whatever is foretold."""

from copy import copy
from itertools import pairwise
from typing import Any

import pytest
from vllm import SamplingParams

from sequoia_vllm.engine.common.step_messages import outcome_of
from sequoia_vllm.engine.core.prediction_option import PREDICTION
from tests.support.engines import generated, lookup_trees, metric, runner_of, running, whole_trees
from tests.support.generating import random_prompts
from tests.support.models import prompts as model_prompts
from tests.support.thinking import KINDS as KINDS_OF_THOUGHTS
from tests.support.thinking import OPTIONS, greedy_and_seeded

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 60
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 5},
    "penalised": {"temperature": 0, "repetition_penalty": 1.2},
}  # fmt: skip
CONFIGS = {
    "draft": whole_trees(size=12), "lookup": lookup_trees(size=12),
    "dynamic": whole_trees(size=12, dynamic_tree=True, retrieval=True),
}  # fmt: skip


def params_of(foretold: list[Any]) -> list[SamplingParams]:
    """One request of each kind for each foretold text; None: nothing is."""
    return [
        SamplingParams(
            **kind, max_tokens=TOKENS, ignore_eos=True,
            extra_args=None if text is None else {PREDICTION: text},
        )
        for kind, text in zip(KINDS.values(), foretold, strict=True)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def prompts():
    return random_prompts([20, 33, 48])


@pytest.fixture(scope="module")
def plain(prompts):
    with running() as llm:
        return generated(llm, prompts, params_of([None] * len(KINDS)))


def noting_branches(llm) -> tuple[list[bool], list[bool]]:
    """By step from now on: whether branches were made, and whether the worker said it had any."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    drafter, sample = runner_of(llm).drafter, worker.sample_tokens
    make, made, said = drafter.grow_told, [], []

    def making(*args):
        made[-1] = True
        return make(*args)

    def sampling(grammar_output):
        made.append(False)
        output = sample(grammar_output)
        said.append(outcome_of(output).is_told)
        return output

    drafter.grow_told, worker.sample_tokens = making, sampling
    return made, said


def edited(tokens: list[int]) -> list[int]:
    """Three changed places: a token replaced, one left out, two more."""
    return [*tokens[:15], 7, *tokens[16:30], *tokens[31:45], 9, 9, *tokens[45:]]


def told_of(params: SamplingParams, text: list[int] | None) -> SamplingParams:
    """The same request, with a prediction."""
    told = copy(params)
    told.extra_args = None if text is None else {PREDICTION: text}
    return told


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_plains_and_what_was_foretold_is_accepted(name, prompts, plain):
    """The texts are forgotten with their requests."""
    steps = {}
    with running(CONFIGS[name]) as llm:
        made, said = noting_branches(llm)
        texts = {
            "nothing": [None] * len(plain), "right": plain,
            "edited": [edited(tokens) for tokens in plain],
            "other": [list(reversed(tokens)) for tokens in plain],
        }  # fmt: skip
        for kind, foretold in texts.items():
            before = metric(llm, "vllm:spec_decode_num_drafts")
            assert generated(llm, prompts, params_of(foretold)) == plain, kind
            steps[kind] = metric(llm, "vllm:spec_decode_num_drafts") - before
        # vLLM tells workers with the next step which requests have finished.
        generated(llm, prompts[:1], [SamplingParams(max_tokens=4)])
        assert runner_of(llm).drafter.foretold._predictions == {}
    # Where they are made, and in the next step, which scores them.
    assert said == [any(pair) for pair in pairwise([False, *made])]
    assert 0 < sum(made) < sum(said) < len(said)
    assert steps["right"] < 0.6 * steps["nothing"]
    assert steps["edited"] < 0.75 * steps["nothing"]
    assert steps["other"] < 1.15 * steps["nothing"]


@pytest.mark.parametrize("thinks", [False, True])
def test_structured_output_that_was_foretold_comes_in_branches(thinks):
    """Their nodes have the grammar's masks, behind reasoning as well."""
    kinds = [KINDS_OF_THOUGHTS[f"{kind} after thinking"] for kind in ("json", "choice")]
    params = [one for keys in kinds for one in greedy_and_seeded(2, 48, keys)]
    options: dict[str, Any] = OPTIONS
    if not thinks:
        options = {"structured_outputs_config": {"backend": "xgrammar"}}
    texts, steps = [f"{text}(" for text in model_prompts(len(params))], []
    with running(**options) as llm:
        plain = generated(llm, texts, params)
    with running(whole_trees(size=12, depth=4), **options) as llm:
        made, _ = noting_branches(llm)
        for foretold in ([None] * len(plain), plain, [edited(tokens) for tokens in plain]):
            made.clear()
            told = [told_of(one, text) for one, text in zip(params, foretold, strict=True)]
            before = metric(llm, "vllm:spec_decode_num_drafts")
            assert generated(llm, texts, told) == plain
            steps.append(metric(llm, "vllm:spec_decode_num_drafts") - before)
            assert any(made) is (foretold[0] is not None)
    nothing, right, changed = steps
    assert right < 0.7 * nothing
    assert changed < nothing


def test_a_history_is_told_to_its_salt_alone(prompts, plain):
    """A tenant who asks what another one asked takes as many steps as that one's first request."""
    params, taken = params_of([None] * len(plain)), []
    with running(whole_trees(size=12, history=True)) as llm:
        for salt in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}, {}):
            before = metric(llm, "vllm:spec_decode_num_drafts")
            assert generated(llm, [one | salt for one in prompts], params) == plain
            taken.append(metric(llm, "vllm:spec_decode_num_drafts") - before)
    first, again, anothers, nobodys, nobodys_again = taken
    assert max(again, nobodys_again) < 0.6 * first
    assert anothers == nobodys == first


def test_a_text_that_repeats_itself_gets_branches(prompts):
    """Deeper than its trees: one token is allowed, so each text goes on with it."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, allowed_token_ids=[7])
    with running(whole_trees(size=12, depth=4, retrieval=True)) as llm:
        made, _ = noting_branches(llm)
        assert generated(llm, prompts[:1], [params]) == [[7] * TOKENS]
        assert metric(llm, "vllm:spec_decode_num_drafts") < TOKENS / (1 + 4)
        assert 0 < sum(made) < len(made)
        llm.collective_rpc("sequoia_limit_drafts", args=(11,))  # a tool measures whole trees
        made.clear()
        assert generated(llm, prompts[:1], [params]) == [[7] * TOKENS]
        assert not any(made)
