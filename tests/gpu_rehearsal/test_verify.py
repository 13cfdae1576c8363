"""The command `verify` over vLLM's GPU engine with graphs: a stale graph fails it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sequoia_vllm.bench.verify import BATCH, TRAFFIC, WITHOUT, Verification
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.verifying.law import BY_DRAFT
from sequoia_vllm.verifying.report import Outcome, VerifyReport, check_graphs
from tests.gpu_rehearsal.test_mutants import moves_its_buffers, with_mistake
from tests.support.calling import called_once
from tests.support.generating import random_prompts, save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.models import save_word_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

LENGTHS = [9, 18, 13, 21, 30, 11, 16, 25]
CONFIG = {"method": "sequoia", "tree": {"size": 8, "depth": 3}}
STALE = ", with a stale graph"


def words(folder: Path) -> list[str]:
    """The command for a related pair. Options are those that make it small, and float32."""
    target, draft = save_related_pair(folder)
    for model in (target, draft):
        save_word_tokenizer(Path(model))
    prompts = folder / "prompts.jsonl"
    texts = (" ".join(f"w{n}" for n in one["prompt_token_ids"]) for one in random_prompts(LENGTHS))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    given = {
        "--draft-model": draft, "--prompts": prompts, "--num-prompts": len(LENGTHS),
        "--speculative-config": json.dumps(CONFIG), "--dtype": "float32", "--max-model-len": 256,
        "--max-num-seqs": 4,
    }  # fmt: skip
    options = [str(word) for pair in given.items() for word in pair]
    return ["verify", target, "--quick", "--json", *options]


def verify(folder: str) -> dict[str, Any]:
    """The command's report; and its first engine's part again, with a stale graph."""
    from gpu_stand_in.vllm_parts import QUICK_START
    from typer.testing import CliRunner

    from sequoia_vllm.cli import app
    from sequoia_vllm.cli import verify as command
    from sequoia_vllm.drafting.draft_batch import DraftBatch

    os.environ[QUICK_START] = "1"  # in a process of its own
    ran: list[Verification] = []

    def noted(*args: Any) -> Verification:
        ran.append(Verification(*args))
        return ran[-1]

    with patched(command, "Verification", noted):
        done = CliRunner().invoke(app, words(Path(folder)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    [one] = ran
    with (
        with_mistake(DraftBatch, "begin", moves_its_buffers),
        one._engine(one.settings.whole_trees()) as engine,
    ):
        one._answer_together(engine, STALE)
    for part in (BATCH, TRAFFIC):
        one.found.trees[part] = one.found.trees[part + STALE]
    return {
        "code": done.exit_code, "report": json.loads(done.stdout),
        "stale": check_graphs(*one._trees_by_graphs()).to_dict(),
    }  # fmt: skip


found = called_once(call_on_gpu, verify)


def test_the_whole_command_passes(found):
    """Its traffic preempts requests that share a prefix with those that arrive.

    A new request may find a block that a resumed one fills in the same step: once the draft read
    it for both, and wrote its slots twice.
    """
    report = VerifyReport.model_validate(found["report"])
    others = {c.name: c.said for c in report.checks if c.outcome is not Outcome.PASSED}
    assert (found["code"], others, report.verdict) == (0, {}, Outcome.PASSED)
    assert report.options["runner"] == "V2"
    assert "FULL" in report.options["cudagraph_mode"]
    answers = {one.what: one for one in report.answers}
    assert {BATCH, TRAFFIC, f"{BATCH}, {WITHOUT}", f"{TRAFFIC}, {WITHOUT}"} < answers.keys()
    assert all(one.identical == one.answers > 0 for one in report.answers)
    assert all(BY_DRAFT in {test.what for test in one.tests} for one in report.law)


def test_a_stale_graph_fails_it(found):
    """Answers are plain vLLM's whatever is drafted: the check of graphs alone can tell."""
    assert found["stale"]["outcome"] == Outcome.FAILED, found["stale"]
