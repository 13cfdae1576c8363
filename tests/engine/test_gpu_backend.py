"""What GPU attention is told of a batch, and weights that are made up; nothing runs here."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sequoia_vllm.drafting.growth import NodeQueries
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.v2.attention.attention_gpu import other_chains
from sequoia_vllm.engine.v2.attention.scoring import OtherRows, TreeScoring
from sequoia_vllm.tree import TokenTree

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")
TREE = TokenTree([-1, 0, 0, 1])
TABLES = TreeTables(TREE, CPU)
NUMBERS = torch.zeros(4, dtype=torch.int32)


@pytest.fixture
def backend():
    from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend

    return GPUTreeBackend(TABLES.ancestors)


def batch(lengths, drafts):
    """A batch whose requests with trees come first, as vLLM sorts them."""
    scheduled = np.array(drafts) + 1
    return SimpleNamespace(
        num_reqs=len(lengths),
        num_draft_tokens=sum(drafts),
        num_draft_tokens_per_req=np.array(drafts),
        num_scheduled_tokens=scheduled,
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        query_start_loc=NUMBERS,
        query_start_loc_np=np.cumsum([0, *scheduled]),
    )


def test_contexts_are_split_for_the_longest_request_with_a_tree(backend):
    """Not for all that its blocks hold, nor for a prompt that is read beside it."""
    scoring = TreeScoring(TABLES, 4, CPU)
    trees = scoring.trees_of(batch([40, 300, 9000], [3, 3, 0]))
    alone = scoring.trees_of(batch([40, 300], [3, 3]))
    assert trees.max_keys == alone.max_keys == 300
    metadata = SimpleNamespace(block_table=torch.zeros(2, 600, dtype=torch.int32))
    assert backend.scoring_queries(alone, metadata).max_keys == 300


@pytest.mark.parametrize(("changed", "leaves"), [
    ({}, True),
    ({"vllm_flash_attn_version": 2}, True),
    ({"vllm_flash_attn_version": 4}, False),
    ({"sliding_window": (15, 0)}, False),
    ({"logits_soft_cap": 30.0}, False),
    ({"sinks": NUMBERS}, False),
    ({"kv_cache_dtype": "fp8"}, False),
])  # fmt: skip
def test_layers_that_leave_long_contexts_to_flash_attention(changed, leaves):
    from sequoia_vllm.engine.v2.attention.attention_gpu import FlashTreeImpl

    impl = object.__new__(FlashTreeImpl)
    usual = {
        "vllm_flash_attn_version": 3, "sliding_window": (-1, -1), "logits_soft_cap": 0.0,
        "sinks": None, "kv_cache_dtype": "auto",
    }  # fmt: skip
    for name, value in {**usual, **changed}.items():
        setattr(impl, name, value)
    assert impl.attends_to_contexts is leaves


def test_graphs_are_captured_for_the_longest_requests(backend):
    scoring = TreeScoring(TABLES, 4, CPU)
    captured = scoring.trees(batch([8, 8], [3, 3]), 2, 4, 131072)
    metadata = SimpleNamespace(block_table=torch.zeros(2, 8192, dtype=torch.int32))
    assert backend.scoring_queries(captured, metadata).max_keys == 131072


@pytest.mark.parametrize(("window", "refused"), [(32, True), (33, False), (None, False)])
def test_dynamic_trees_need_longer_windows_than_they_have_nodes(window, refused):
    from sequoia_vllm.engine.v2.attention.attention_gpu import TritonTreeImpl
    from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend

    impl = object.__new__(TritonTreeImpl)
    impl.sliding_window, impl.head_size = (-1 if window is None else window - 1, 0), 64
    for trees, is_refused in (
        (torch.zeros(3, 32, 32, dtype=torch.bool), refused),
        (TABLES.ancestors, False),
    ):
        reason = GPUTreeBackend(trees).unsupported_attention("layer", impl)
        assert (reason is not None) is is_refused
        assert not is_refused or 'a window of 32 tokens and "dynamic_tree": true' in reason


@pytest.mark.parametrize(("dtype", "refused"), [("auto", False), ("fp8_ds_mla", True)])
def test_sparse_layers_have_one_backend_and_no_latents_in_fp8(dtype, refused, backend, monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends

    from sequoia_vllm.engine.v2.attention import backend_gpu, sparse_layers

    impl = object.__new__(sparse_layers.SparseTreeImpl)
    impl.kv_cache_dtype, impl.index_group = dtype, None
    reason = backend.unsupported_attention("layer", impl)
    assert (reason is not None and "--kv-cache-dtype bfloat16" in reason) is refused
    others = {one for one in Backends if "MLA_SPARSE" in one.name} - {Backends.FLASHMLA_SPARSE}
    assert {Backends.FLASH_ATTN_MLA_SPARSE, Backends.FLASHINFER_MLA_SPARSE} <= others
    assert all("NoTreesBackend" in backend_gpu.CLASSES[one] for one in others)
    assert backend_gpu.CLASSES[Backends.FLASHMLA_SPARSE].endswith("SparseTreeBackend")
    monkeypatch.setattr(backend_gpu, "check_model", lambda _: None)  # it would import Hy4's package
    of_hy4 = backend_gpu.classes_for(["HYV4ForCausalLM"])
    assert of_hy4[Backends.FLASHMLA_SPARSE].endswith("sparse_sink_layers.SinkTreeBackend")
    sinks = {Backends.FLASHMLA_SPARSE: of_hy4[Backends.FLASHMLA_SPARSE]}
    assert of_hy4 == backend_gpu.classes_for(["LlamaForCausalLM"]) | sinks


def test_a_commit_moves_an_indexers_keys_and_their_scales(backend, monkeypatch):
    """Beside the latents: node 2 of a request with two tokens goes from slot 4 to slot 3."""
    from sequoia_vllm.engine.v2.attention import backend_gpu

    def commit(layers, *, block_table, context_lens, accepted):
        assert (context_lens.tolist(), accepted.tolist()) == ([2], [[2, -1]])
        [[first, second]] = block_table.tolist()
        for cache in layers.caches:
            cache[first, :, 3] = cache[second, :, 0]

    monkeypatch.setattr(backend_gpu, "commit_accepted", commit)
    blocks, slots, size = 3, 4, 8
    numbers = torch.arange(blocks * slots * (size + 4), dtype=torch.uint8)
    keys = numbers.view(blocks, slots, size + 4)
    latents = torch.arange(72.0).view(blocks, slots, 6)
    caches, before = {"keys": keys, "latents": latents}, [keys.clone(), latents.clone()]
    table = torch.tensor([[2, 0], [1, 1]])
    metadata = {name: SimpleNamespace(block_table=table) for name in caches}
    backend._indexers.add("keys")
    trees = SimpleNamespace(num_requests=1, context_lens=torch.tensor([2]))
    backend.commit(caches, metadata, trees, torch.tensor([[2, -1]]))

    ends = [slots * size, slots * 4]  # keys of all slots of a block, then their scales
    found = [*keys.flatten(1).split(ends, dim=1), latents.flatten(1)]
    old = [*before[0].flatten(1).split(ends, dim=1), before[1].flatten(1)]
    for now, then in zip(found, old, strict=True):
        now, then = now.unflatten(1, (slots, -1)), then.unflatten(1, (slots, -1)).clone()
        then[2, 3] = then[0, 0]
        assert torch.equal(now, then)


def test_layers_that_the_kernel_does_not_take():
    from sequoia_vllm.engine.v2.attention import diffkv_layers
    from sequoia_vllm.engine.v2.attention.attention_gpu import TritonTreeBackend
    from sequoia_vllm.engine.v2.attention.backend_gpu import GPUTreeBackend
    from sequoia_vllm.engine.v2.attention.chunked_layers import chunked_backend

    def reason(kind, backend):
        impl = object.__new__(kind)
        impl.sliding_window, impl.head_size = (-1, -1), 192
        return backend.unsupported_attention("layer", impl)

    def of_chunks(size):
        return chunked_backend(TritonTreeBackend, size).get_impl_cls()

    backend = GPUTreeBackend(torch.eye(32, dtype=torch.bool))
    assert "chunks of 16 tokens, fewer than a tree's 32 nodes" in reason(of_chunks(16), backend)
    assert reason(of_chunks(32), backend) is None
    larger = diffkv_layers.TritonDiffKVTreeBackend
    larger.set_head_size_v(120)
    assert "keys of 192 channels and values of 120" in reason(larger.get_impl_cls(), backend)
    larger.set_head_size_v(128)
    assert reason(larger.get_impl_cls(), backend) is None


@dataclass
class Metadata:
    """Fields of vLLM's that follow the rows beside trees; images lie in requests 0 and 2."""

    num_actual_tokens: int = 17
    max_query_len: int = 9
    query_start_loc: Any = field(default_factory=lambda: torch.tensor([0, 4, 8, 17]))
    max_seq_len: int = 9000
    seq_lens: Any = field(default_factory=lambda: torch.tensor([40, 300, 9000]))
    block_table: Any = field(default_factory=lambda: torch.arange(6).view(3, 2))
    scheduler_metadata: Any = "a plan"
    mm_prefix_range: Any = field(default_factory=lambda: {0: [(1, 4)], 2: [(5, 9), (20, 24)]})
    mm_prefix_range_tensor: Any = field(default_factory=lambda: torch.arange(12).view(3, 2, 2))
    mm_prefix_query_range_tensor: Any = field(default_factory=lambda: torch.arange(34).view(17, 2))


def test_rows_beside_trees_keep_their_images():
    """vLLM counts requests, and rows, from the first; ours leave out those of trees."""
    rows, metadata = OtherRows(first=8, max_rows=9, max_keys=9000), Metadata()
    found = other_chains(SimpleNamespace(others=rows, num_requests=2), metadata)
    assert found.metadata.query_start_loc.tolist() == [0, 9]
    assert found.metadata.mm_prefix_range == {0: [(5, 9), (20, 24)]}
    assert torch.equal(found.metadata.mm_prefix_range_tensor, metadata.mm_prefix_range_tensor[2:])
    assert torch.equal(
        found.metadata.mm_prefix_query_range_tensor, metadata.mm_prefix_query_range_tensor[8:]
    )


def test_levels_are_split_for_the_longest_request(backend):
    queries = NodeQueries(
        request_slots=NUMBERS, context_lens=NUMBERS, query_start_loc=NUMBERS, first=1, width=2,
        ancestors=TABLES.ancestors, max_keys=77, max_slots=4096,
    )  # fmt: skip
    assert backend.draft_metadata(queries, NUMBERS[None], NUMBERS).tree.max_keys == 77


def test_a_head_whose_weights_are_made_up_keeps_its_own_output_layer():
    from vllm.config import LoadConfig
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share

    from benchmarks.gpu.worker import MadeUpWeights

    target, other = nn.Linear(4, 96), nn.Linear(4, 96)
    head = nn.Module()
    head.lm_head = nn.Linear(4, 32)
    head.draft_id_to_target_id = nn.Parameter(torch.zeros(32), requires_grad=False)
    loader = MadeUpWeights(LoadConfig(load_format="dummy"))
    assert _should_share(head, "has_own_lm_head", head.lm_head, target)
    for model in (head, other):
        loader.load_weights(model, None)
    assert not _should_share(head, "has_own_lm_head", head.lm_head, target)
    assert not hasattr(other, "has_own_lm_head")
