"""Trees on Model Runner V2 generate what plain vLLM does, whatever the engine does besides.

There are two processes, one for each pair of models: starting one takes longer than most questions.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from tests.support.calling import called_once
from tests.support.conversing import converse, turns
from tests.support.engines import (
    generated,
    metric,
    noting,
    running,
    sequoia,
    undrafted,
    whole_trees,
)
from tests.support.generating import (
    TINY,
    answered,
    check_logprobs,
    completions,
    counted,
    generate,
    generate_on,
    greedy_and_seeded,
    random_prompts,
    save_related_pair,
)
from tests.support.interpreted import call_on_v2
from tests.support.models import prompts, save_spoilt_pair
from tests.support.reference_models import accepted_by_depth

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GREEDY_TOKENS = 24


# -- the embedded pair, greedy -----------------------------------------------------------


def greedy_requests() -> tuple[list[str], list[Any]]:
    """Four requests that run on, and some that end early: at a length, in a stop string."""
    params = [SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)] * 4
    params += [
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0, max_tokens=12, stop=["self", "\n"]),
    ]
    texts = prompts(len(params))
    return texts, params


def generate_greedy() -> dict[str, Any]:
    texts, params = greedy_requests()
    answers: dict[str, Any] = {}
    with running(sequoia()) as llm:
        answers["trees"] = generate_on(llm, texts, params)
        llm.collective_rpc("sequoia_stats", args=(True,))
        alone = llm.generate(texts[:1], params[:1], use_tqdm=False)
        [stats] = llm.collective_rpc("sequoia_stats")
        prompt = list(alone[0].prompt_token_ids)
        answers["alone"] = {"tokens": completions(alone), "prompt": prompt, "stats": stats}
    dynamic = whole_trees(size=8, depth=3, dynamic_tree=True)
    with running(dynamic, async_scheduling=False) as llm:
        answers["synchronous"] = generate_on(llm, texts[2:], params[2:])
        with failing_draft(at=4) as said:
            answers["failed, synchronous"] = generate_on(llm, texts, params) | {"said": said}
    return answers


def generate_with_the_embedded_pair() -> dict[str, Any]:
    return {
        "greedy": generate_greedy(),
        "special": generate_special(),
        "processors": generate_with_processors(),
    }


embedded = called_once(call_on_v2, generate_with_the_embedded_pair)


@pytest.fixture(scope="module")
def greedy(embedded) -> dict[str, Any]:
    return {**embedded["greedy"], "plain": embedded["special"]["plain"]["greedy"]}


def test_greedy_tokens_are_those_of_both_plain_runners(greedy):
    with running() as llm:
        on_v1 = completions(llm.generate(*greedy_requests(), use_tqdm=False))
    trees = greedy["trees"]
    assert (trees["runner"], trees["scheduler"]) == (
        "SequoiaCPUModelRunnerV2",
        "TreeSchedulingAhead",
    )
    assert trees["tokens"] == greedy["plain"]
    assert trees["tokens"] == on_v1
    assert trees["counts"]["tokens_per_tree"] > 1.5


def test_greedy_tokens_do_not_depend_on_the_batch(greedy):
    alone = greedy["alone"]
    assert alone["tokens"] == greedy["plain"][:1]
    stats = alone["stats"]
    expected = accepted_by_depth([alone["prompt"]], stats["tree"]["parents"], stats["tree_steps"])
    assert stats["depth_counts"] == expected


def test_greedy_tokens_without_asynchronous_scheduling(greedy):
    assert greedy["synchronous"]["scheduler"] == "TreeScheduling"
    assert greedy["synchronous"]["tokens"] == greedy["plain"][2:]
    counts = greedy["synchronous"]["counts"]
    assert counts["tokens_per_tree"] > 1.5
    assert counts["offered"][0][0] == 0  # trees are dynamic


# -- requests that trees cannot serve, and logprobs --------------------------------------


def special_params() -> list[Any]:
    """Requests without drafts between some that get trees, most with logprobs."""
    length = {"temperature": 0, "max_tokens": 12}
    return [
        SamplingParams(**length, logprobs=3),
        SamplingParams(**length, repetition_penalty=1.3, logprobs=1, extra_args={MOST_DRAFTS: 0}),
        SamplingParams(**length, structured_outputs=StructuredOutputsParams(regex=r"[a-z]{9,}")),
        SamplingParams(**length, min_tokens=6, stop_token_ids=list(range(260, 380))),
        SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True, logprobs=2),
        SamplingParams(**length, bad_words=["self", " in"], logit_bias={300: 4.0}),
        SamplingParams(**length, prompt_logprobs=1),
        SamplingParams(**length, logprob_token_ids=[300, 7, 512], logprobs=None),
        SamplingParams(**length, thinking_token_budget=4),
    ]


def grammar_params() -> list[Any]:
    """Requests whose every token a grammar checks: greedy, seeded, and with edits besides."""
    sums = StructuredOutputsParams(regex=r"[a-z]{3,8} = \d+( \+ [a-z0-9]{1,5})*")
    return [
        SamplingParams(temperature=0, max_tokens=16, structured_outputs=sums),
        SamplingParams(temperature=0.8, seed=2, max_tokens=16, structured_outputs=sums),
        SamplingParams(
            temperature=0, max_tokens=16, structured_outputs=sums, repetition_penalty=1.3
        ),
    ]


def answer_specially(llm: Any, count: Callable[[Any], Any] = lambda llm: None) -> dict[str, Any]:
    """Tokens and logprobs; with grammars; and of prompts that come in pieces."""
    params = special_params()
    texts = prompts(len(params))
    of_turns = greedy_and_seeded(3, range(7, 10), 0.8)
    pieces = turns(texts[:3], llm.get_tokenizer())
    return {
        **answered(llm.generate(texts, params, use_tqdm=False)),
        "counts": count(llm),
        "grammar": generated(llm, texts[:3], grammar_params()),
        "grammar counts": count(llm),
        "sessions": converse(llm, pieces, of_turns, at_once=False),
        "session counts": count(llm),
    }


def generate_special() -> dict[str, Any]:
    """Answers of plain V2 and of trees; and plain's to the greedy requests."""
    params = special_params()
    texts = prompts(len(params))
    thinking = {"reasoning_start_str": "(", "reasoning_end_str": "return"}
    two = SamplingParams(temperature=0, max_tokens=2)
    with running(None, reasoning_config=thinking) as llm:
        plain = answer_specially(llm)
        plain["greedy"] = completions(llm.generate(*greedy_requests(), use_tqdm=False))
    with running(sequoia(size=8, depth=3), reasoning_config=thinking) as llm:
        answers = {"plain": plain, "trees": answer_specially(llm, counted)}
        padded, undrafted = (
            ([texts[place] for place in places], [params[place] for place in places])
            for places in (PADDED, UNDRAFTED)
        )
        with counting_rows() as rows:
            found = answered(llm.generate(*padded, use_tqdm=False))
        answers["padded"] = {**found, "rows": rows, "counts": counted(llm)}
        with counting_passes() as passes:
            tokens, short = generated(llm, *undrafted), generated(llm, texts[:1], two)
            answers["undrafted"] = {"tokens": tokens, "short": short, "passes": list(passes)}
            llm.generate(texts[0], params[0], use_tqdm=False)
        answers["undrafted"] |= {"then": passes, "counts": counted(llm)}
        # Amid the second step's trees, while the third is scheduled with drafts.
        with failing_draft(at=4) as said, counting_rows() as rows:
            failed = generated(llm, texts, params)
            grammars = generated(llm, texts[:3], grammar_params())
        answers["failed"] = {
            "tokens": failed, "grammar": grammars, "said": said, "rows": rows,
            "counts": counted(llm),
        }  # fmt: skip
    return answers


# One that asks for no drafts between two requests that draft: one of few, it carries placeholders.
PADDED = [0, 1, 4]


# It asks for no drafts.
UNDRAFTED = [1]


def counting_passes() -> Any:
    """Rows of each forward of the draft within the block."""
    from sequoia_vllm.drafters.model.v2 import ModelDrafter

    return noting(ModelDrafter, "run", lambda _, rows: len(rows.token_ids))


def counting_rows() -> Any:
    """Tokens of each request in each step that is scheduled within the block."""
    from sequoia_vllm.engine.core.scheduling import TreeScheduling

    def rows(output: Any) -> list[int]:
        return list(output.num_scheduled_tokens.values())

    return noting(TreeScheduling, "schedule", rows, of_result=True)


@contextmanager
def failing_draft(at: int) -> Iterator[list[str]]:
    """What the engine says as its draft fails, in the pass of this number within the block."""
    from sequoia_vllm.drafting.growth import TreeGrowth
    from sequoia_vllm.engine.runner import tensor_parallel

    grow_level, said, passes = TreeGrowth.grow_level, [], itertools.count(1)

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(passes) >= at:
            raise RuntimeError("no kernel image is available")
        return grow_level(self, *args, **kwargs)

    with (
        patched(TreeGrowth, "grow_level", failing),
        patched(tensor_parallel.logger, "exception", lambda message, error: said.append(error)),
    ):
        yield said


@pytest.fixture(scope="module")
def special(embedded) -> dict[str, Any]:
    return embedded["special"]


def test_special_requests_are_served_right_among_trees(special):
    assert special["trees"]["tokens"] == special["plain"]["tokens"]
    assert special["trees"]["counts"]["tokens_per_tree"] > 1.2


def test_a_grammar_is_followed_along_each_path(special):
    assert special["trees"]["grammar"] == special["plain"]["grammar"]
    assert special["trees"]["grammar counts"]["tokens_per_tree"] > 1.1


def test_prompts_that_come_in_pieces_are_answered_as_by_plain_vllm(special):
    assert special["trees"]["sessions"] == special["plain"]["sessions"]
    assert special["trees"]["session counts"]["tokens_per_tree"] > 1.2


def test_one_request_without_drafts_is_scored_like_the_others(special):
    """Steps are uniform, as full CUDA graphs have to be; its tokens and logprobs are plain's."""
    padded, plain = special["padded"], special["plain"]
    assert padded["tokens"] == [plain["tokens"][place] for place in PADDED]
    assert padded["rows"].count([8, 8, 8]) >= 3
    assert [8, 1, 8] not in padded["rows"]
    check_logprobs(padded["logprobs"], [plain["logprobs"][place] for place in PADDED])
    # The tree that nobody drew is not counted, and no token of it was accepted.
    assert padded["counts"]["tokens_per_tree"] > 1.2


def test_the_draft_does_not_run_where_no_request_can_use_a_tree(special):
    found, plain = special["undrafted"], special["plain"]["tokens"]
    assert found["tokens"] == [plain[place] for place in UNDRAFTED]
    assert found["short"] == [plain[0][:2]]
    assert found["passes"] == []
    assert len(found["then"]) > 2
    assert found["counts"]["tree_steps"] > 0


def test_a_draft_that_fails_ends_speculation_only(special, greedy):
    """Trees of the step before are verified, and drafts that are scheduled already come to nothing.

    Of requests with edits, grammars and seeds among them; without asynchronous scheduling, too.
    """
    said = ["RuntimeError('no kernel image is available')"]
    found, plain = special["failed"], special["plain"]
    assert found["said"] == said
    assert found["tokens"] == plain["tokens"]
    assert found["grammar"] == plain["grammar"]
    assert 0 < found["counts"]["tree_steps"] <= 2 * len(special_params())
    with_drafts = [place for place, rows in enumerate(found["rows"]) if 8 in rows[:-1]]
    assert len(found["rows"]) - max(with_drafts) > 20  # none of the last ones
    found = greedy["failed, synchronous"]
    assert found["said"] == said
    assert found["tokens"] == greedy["plain"]
    assert found["counts"]["drafts"] > greedy["synchronous"]["counts"]["drafts"]


@pytest.mark.parametrize("kind", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_those_of_plain_vllm(kind, special):
    assert check_logprobs(special["trees"][kind], special["plain"][kind]) > 20


# -- a draft that rested --------------------------------------------------------------------


def generate_after_a_rest(models: str) -> dict[str, Any]:
    """A request alone; four others with one prompt, which run without drafts; and one with it.

    The draft is the target itself: with all keys it is always right.
    """
    target, _ = save_related_pair(Path(models))
    prompt, other = random_prompts([70, 64])
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True, detokenize=False)
    schedule = [[1, 1, 7], [2, 8, 0]]
    config = sequoia(size=8, depth=3, draft=target, num_speculative_tokens_per_batch_size=schedule)
    options = {"model": target, **TINY}
    answer: dict[str, Any] = {"tokens": [], "counts": []}
    answer["plain"] = generate(None, [prompt], params, **options)["tokens"]
    with running(config, enable_prefix_caching=True, **options) as llm:
        for batch in ([other], [prompt] * 4, [prompt]):
            answer["tokens"].append(completions(llm.generate(batch, params, use_tqdm=False)))
            answer["counts"].append(counted(llm))
        answer["hits"] = metric(llm, "vllm:prefix_cache_hits")
    return answer


def test_a_prompt_cached_while_the_draft_rested_is_drafted_as_well_as_any(tmp_path):
    found = call_on_v2(generate_after_a_rest, tmp_path, models=str(tmp_path))
    assert found["tokens"][1:] == [found["plain"] * 4, found["plain"]]
    assert found["hits"] == 4 * 64  # of three of the four, and of the last
    # vLLM's counts are those since the engine's start.
    unknown, rested, cached = ((c["drafts"], c["accepted_tokens"]) for c in found["counts"])
    assert unknown == rested == (3, 9)
    assert cached == (6, 18)


# -- a target of NaN ------------------------------------------------------------------------


def generate_nan(models: str) -> dict[str, Any]:
    """Three requests, the first with a token that the target reads as NaN."""
    unseen = 4000  # a token that prompts lack
    target, draft = save_spoilt_pair(Path(models), unseen, unseen, math.nan)
    texts = [{"prompt_token_ids": [5, unseen, 9]}, *prompts(2)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = {}
    for name, config in (("plain", None), ("trees", sequoia(size=8, depth=3, draft=draft))):
        with running(config, model=target) as llm:
            tokens = completions(llm.generate(texts, params, use_tqdm=False))
            found[name] = {"tokens": tokens, "corrupted": metric(llm, "vllm:corrupted_requests")}
            drafts = metric(llm, "vllm:spec_decode_num_drafts")
    return {**found, "drafts": drafts}


def test_nan_of_the_target_counts_and_ends_as_in_plain_vllm(tmp_path, monkeypatch):
    """vLLM's own speculation counts the rows of one request for others."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    found = call_on_v2(generate_nan, tmp_path, models=str(tmp_path))
    assert found["trees"] == found["plain"]
    assert found["plain"]["corrupted"] == 1
    assert found["drafts"] > 3


# -- custom logits processors, and another backend's grammars --------------------------------

PROCESSORS = ["tests.v2.processors:NoTokenTwice", "tests.v2.processors:NoneOfLastThree"]


def generate_with_processors() -> dict[str, Any]:
    """Greedy, seeded and edited requests, one that declines, and two with grammars of guidance."""
    params = [
        *greedy_and_seeded(4, 10),
        SamplingParams(temperature=0, max_tokens=10, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=10, extra_args={"repeat": 1}, ignore_eos=True),
        *grammar_params()[:2],
    ]
    options = {
        "logits_processors": PROCESSORS, "structured_outputs_config": {"backend": "guidance"}
    }  # fmt: skip
    texts = prompts(len(params))
    texts[5] = texts[0]
    plain = generate(None, texts, params, **options)
    with running(sequoia(size=8, depth=3), **options) as llm:
        trees = generate_on(llm, texts[:6], params[:6])
        grammars = generate_on(llm, texts[6:], params[6:])
        trees["undrafted"] = undrafted(llm)
    return {"plain": plain, "trees": trees, "grammars": grammars}


def test_custom_processors_see_each_path_as_a_chain(embedded):
    answers = embedded["processors"]
    plain, trees = answers["plain"]["tokens"], answers["trees"]
    assert trees["tokens"] == plain[:6]
    assert trees["undrafted"] == {}
    assert trees["counts"]["tokens_per_tree"] > 1.1
    for place, [tokens] in enumerate(plain):  # they were at work
        for last in range(1, 2 if place == 5 else 4):
            assert all(a != b for a, b in zip(tokens, tokens[last:], strict=False))
    assert plain[5] != plain[0]


def test_grammars_of_guidance_are_followed_beside_processors(embedded):
    answers = embedded["processors"]
    assert answers["grammars"]["tokens"] == answers["plain"]["tokens"][6:]
    assert answers["grammars"]["counts"]["tokens_per_tree"] > 1.05
