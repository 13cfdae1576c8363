"""What followed before tells what follows, on both runners: without a model, and beside one."""

import pickle
import random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from tests.support.engines import (
    configured,
    generated,
    lookup_trees,
    metric,
    runner_of,
    running,
    whole_trees,
)
from tests.support.generating import TINY, generate, joined, random_prompts, save_related_pair
from tests.support.heads import save_mimo
from tests.support.interpreted import call_on_v2
from tests.support.models import prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def generate_drafted() -> dict[str, Any]:
    """Answers of plain vLLM, and of trees: greedy, seeded and penalised requests.

    A draft model drafts alone, and with what the texts say.
    """
    common = {"max_tokens": 24, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **common), SamplingParams(temperature=0.7, seed=4, **common),
        SamplingParams(temperature=0, repetition_penalty=1.2, **common),
    ]  # fmt: skip
    texts = [3 * text for text in prompts(3)]
    drafted = {
        "plain": None,
        "lookup": lookup_trees(size=12),
        "draft": whole_trees(size=12),
        "beside": whole_trees(size=12, retrieval=True),
    }
    return {name: generate(config, texts, params) for name, config in drafted.items()}


def generate_both() -> dict[str, Any]:
    return {"drafted": generate_drafted(), "restricted": generate_restricted()}


# The rehearsal has lookup on V2 each time, and `tests/v2` texts beside a draft.
@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.sharded)])
def found(request, tmp_path_factory):
    if request.param == "V2":
        return call_on_v2(generate_both, tmp_path_factory.mktemp("lookup"))
    return generate_both()


def test_tokens_are_those_of_plain_vllm(found):
    answers = found["drafted"]
    for name in ("lookup", "draft", "beside"):
        assert answers[name]["tokens"] == answers["plain"]["tokens"], name


def test_what_followed_before_is_accepted(found):
    per_tree = {
        name: found["drafted"][name]["counts"]["tokens_per_tree"]
        for name in ("lookup", "draft", "beside")
    }
    assert per_tree["lookup"] > 1.3
    assert per_tree["beside"] > 1.05 * per_tree["draft"]


def requests_with_grammars() -> list[SamplingParams]:
    """Greedy, seeded, and one that asks for no drafts; and one without a grammar."""
    sums = {"structured_outputs": StructuredOutputsParams(regex=r"[a-z]{3,8}( \+ [a-z0-9]{1,5})*")}
    return [
        SamplingParams(temperature=0, max_tokens=16, **sums),
        SamplingParams(temperature=0.8, seed=2, max_tokens=16, **sums),
        SamplingParams(temperature=0, max_tokens=12, extra_args={MOST_DRAFTS: 0}, **sums),
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    ]


def generate_restricted() -> dict[str, Any]:
    """Requests with grammars; and while the engine changes how much is drafted, to none and back.

    Each decision is kept with the tokens that drafts gave until then.
    """
    params, texts = requests_with_grammars(), [3 * text for text in prompts(4)]
    found = {"plain": generate(None, texts, params)}
    found["trees"] = generate(lookup_trees(size=8), texts, params)
    number, decided, gained = random.Random(0), [], 0

    def observe(controller: DraftController, step: Any) -> None:
        nonlocal gained
        gained += step.gained
        drafts = number.choice([0, 1, 3, 7])
        controller.lookup[:] = [drafts] * len(controller.lookup)
        decided.append((drafts, gained))

    with patched(DraftController, "observe", observe):
        found["changing"] = generate(lookup_trees(size=8, adapt=True), texts, params)
    return {**found, "decided": decided}


@pytest.mark.parametrize("name", ["trees", "changing"])
def test_grammars_are_followed_whatever_is_drafted(name, found):
    restricted = found["restricted"]
    assert restricted[name]["tokens"] == restricted["plain"]["tokens"]
    assert restricted[name]["counts"]["tokens_per_tree"] > 1.05


def test_drafts_are_accepted_again_after_the_engine_drafted_nothing(found):
    decided = found["restricted"]["decided"]
    before = next(gained for drafts, gained in decided if drafts == 0)
    assert decided[-1][1] > before


def test_requests_learn_nothing_of_each_other_without_recycling():
    """The table stays empty; what is accepted was in the request's own text."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts, accepted, tokens = [3 * text for text in prompts(2)], [], []
    for config in (lookup_trees(), lookup_trees(recycling=False)):
        with running(config) as llm:
            tokens.append(generated(llm, texts, params))
            accepted.append(metric(llm, "vllm:spec_decode_num_accepted_tokens"))
            table = runner_of(llm).drafter.drafter._successors.table
            assert (table.max() >= 0) == ("recycling" not in config)
    assert tokens[0] == tokens[1]
    assert accepted[0] > accepted[1] > 0


def test_requests_that_arrive_leave_are_preempted_and_share_prefixes(tmp_path):
    options = {
        "model": save_related_pair(tmp_path)[0], **TINY, "max_num_batched_tokens": 96,
        "enable_prefix_caching": True,
    }  # fmt: skip
    texts = random_prompts([200, 90, 37, 5, 150, 120, 33])
    texts.insert(5, texts[0])
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
        for _ in texts
    ]
    with running(None, **options) as llm:
        plain = joined(llm, texts, params, aborted=1)
    with running(lookup_trees(), **options, kv_cache_memory_bytes=160 << 10) as llm:
        assert joined(llm, texts, params, aborted=1) == plain
        assert metric(llm, "vllm:num_preemptions") > 0
        assert metric(llm, "vllm:prefix_cache_hits") > 0
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 50


def test_a_target_with_layers_that_draft_is_no_draft_of_these(tmp_path):
    """vLLM reads its configuration once more, and would take it for its own MTP layer."""
    options = {"model": save_mimo(tmp_path), **TINY}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    texts = random_prompts([9, 30], 256)
    plain = generate(None, texts, params, **options)
    trees = generate(lookup_trees(), texts, params, **options)
    pickle.dumps(
        configured(lookup_trees(), model=options["model"])
    )  # for engines in processes of their own
    assert trees["tokens"] == plain["tokens"]
    assert trees["counts"]["tokens_per_tree"] > 1
