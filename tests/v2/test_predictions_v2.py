"""Predictions on Model Runner V2: plain vLLM's tokens, in fewer steps, whatever is foretold."""

from pathlib import Path
from typing import Any

import pytest

import sequoia_vllm
from sequoia_vllm.engine.core.prediction_option import COUNTED, PREDICTION
from tests.support.calling import called_once
from tests.support.engines import generated, runner_of, running, whole_trees
from tests.support.generating import (
    TINY,
    counted,
    greedy_and_seeded,
    random_prompts,
    save_related_pair,
)
from tests.support.interpreted import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

TOKENS, DEPTH = 40, 4
# Chunks of prompts; and fewer blocks than all requests need at once, so that some are preempted.
ENGINE = {
    **TINY, "max_model_len": 160, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 9,
    "enable_prefix_caching": False,
}  # fmt: skip


def params_of(foretold: list[Any]) -> list[Any]:
    """Greedy and seeded requests, which ask for counts; None: nothing is foretold."""
    params = greedy_and_seeded(len(foretold), TOKENS)
    for one, text in zip(params, foretold, strict=True):
        one.extra_args = {COUNTED: True} | ({} if text is None else {PREDICTION: text})
    return params


def edited(tokens: list[int]) -> list[int]:
    """Three changed places: a token replaced, one left out, two more."""
    return [*tokens[:8], 7, *tokens[9:20], *tokens[21:30], 9, 9, *tokens[30:]]


def generate_foretold(models: str) -> dict[str, Any]:
    target, draft = save_related_pair(Path(models))
    prompts = random_prompts([20, 75, 48, 33])
    with running(None, model=target, **TINY) as llm:
        plain = generated(llm, prompts, params_of([None] * len(prompts)))
    foretold = {
        "nothing": [None] * len(plain), "right": plain,
        "edited": [edited(tokens) for tokens in plain],
        "other": [tokens[::-1] for tokens in plain],
        "of the first": [plain[0], None, None, None],
    }  # fmt: skip
    answers: dict[str, Any] = {"plain": plain}
    config = whole_trees(size=8, depth=5, draft=draft, retrieval=True)
    with running(config, model=target, **ENGINE) as llm:
        for kind, texts in [*foretold.items(), ("then nothing", foretold["nothing"])]:
            tokens = generated(llm, prompts, params_of(texts))
            answers[kind] = {"answers": tokens, **counted(llm)}
        generated(llm, prompts[:1], params_of([None]))  # brings the workers the last ends
        proposer = runner_of(llm).speculator
        answers["kept"] = len(proposer.foretold._records), proposer.batch.predictions.tolist()
    engines = {
        "alone": ({**config, "retrieval": False, "history": True}, TINY),
        "in branches": (whole_trees(16, depth=DEPTH, draft=draft, dynamic_tree=True), ENGINE),
    }
    for name, (config, options) in engines.items():
        with running(config, model=target, **options) as llm:
            for kind in (*KINDS, "again")[: 4 + (name == "alone")]:
                params = params_of(foretold["nothing" if kind == "again" else kind])
                outputs = llm.generate(prompts, params, use_tqdm=False)
                told = [sequoia_vllm.prediction_counts(one.outputs[0]) for one in outputs]
                answers[f"{kind}, {name}"] = {
                    "answers": [list(one.outputs[0].token_ids) for one in outputs],
                    "told": [one and (one.accepted, one.rejected) for one in told], **counted(llm),
                }  # fmt: skip
            engine = llm.llm_engine.engine_core.engine_core
            generated(llm, prompts[:1], params_of([None]))  # brings the core the last ends
            answers["kept"] += (len(engine.scheduler.predictions.requests),)
    return answers


KINDS = ("nothing", "right", "edited", "other")
found = called_once(call_on_v2, generate_foretold)
OTHERS = ("plain", "kept")


def test_tokens_are_those_of_plain_vllm(found):
    plain = found["plain"]
    answers = {kind: found[kind]["answers"] for kind in found if kind not in OTHERS}
    assert len(answers) == 15
    assert [kind for kind, tokens in answers.items() if tokens != plain] == []
    assert found["then nothing"]["preemptions"] > 0


def test_what_was_foretold_is_accepted(found):
    per_tree = {kind: found[kind]["tokens_per_tree"] for kind in found if kind not in OTHERS}
    nothing = per_tree["nothing"]
    assert per_tree["right"] > 1.5 * nothing
    assert per_tree["edited"] > 1.2 * nothing
    assert per_tree["other"] > 0.9 * nothing
    assert per_tree["right, alone"] > 1.5 * per_tree["nothing, alone"]


def test_a_history_tells_what_was_answered_before(found):
    """It is no user's prediction, and not counted as one."""
    again = found["again, alone"]
    assert again["tokens_per_tree"] > 1.4 * found["nothing, alone"]["tokens_per_tree"]
    assert again["told"] == [None] * 4


def test_branches_are_deeper_than_trees(found):
    """After eight tokens; in greedy and in seeded requests."""
    per_tree = {kind: found[f"{kind}, in branches"]["tokens_per_tree"] for kind in KINDS}
    assert per_tree["right"] > DEPTH + 2
    assert per_tree["edited"] > 1.3 * per_tree["nothing"]
    assert per_tree["other"] > 0.9 * per_tree["nothing"]


@pytest.mark.parametrize("engine", ["alone", "in branches"])
def test_what_becomes_of_predictions_is_counted(found, engine):
    """The first token is told before the prompt is read."""
    told = {kind: found[f"{kind}, {engine}"]["told"] for kind in KINDS}
    assert told["nothing"] == [None] * 4
    assert told["right"] == [[TOKENS, 0]] * 4
    for accepted, rejected in told["edited"]:
        assert 0.6 * TOKENS < accepted < TOKENS
        assert rejected > 0
    for accepted, rejected in told["other"]:
        assert accepted < 0.4 * TOKENS
        assert rejected > 0


def test_predictions_are_forgotten_with_their_requests(found):
    """The next requests of their slots draft as if there had been none."""
    before, after = (
        {name: found[kind][name] for name in ("tree_steps", "tokens", "depth_counts")}
        for kind in ("nothing", "then nothing")
    )
    assert after == before
    records, addresses, *followed = found["kept"]
    assert [records, *followed] == [0, 0, 0]
    assert set(addresses) == {0}
