"""Decode steps of every batch size find a full CUDA graph, in vLLM's own manager of graphs."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from sequoia_vllm.engine.common.draft_schedule import fewer_drafts, reachable_drafts
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.v2.attention.target_graphs import LongBatch, TreeGraphManager
from sequoia_vllm.hardware.budget import drafts_by_batch, fit_to_budget
from sequoia_vllm.hardware.graph_sizes import capture_sizes
from sequoia_vllm.tree import TokenTree
from tests.support.chessboard import chessboard

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
# A tree of 64 nodes without a schedule, and one from the library.
WHOLE = [(1, 1, 63)]
LIBRARY = [
    (1, 1, 127), (2, 2, 63), (3, 4, 31), (5, 7, 16), (8, 9, 15), (10, 13, 9), (14, 18, 7),
    (19, 21, 5), (22, 45, 3), (46, 60, 2), (61, 172, 1), (173, 256, 0),
]  # fmt: skip

# With requests and tokens per step of servers, and of a small engine.
SCHEDULES = chessboard([WHOLE, LIBRARY], [(256, 2048), (250, 8192), (3, 512)])


@pytest.fixture(autouse=True)
def without_devices(monkeypatch):
    """The manager asks for these when it is made, and for nothing else of a device."""
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)


def manager_of(
    kind, schedule, max_num_seqs, budget, mode=CUDAGraphMode.FULL_AND_PIECEWISE, adapts=True,
    lora_cases=None, **options,
):  # fmt: skip
    """With its graphs, and tokens of each request by batch size."""
    drafts = max(entry[2] for entry in schedule)
    fitting = fit_to_budget(schedule, drafts, max_num_seqs, budget)
    tokens = [count + 1 for count in drafts_by_batch(fitting, drafts, max_num_seqs)]
    settings = SequoiaSettings(
        TokenTree.chain(drafts), "given", None, {}, adapts_as="pair" if adapts else None
    )
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_scheduled_tokens=budget
        ),
        offload_config=SimpleNamespace(
            offload_backend="auto",
            prefetch=SimpleNamespace(offload_group_size=0),
            uva=SimpleNamespace(cpu_offload_gb=0),
        ),
        additional_config={},
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        use_v2_model_runner=True,
        num_speculative_tokens=drafts,
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafts,
            num_speculative_tokens_per_batch_size=fitting,
            uses_dynamic_speculative_decoding=lambda: True,
        ),
    )
    settings.store(config.speculative_config)
    sizes = capture_sizes([drafts + 1 for drafts in reachable_drafts(config)], budget)
    config.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
    )
    manager = kind(
        config, torch.device("cpu"), mode, decode_query_len=drafts + 1,
        lora_capture_cases=lora_cases, **options,
    )  # fmt: skip
    manager._graphs_captured = True
    manager.graphs = dict.fromkeys(manager._capture_descs.get(FULL, ()))
    return manager, tokens


def modes(manager, tokens):
    return [
        manager.dispatch(batch, batch * each, each, 0).cg_mode
        for batch, each in enumerate(tokens, start=1)
    ]


@pytest.mark.parametrize(("schedule", "limits"), SCHEDULES)
def test_every_batch_size_has_a_full_graph(schedule, limits):
    manager, tokens = manager_of(TreeGraphManager, schedule, *limits)
    max_num_seqs, _ = limits
    assert modes(manager, tokens) == [FULL] * max_num_seqs
    captured = set(manager._capture_descs[FULL])
    assert len(captured) < 170
    for batch, each in enumerate(tokens, start=1):
        graph = manager.dispatch(batch, batch * each, each, 0)
        assert graph in captured
        assert graph.num_tokens == graph.num_reqs * each
        assert batch <= graph.num_reqs <= max_num_seqs


@pytest.mark.parametrize(("schedule", "limits"), SCHEDULES)
def test_engines_that_adapt_have_graphs_for_fewer_drafts(schedule, limits):
    """All that they may change over to from the schedule's, padded by half at most."""
    manager, tokens = manager_of(TreeGraphManager, schedule, *limits)
    fewer = [drafts + 1 for drafts in fewer_drafts(manager.vllm_config)]
    assert len(fewer) >= 5
    for batch, most in enumerate(tokens, start=1):
        for each in (number for number in fewer if number <= most):
            graph = manager.dispatch(batch, batch * each, each, 0)
            assert graph.cg_mode == FULL
            assert batch <= graph.num_reqs <= max(1.5 * batch, batch + 1)
    frozen, _ = manager_of(TreeGraphManager, schedule, *limits, adapts=False)
    assert len(frozen._capture_descs[FULL]) < len(manager._capture_descs[FULL])


def test_engines_that_adapt_have_graphs_beyond_a_pessimistic_schedule():
    """For up to twice the requests, as far as the token budget has room for trees."""
    manager, _ = manager_of(TreeGraphManager, [(1, 4, 15), (5, 64, 0)], 64, 2048)
    assert reachable_drafts(manager.vllm_config)[:10] == [15] * 8 + [0] * 2
    for batch in range(1, 9):
        assert manager.dispatch(batch, batch * 16, 16, 0).cg_mode == FULL


def test_requests_that_finish_leave_the_others_a_full_graph():
    """A step verifies drafts of the step before, when there may have been twice the requests."""
    manager, tokens = manager_of(TreeGraphManager, LIBRARY, 256, 2048)
    for batch, each in enumerate(tokens, start=1):
        left = (batch + 1) // 2
        assert manager.dispatch(left, left * each, each, 0).cg_mode == FULL


def test_batches_in_which_nobody_drafts_have_graphs_too():
    manager, _ = manager_of(TreeGraphManager, WHOLE, 250, 2048)
    found = modes(manager, [1] * 250)
    assert found == [FULL] * 250


def test_other_steps_find_what_vllm_has_for_them():
    """Prompts beside trees, and more tokens than are captured."""
    ours, _ = manager_of(TreeGraphManager, LIBRARY, 256, 2048)
    plain, _ = manager_of(ModelCudaGraphManager, LIBRARY, 256, 2048)
    most = ours.compilation_config.max_cudagraph_capture_size
    for tokens in range(1, most + 20):
        found = ours.dispatch(min(tokens, 7), tokens, None, 0)
        assert found == plain.dispatch(min(tokens, 7), tokens, None, 0)
        assert found.cg_mode == (PIECEWISE if tokens <= most else NONE)


def test_steps_that_read_short_prompts_have_full_graphs():
    """Where the engine captures some: whatever requests they have, padded by little."""
    manager, _ = manager_of(TreeGraphManager, LIBRARY, 256, 2048, captures_mixed=True)
    captured = manager._capture_descs[FULL]
    assert [graph.num_tokens for graph in captured] == sorted(
        (graph.num_tokens for graph in captured), reverse=True
    )
    assert sum(graph.uniform_token_count is None for graph in captured) < 25
    manager.may_be_mixed = True
    for requests in (1, 2, 8, 9, 32, 33, 100, 256):
        for tokens in range(2 * requests, 513, 7):
            graph = manager.dispatch(requests, tokens, None, 0)
            assert (graph.cg_mode, graph.uniform_token_count) == (FULL, None)
            assert graph in captured
            assert manager.is_mixed
            assert requests <= graph.num_reqs
            assert tokens <= graph.num_tokens < tokens + max(64, 2 * graph.num_reqs)
    assert manager.dispatch(3, 513, None, 0).cg_mode == NONE
    assert not manager.is_mixed
    assert manager.dispatch(2, 2 * 64, 64, 0).uniform_token_count == 64
    assert not manager.is_mixed
    manager.may_be_mixed = False
    assert manager.dispatch(3, 100, None, 0).cg_mode == PIECEWISE


def test_steps_with_long_contexts_take_twins_of_wide_graphs():
    """Where the engine has a rule for them; steps with fewer nodes have one graph."""
    manager, tokens = manager_of(TreeGraphManager, LIBRARY, 256, 2048, long_from=32)
    plain, _ = manager_of(TreeGraphManager, LIBRARY, 256, 2048)
    every = manager._capture_descs[FULL]
    long = [graph for graph in every if isinstance(graph, LongBatch)]
    assert [graph for graph in every if graph not in long] == plain._capture_descs[FULL]
    wide = [graph for graph in plain._capture_descs[FULL] if graph.uniform_token_count >= 32]
    assert [vars(graph) for graph in long] == [vars(graph) for graph in wide]
    assert 0 < len(long) < len(every) / 4
    for manager.is_long in (False, True):
        for batch, each in enumerate(tokens, start=1):
            graph = manager.dispatch(batch, batch * each, each, 0)
            assert vars(graph) == vars(plain.dispatch(batch, batch * each, each, 0))
            assert isinstance(graph, LongBatch) is (manager.is_long and each >= 32)
    manager.is_long, manager.graphs = True, dict.fromkeys(plain._capture_descs[FULL])  # on trial
    assert not isinstance(manager.dispatch(1, tokens[0], tokens[0], 0), LongBatch)


def test_twins_are_captured_apart(monkeypatch):
    """Attention learns from the manager which of two graphs of one size is captured."""
    seen = []

    def capture(manager, *_args):
        seen.append((manager.is_long, list(manager._capture_descs.get(FULL, ()))))

    monkeypatch.setattr(ModelCudaGraphManager, "capture", capture)
    manager, _ = manager_of(TreeGraphManager, LIBRARY, 256, 2048, long_from=32)
    every = manager._capture_descs
    manager.capture()
    assert [is_long for is_long, _ in seen] == [False, True]
    assert {isinstance(graph, LongBatch) for graph in seen[0][1]} == {False}
    assert {isinstance(graph, LongBatch) for graph in seen[1][1]} == {True}
    assert sorted(map(hash, seen[0][1] + seen[1][1])) == sorted(map(hash, every[FULL]))
    assert (manager.is_long, manager._capture_descs) == (False, every)
    manager._max_full_descs_to_capture = 2  # a trial: all count as the second one of these
    manager.capture()
    assert [is_long for is_long, _ in seen] == [False, True, False]


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, PIECEWISE, FULL, NONE])
def test_other_modes_have_no_graphs_for_prompts_beside_trees(mode):
    """Those who capture decode steps only want nothing for prompts."""
    manager, _ = manager_of(TreeGraphManager, LIBRARY, 64, 2048, mode=mode, captures_mixed=True)
    plain, _ = manager_of(TreeGraphManager, LIBRARY, 64, 2048, mode=mode)
    assert manager._capture_descs == plain._capture_descs
    manager.may_be_mixed = True
    assert manager.dispatch(3, 100, None, 0) == plain.dispatch(3, 100, None, 0)
    assert not manager.is_mixed


def test_batches_with_adapters_have_graphs_for_as_many_as_vllm_captures():
    """vLLM captures for some numbers of adapters, and a batch takes the next larger one."""
    lora = {"lora_cases": [0, 1, 2, 4]}
    ours, tokens = manager_of(TreeGraphManager, LIBRARY, 64, 2048, **lora)
    plain, _ = manager_of(ModelCudaGraphManager, LIBRARY, 64, 2048, **lora)
    captured = set(ours._capture_descs[FULL])
    for adapters, captured_for in ((0, 0), (1, 1), (2, 2), (3, 4), (4, 4)):
        for batch, each in enumerate(tokens, start=1):
            graph = ours.dispatch(batch, batch * each, each, adapters)
            assert graph in captured
            assert (graph.cg_mode, graph.num_active_loras) == (FULL, captured_for)
            assert graph.num_tokens == graph.num_reqs * each >= batch * each
        for others in (7, 300):
            found = ours.dispatch(5, others, None, adapters)
            assert found == plain.dispatch(5, others, None, adapters)
    ours, _ = manager_of(TreeGraphManager, LIBRARY, 64, 2048, captures_mixed=True, **lora)
    ours.may_be_mixed = True
    for adapters, captured_for in ((0, 0), (1, 1), (3, 4)):
        graph = ours.dispatch(5, 100, None, adapters)
        assert (graph.cg_mode, graph.num_active_loras) == (FULL, captured_for)
    without, _ = manager_of(TreeGraphManager, LIBRARY, 64, 2048)
    assert len(captured) == 4 * len(without._capture_descs[FULL])


def test_without_separate_decode_graphs_all_is_vllms():
    ours, tokens = manager_of(TreeGraphManager, LIBRARY, 256, 2048, mode=PIECEWISE)
    assert set(modes(ours, tokens)) == {PIECEWISE}
    ours, _ = manager_of(TreeGraphManager, LIBRARY, 256, 2048, mode=NONE)
    assert ours._capture_descs == {}


def test_vllms_own_manager_still_needs_ours():
    """When this fails, `TreeGraphManager` may go: a batch finds graphs of other tokens only."""
    plain, tokens = manager_of(ModelCudaGraphManager, LIBRARY, 256, 2048)
    assert modes(plain, tokens).count(PIECEWISE) > 20
    assert len(plain._capture_descs[FULL]) > 150
