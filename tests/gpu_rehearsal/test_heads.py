"""Trees drafted by trained heads on vLLM's GPU engine: from start-up to replayed graphs."""

from typing import Any

import pytest

from tests.support.engines import leave_nan, sequoia
from tests.support.heads import DFLASH, EAGLE3
from tests.support.models import TARGET, prompts
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import generate, generate_with_trees, rehearsing
from tests.support.sleeping import lost_of_ours

pytestmark = pytest.mark.engine

DEPTH = 3


def greedy() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def start_and_generate() -> dict[str, Any]:
    """Answers of plain vLLM, and with each head for batches of three and of one."""
    from gpu_stand_in import sleeping

    texts, options = prompts(3), {"model": TARGET, "skip_tokenizer_init": False}
    with rehearsing(None, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, texts, greedy())}
    for name, head in (("eagle3", EAGLE3), ("dflash", DFLASH)):
        allocator = sleeping.install()
        config = sequoia(size=8, depth=DEPTH, draft=head)
        with rehearsing(config, **options, enable_sleep_mode=True) as llm:
            leave_nan(llm)
            answers[f"{name} lost"] = lost_of_ours(llm, allocator)
            answers[name] = generate_with_trees(llm, texts, greedy())
            answers[f"{name} alone"] = generate_with_trees(llm, texts[:1], greedy())
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return call_on_gpu(start_and_generate, tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize("name", ["eagle3", "eagle3 alone", "dflash", "dflash alone"])
def test_tokens_are_those_of_plain_vllm_from_graphs(name, answers):
    found = answers[name]
    assert found["tokens"] == answers["plain"]["tokens"][: len(found["tokens"])]
    assert found["eager growth"] == []
    # All steps but those that read prompts are replayed.
    assert found["graphs"]["DraftGraphs"] >= found["counts"]["steps"] - 3
    assert found["graphs"]["TreeGraphManager"] >= found["counts"]["steps"] - 3


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_drafts_are_accepted(name, answers):
    assert answers[name]["counts"]["tokens_per_tree"] > 1.2


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_nothing_of_ours_is_lost_in_sleep_without_weights(name, answers):
    assert answers[f"{name} lost"] == []
