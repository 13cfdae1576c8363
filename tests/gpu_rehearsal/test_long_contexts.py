"""Prompts beside trees at contexts of 32k tokens: from full graphs, nothing compiled late.

Interpreted, 128k take too long for CI: `run` takes any length. A long request is read alone. Then
it goes on beside short prompts and another turn of itself. Tiles are larger than a GPU's, as the
interpreter's time goes by their number, and contexts are split as on 16 multiprocessors.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sequoia_vllm.engine.common.patched import patched
from tests.support.engines import metric, runner_of, sequoia
from tests.support.generating import counted, greedy_and_seeded, joined, save_related_pair
from tests.support.generating import random_prompts as prompts
from tests.support.interpreted import call_on_gpu
from tests.support.rehearsing import counting_eager, noting_modes, recording_versions, rehearsing

pytestmark = [
    pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded, pytest.mark.timeout(2000),
]  # fmt: skip

# Outside of graphs. The engine's warm-up, which these starts leave out, compiles them:
# `test_slots.py` shows that nothing is missing there.
WARMED_UP = {
    "begin_drafting_kernel", "commit_kernel", "gather_for_verification_kernel",
    "place_nodes_kernel",
}  # fmt: skip
SHORT, TURN, TOKENS = [60, 200], 12, 10  # the turn's own tokens, behind whole blocks


def run(models: str, length: int) -> dict[str, Any]:
    """Answers of plain vLLM and of trees, and how the steps of the latter ran."""
    from sequoia_vllm.kernels import tree_attention

    target, draft = save_related_pair(
        Path(models), max_position_embeddings=1 << 18, num_attention_heads=1
    )
    long, *short = prompts([length, *SHORT])
    turn = {"prompt_token_ids": [*long["prompt_token_ids"], *short[0]["prompt_token_ids"][:TURN]]}
    requests = [turn, *short, turn]
    options = {
        "model": target, "max_num_seqs": 3, "max_model_len": length + 256,
        "kv_cache_memory_bytes": length * (5 << 10), "max_num_batched_tokens": 512,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 64, 256]},
    }  # fmt: skip
    alone, params = greedy_and_seeded(1, 3), greedy_and_seeded(len(requests), TOKENS)
    with rehearsing(None, **options) as llm:
        llm.generate([long], alone, use_tqdm=False)
        answers: dict[str, Any] = {"plain": joined(llm, requests, params)}
    tile = tree_attention.Tile(16, 1024, num_warps=4, num_stages=2)
    with (
        patched(tree_attention, "choose_tile", lambda *_, **how: tile),
        patched(tree_attention, "MIN_POSITIONS_PER_SPLIT", 4 * tile.keys),
        on_processors(16),
        recording_versions() as versions,
        rehearsing(sequoia(size=8, depth=3, draft=draft), **options) as llm,
    ):
        at_start = set(versions)
        llm.generate([long], alone, use_tqdm=False)
        hits = metric(llm, "vllm:prefix_cache_hits")
        with counting_eager() as eager, noting_modes(runner_of(llm)) as modes:
            answers["trees"] = joined(llm, requests, params)
        answers |= {
            "hits": metric(llm, "vllm:prefix_cache_hits") - hits, "modes": Counter(modes),
            "late": sorted(versions - at_start), "counts": counted(llm), **eager,
            "planned": sorted({name for name, key in at_start if "('PLANNED', True)" in key}),
        }  # fmt: skip
    return answers


def on_processors(number: int) -> Any:
    """Engines that start within the block find so many multiprocessors."""
    from sequoia_vllm.engine.v2.attention import backend_gpu

    workspace = partial(backend_gpu.TreeAttentionWorkspace, processors=number)
    return patched(backend_gpu, "TreeAttentionWorkspace", workspace)


@pytest.fixture(scope="module", params=[32_768])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    return request.param, call_on_gpu(
        run, folder, timeout=1800, models=str(folder), length=request.param
    )


def test_tokens_are_those_of_plain_vllm(found):
    length, answers = found
    assert answers["trees"] == answers["plain"]
    assert answers["hits"] == 2 * length
    assert answers["counts"]["tokens_per_tree"] > 1.3


def test_every_step_beside_a_long_context_is_one_graph_for_each_model(found):
    _, answers = found
    assert set(answers["modes"]) == {"FULL", "FULL beside prompts"}
    assert answers["modes"]["FULL beside prompts"] > 2
    assert answers["eager reads"] == answers["eager growth"] == []


def test_nothing_is_compiled_while_requests_run(found):
    assert found[1]["planned"] == ["merge_splits_kernel", "tree_attention_kernel"]
    assert {name for name, _ in found[1]["late"]} <= WARMED_UP
