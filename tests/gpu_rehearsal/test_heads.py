"""Trees drafted by trained heads on vLLM's GPU engine: from start-up to replayed graphs."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.support.calling import called_once
from tests.support.engines import leave_nan, noting, runner_of, scheduler_of, sequoia
from tests.support.generating import counted, joined
from tests.support.heads import DFLASH, EAGLE3
from tests.support.interpreted import call_on_gpu
from tests.support.models import TARGET, prompts
from tests.support.rehearsing import (
    check_replayed,
    counting_eager,
    generate,
    generate_with_trees,
    rehearsing,
)
from tests.support.sleeping import lost_of_ours

pytestmark = pytest.mark.engine

DEPTH = 3
PAUSE = range(3, 7)  # steps that ask for no drafts


def greedy(tokens: int = 12) -> Any:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def start_and_generate(head: str) -> dict[str, Any]:
    """Answers of plain vLLM, and with this head for batches of three and of one."""
    from gpu_stand_in import sleeping

    texts, options = prompts(3), {"model": TARGET, "skip_tokenizer_init": False}
    with rehearsing(None, **options) as llm:
        answers: dict[str, Any] = {"plain": generate(llm, texts, greedy(20))}
    allocator = sleeping.install()
    config = sequoia(size=8, depth=DEPTH, draft=head, dynamic_tree=head == EAGLE3)
    with rehearsing(config, **options, enable_sleep_mode=True) as llm:
        leave_nan(llm)
        answers["lost"] = lost_of_ours(llm, allocator)
        answers["together"] = generate_with_trees(llm, texts, greedy())
        answers["alone"] = generate_with_trees(llm, texts[:1], greedy())
        answers["pausing"] = pause(llm, texts)
    return answers


def pause(llm: Any, texts: list[Any]) -> dict[str, Any]:
    """Trees at first and at last, and none between; graphs of the draft's replayed in each step.

    And tokens per request (0: any) of graphs of keys alone. The last request comes within the
    pause.
    """
    from gpu_stand_in import graphs

    lookup, replayed = scheduler_of(llm).dynamic_sd_lookup, []
    drafts = list(lookup)

    def before_step(step: int) -> None:
        lookup[:] = [0] * len(drafts) if step in PAUSE else drafts
        replayed.append(graphs.replayed["DraftGraphs"])

    reader = runner_of(llm).speculator._reader
    key_reads = noting(
        reader.key_graphs, "run_fullgraph", lambda shape: shape.uniform_token_count or 0
    )
    with counting_eager() as eager, key_reads as keys:
        tokens = joined(llm, texts, [greedy(20)] * len(texts), before_step=before_step)
    replays, layers = np.diff(replayed).tolist(), len(reader.drafter.cache.groups)
    found = {"tokens": tokens, "replays": replays, "counts": counted(llm)}
    return {**found, "keys": keys, "layers": layers, **eager}


# Graphs of DFlash: `tests/v2/test_sampled_trees_v2.py` replays them in every run.
HEADS = [
    pytest.param(EAGLE3, id="eagle3"),
    pytest.param(DFLASH, id="dflash", marks=pytest.mark.sharded),
]
answers = called_once(call_on_gpu, start_and_generate, ("head", HEADS))


@pytest.mark.parametrize("name", ["together", "alone"])
def test_tokens_are_those_of_plain_vllm_from_graphs(name, answers):
    plain = [[tokens[:12]] for [tokens] in answers["plain"]["tokens"]]
    check_replayed(answers[name], {"tokens": plain})
    assert answers[name]["counts"]["tokens_per_tree"] > 1.2 or name == "alone"


def test_heads_read_from_a_graph_where_nothing_is_drafted(answers):
    """Each step reads and grows; or it only reads: what the last trees left, a prompt, a token."""
    found = answers["pausing"]
    assert found["tokens"] == answers["plain"]["tokens"]
    assert found["replays"][:9] == [2, 2, 2, 1, 1, 1, 1, 2, 2]
    assert found["eager reads"] == []
    assert found["counts"]["accepted_tokens"] > 5
    if found["layers"] == 1:  # its pass ends once keys and values are written
        assert len(found["keys"]) == len(PAUSE)
        assert found["keys"].count(0) >= 2


def test_nothing_of_ours_is_lost_in_sleep_without_weights(answers):
    assert answers["lost"] == []
