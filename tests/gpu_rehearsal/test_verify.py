"""What `verify` asks of an engine, of vLLM's GPU engine with graphs; a stale graph fails it."""

import os
from pathlib import Path
from typing import Any

import pytest

from sequoia_vllm.bench.methods import PLAIN
from sequoia_vllm.bench.verify import BATCH, TRAFFIC, Verification, VerifySettings
from sequoia_vllm.bench.verify_engine import TOGETHER
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.verifying import report
from sequoia_vllm.verifying.report import Outcome, check_graphs
from tests.gpu_rehearsal.test_mutants import moves_its_buffers, with_mistake
from tests.support.calling import called_once
from tests.support.generating import random_prompts, save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.models import save_word_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

STALE = ", with a stale graph"
OPTIONS = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 3, "skip_tokenizer_init": True,
}  # fmt: skip


def settings_of(folder: str) -> VerifySettings:
    """A related pair with tokenizers, whose answers are short."""
    target, draft = save_related_pair(Path(folder))
    for model in (target, draft):
        save_word_tokenizer(Path(model))
    return VerifySettings(
        target, draft, chain=None, options=OPTIONS,
        config={"method": "sequoia", "model": draft, "tree": {"size": 8, "depth": 3}},
        prompts=tuple(one["prompt_token_ids"] for one in random_prompts([9, 18, 13, 21])),
        max_tokens=24, samples=4, sampled_tokens=12, rounds=1, speed_sizes=(1,),
    )  # fmt: skip


def verify_with_graphs(models: str) -> dict[str, Any]:
    """An engine's part of `verify`: in a batch and under traffic; and again with a stale graph."""
    from gpu_stand_in.vllm_parts import QUICK_START

    from sequoia_vllm.drafting.draft_batch import DraftBatch

    os.environ[QUICK_START] = "1"  # in a process of its own
    found = Verification(settings_of(models))
    trees = found.settings.whole_trees()
    with found._engine(trees) as engine:
        found.found.limits = dict(engine.limits())
        found._answer_together(engine)
        failures = engine._metric("sequoia:draft_failures")
    with with_mistake(DraftBatch, "begin", moves_its_buffers), found._engine(trees) as engine:
        found._answer_together(engine, STALE)
    with found._engine(PLAIN) as engine:
        plain = {
            what: [list(one.tokens) for one in engine.answer(prompts, 24, TOGETHER)]
            for what, (prompts, _) in found.found.observed.items()
        }
    counted = found.found.trees
    with patched(report, "FEWEST_TREES", 40):  # a batch of four short answers has no more
        checks = [check_graphs(counted[BATCH + how], counted[BATCH]) for how in ("", STALE)]
    return {
        "limits": found.found.limits, "failures": failures, "plain": plain,
        "answers": {what: answers for what, (_, answers) in found.found.observed.items()},
        "traffic": found._traffic_check().to_dict(),
        "checks": [check.to_dict() for check in checks],
    }  # fmt: skip


found = called_once(call_on_gpu, verify_with_graphs)


def test_answers_from_graphs_are_plain_vllms(found):
    """Also of requests that arrive, are aborted and preempted while they share a prefix.

    A new request may find a block that a resumed one fills in the same step: once the draft read
    it for both, and wrote its slots twice.
    """
    assert found["limits"]["runner"] == "V2"
    assert "FULL" in found["limits"]["cudagraph_mode"]
    assert found["failures"] == 0
    assert found["answers"] == found["plain"]
    assert {BATCH, TRAFFIC} < found["answers"].keys()
    assert found["traffic"]["outcome"] == Outcome.PASSED, found["traffic"]


def test_a_stale_graph_fails_it(found):
    """Answers are plain vLLM's whatever is drafted: the check of graphs alone can tell."""
    unchanged, stale = found["checks"]
    assert unchanged["outcome"] == Outcome.PASSED, unchanged
    assert stale["outcome"] == Outcome.FAILED, stale
