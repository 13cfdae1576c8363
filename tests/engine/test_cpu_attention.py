"""CPU tree attention against a dense float32 reference, over random paged layouts."""

from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops

from sequoia_vllm.attention.cpu_kernel import PACKED_ISA, TreeQueries
from sequoia_vllm.engine.runner import cpu_attention
from sequoia_vllm.engine.runner.cpu_attention import (
    CPUTreeAttentionImpl,
    CPUTreeAttentionMetadata,
)
from tests.oracles.attention import dense_attention, random_ancestors
from tests.support.caches import loaded

BLOCK = 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HAS_AMX = torch.cpu._is_amx_tile_supported()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def isa_for(head_size: int) -> str:
    return "vec" if head_size % 32 == 0 else "vec16"


def write(kv_cache, keys, values, slots, isa):
    blocks, heads, block_size, _ = kv_cache.shape
    halves = kv_cache.view(blocks, heads, block_size * 2, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys, values, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("isa", ["vec", "vec16"] + [PACKED_ISA] * HAS_AMX)
def test_layout_is_that_of_vllms_own_cache_update(dtype, head_size, isa):
    if isa != "vec16" and head_size % 32:
        isa = isa_for(head_size)
    is_packed = isa == PACKED_ISA
    if is_packed:
        dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(head_size)
    kv_cache = torch.zeros(5, 2, BLOCK, 2 * head_size, dtype=dtype)
    keys = torch.randn(70, 2, head_size, generator=generator).to(dtype)
    values = torch.randn(70, 2, head_size, generator=generator).to(dtype)
    slots = torch.randperm(5 * BLOCK, generator=generator)[:70]
    slots[[3, 40]] = -1  # padding is skipped
    write(kv_cache, keys, values, slots, isa)
    kept = slots >= 0
    block, offset = slots[kept] // BLOCK, slots[kept] % BLOCK
    found_keys, found_values = loaded(kv_cache, is_packed)
    assert torch.equal(found_keys[block, :, offset], keys[kept])
    assert torch.equal(found_values[block, :, offset], values[kept])
    assert int((kv_cache != 0).sum()) == int((keys[kept] != 0).sum() + (values[kept] != 0).sum())


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    """The compiled kernel, which must be there, or what runs without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_attention, "load_kernels", lambda: None)
    else:
        assert cpu_attention.load_kernels() is not None
        torch.cpu._init_amx()
    return request.param


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [(2, 2, 32), (6, 2, 64), (8, 1, 80), (4, 4, 128), (8, 2, 256), (3, 1, 192)],
)
def test_mixed_batches_equal_a_dense_reference(way, seed, dtype, heads, kv_heads, head_size):
    """Full and trimmed trees, plain decodes and prefill chunks, shuffled in one batch.

    With the seed's last bit set there are trees only, which takes the path
    that skips vLLM's kernel.
    """
    generator = torch.Generator().manual_seed(100 * seed + head_size)
    isa = isa_for(head_size)
    if HAS_AMX and dtype == torch.bfloat16 and isa == "vec" and way == "kernel":
        isa = PACKED_ISA
    only_trees = bool(seed % 2)
    tree = random_ancestors(9, generator)
    kinds = ["tree", "trimmed", "tree"] if only_trees else [
        "tree", "decode", "prefill", "trimmed", "continued"
    ]  # fmt: skip
    order = torch.randperm(len(kinds), generator=generator).tolist()
    requests = []
    for kind in (kinds[i] for i in order):
        context = int(torch.randint(1, 3 * BLOCK, (1,), generator=generator))
        if kind == "prefill":
            context = 0
        queries = {"tree": 9, "trimmed": 5, "decode": 1, "prefill": 37, "continued": 13}[kind]
        requests.append(SimpleNamespace(kind=kind, context=context, queries=queries))

    max_blocks = 5
    blocks = torch.randperm(len(requests) * max_blocks, generator=generator).to(torch.int32)
    block_table = blocks.view(len(requests), max_blocks)
    kv_cache = torch.zeros(len(requests) * max_blocks, kv_heads, BLOCK, 2 * head_size, dtype=dtype)
    for row, request in enumerate(requests):
        total = request.context + request.queries
        request.keys, request.values = (
            torch.randn(total, kv_heads, head_size, generator=generator).to(dtype) for _ in "kv"
        )
        request.query = torch.randn(request.queries, heads, head_size, generator=generator).to(
            dtype
        )
        positions = torch.arange(total)
        slots = block_table[row, positions // BLOCK].long() * BLOCK + positions % BLOCK
        write(kv_cache, request.keys, request.values, slots, isa)

    metadata = batch_metadata(requests, block_table, tree, dtype, heads, kv_heads, head_size, isa)
    impl = CPUTreeAttentionImpl.__new__(CPUTreeAttentionImpl)
    impl.__dict__.update(
        num_heads=heads, head_size=head_size, scale=head_size**-0.5, num_kv_heads=kv_heads,
        alibi_slopes=None, sliding_window=-1, kv_cache_dtype="auto", logits_soft_cap=0,
        attn_type="decoder", sinks=None, use_zentorch_sdpa=False,
    )  # fmt: skip
    query = torch.cat([request.query for request in requests])
    output = torch.full_like(query, float("nan"))
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    unused = torch.empty(0)
    impl.forward(layer, query, unused, unused, kv_cache, metadata, output=output)

    start = 0
    for request in requests:
        count, context = request.queries, request.context
        visible = torch.ones(count, context + count, dtype=torch.bool)
        inner = tree[:count, :count] if "tr" in request.kind else torch.ones(count, count).tril()
        visible[:, context:] = inner.bool()
        expected, _ = dense_attention(
            request.query, request.keys.float(), request.values.float(), impl.scale, ~visible
        )
        found = output[start : start + count].float()
        assert torch.allclose(found, expected, atol=TOLERANCE[dtype], rtol=0), request.kind
        start += count


def batch_metadata(requests, block_table, tree, dtype, heads, kv_heads, head_size, isa):
    counts = torch.tensor([request.queries for request in requests], dtype=torch.int32)
    ends = counts.cumsum(0, dtype=torch.int32)
    query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
    seq_lens = torch.tensor([r.context + r.queries for r in requests], dtype=torch.int32)
    is_tree = torch.tensor(["tr" in request.kind for request in requests])
    rows, nodes = is_tree.nonzero().squeeze(1), torch.arange(9)
    is_node = nodes < counts[rows][:, None]
    first_row = (ends - counts)[rows].long()
    contexts = (seq_lens - counts)[rows].long()
    scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(requests), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_size,
        seq_lens=seq_lens, dtype=dtype, query_start_loc=query_start_loc, causal=True,
        sliding_window_size=-1, isa=isa, enable_kv_split=True, dynamic_causal=None,
        kv_cache_dtype="auto",
    )  # fmt: skip
    return CPUTreeAttentionMetadata(
        num_actual_tokens=int(ends[-1]),
        max_query_len=int(counts.max()),
        query_start_loc=query_start_loc,
        max_seq_len=int(seq_lens.max()),
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=torch.empty(0),
        scheduler_metadata=scheduler_metadata,
        tree=TreeQueries(
            rows=torch.where(is_node, first_row[:, None] + nodes, -1),
            block_table=block_table[rows],
            context_lens=contexts,
            num_nodes=counts[rows].long(),
            ancestors=tree,
            max_keys=int(seq_lens[rows].max()),
            only_trees=bool(is_tree.all()),
        ),
    )
