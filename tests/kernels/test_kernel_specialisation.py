"""Serving compiles nothing: a kernel's versions depend on the engine, not on the batch.

Triton compiles a kernel again for each key of its arguments: their types, whether
an integer is 1 or a multiple of 16, whether a pointer is aligned to 16 bytes, and
constants. The keys here are Triton's own, of launches that are recorded instead of run.
"""

import itertools
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402 (after the import may skip)
from triton.compiler.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from sequoia_vllm.kernels import (  # noqa: E402
    children,
    commit,
    scoring_inputs,
    target_states,
    target_statistics,
    traversal,
    tree_attention,
    truncation,
    verify,
)
from sequoia_vllm.kernels.modes import SAMPLED  # noqa: E402
from sequoia_vllm.kernels.traversal import TraversalOrder  # noqa: E402
from sequoia_vllm.kernels.verify import TreesToVerify  # noqa: E402

pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret, reason="interpreted kernels are not compiled"
)

BATCHES = range(1, 19)


class Recorder:
    """In the place of a kernel: keeps the keys of its launches, by their constants."""

    def __init__(self, kernel):
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._kernel = kernel
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.keys = {}
        """Sets of keys, by the kernel's constants."""

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *args, **kwargs):
        bound, specialization, options = self._bind(*args, **kwargs)
        names = [param.name for param in self._kernel.params if param.is_constexpr]
        constants = tuple((name, bound[name]) for name in names)
        key = (tuple(specialization), tuple(sorted(options.items())))
        self.keys.setdefault(constants, set()).add(key)

    def versions(self):
        """How many versions Triton would compile."""
        return sum(map(len, self.keys.values()))


@pytest.fixture
def record(monkeypatch):
    def replace(module, name):
        recorder = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, recorder)
        return recorder

    return replace


def test_the_key_tells_what_is_recorded():
    """Else these tests would pass with any kernel."""

    @triton.jit
    def kernel(pointer, number):
        pass

    recorder = Recorder(kernel)
    memory = torch.zeros(64)
    for tensor, number in ((memory, 2), (memory, 3), (memory[4:], 5)):
        recorder[1,](tensor, number)
    assert recorder.versions() == 1
    recorder[1,](memory[1:], 2)
    recorder[1,](memory, 1)
    recorder[1,](memory, 32)
    assert recorder.versions() == 4


@pytest.mark.parametrize("columns", [2, 5, 17])
def test_chunks_of_a_batch_verify_with_one_version(record, columns):
    """By either method, whatever waves a traversal has."""
    kernel = record(verify, "verify_kernel")
    wave_kernel, path_kernel = (record(traversal, name) for name in ("wave_kernel", "path_kernel"))
    orders = [
        TraversalOrder.of(parents, torch.device("cpu"))
        for parents in ([-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 1, 1, 2])
    ]
    statistics = record(target_statistics, "target_statistics_kernel")
    vocabulary, requests = 128, max(BATCHES)
    nodes = 7
    sampled = torch.zeros(requests, columns, dtype=torch.int64)
    accepted = torch.zeros(requests, columns - 1, dtype=torch.int32)
    counts = torch.zeros(requests, dtype=torch.int32)
    logits = torch.zeros(requests * nodes, vocabulary)
    ids = torch.zeros(requests * nodes, dtype=torch.int32)
    per_request = torch.zeros(requests, dtype=torch.int32)
    few_and_many = set()
    for start in range(requests):
        for stop in range(start + 1, requests + 1):
            chunk, rows = slice(start, stop), slice(start * nodes, stop * nodes)
            tree = torch.zeros(nodes, 3, dtype=torch.int32)  # of all, or each slot has its own
            own = tree.repeat(requests, 1, 1)
            trees = TreesToVerify(
                logits=logits[rows],
                target_temperatures=torch.ones(requests)[chunk],
                tokens=ids[rows],
                target_tokens=ids[rows].long(),
                cu_num_logits=torch.arange(stop - start + 1, dtype=torch.int32) * nodes,
                modes=per_request[chunk],
                positions=per_request[chunk],
                seeds=per_request.long()[chunk],
                slots=per_request.long()[chunk],
                children=tree,
                inner_index=torch.zeros(nodes, dtype=torch.int32),
                draft_logits=torch.zeros(requests, 2, vocabulary),
                draft_stats=torch.zeros(requests, 2, 2),
                state_rows=per_request[chunk],
                draft_temperatures=torch.ones(requests)[chunk],
                sampled_tokens=sampled[chunk],
                num_sampled=counts[chunk],
                accepted=accepted[chunk],
            )
            verify.verify_trees(trees)
            verify.verify_trees(replace(trees, children=own, inner_index=own[:, :, 0].contiguous()))
            for order in orders:
                traversal.traverse_trees(trees, order)
            pays = target_statistics.pays_off((stop - start) * nodes, logits.device)
            few_and_many.add(pays)
    assert few_and_many == {True, False}
    recorders = (kernel, statistics, wave_kernel, path_kernel)
    assert [recorder.versions() for recorder in recorders] == [1] * 4


def test_an_h100_looks_at_all_rows_of_eight_large_trees(monkeypatch):
    """A rule for the host only; it is an estimate."""
    monkeypatch.setattr(target_statistics, "_multiprocessors", lambda device: 132)
    device = torch.device("cuda")
    assert target_statistics.pays_off(8 * 64, device)
    assert not target_statistics.pays_off(64 * 64, device)


@pytest.mark.parametrize("blocks", [1, 16, 37])
def test_tree_attention_has_a_version_per_tile_and_mask_width(record, blocks):
    """One version serves trees of a schedule, levels of a draft, and any requests of a step."""
    attend = record(tree_attention, "tree_attention_kernel")
    merge = record(tree_attention, "merge_splits_kernel")
    workspace = tree_attention.TreeAttentionWorkspace(64, "cpu", processors=132)
    cache = torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16)
    most = max(BATCHES)
    table = torch.zeros(most + 1, blocks, dtype=torch.int32)
    lengths = torch.zeros(most + 2, dtype=torch.int32)
    slots = torch.zeros(most + 2, dtype=torch.int64)
    scales = torch.ones(3)
    for nodes, first_node, width in (
        (1, 0, 1), (4, 0, 4), (33, 0, 33), (64, 0, 64), (64, 1, 7), (64, 8, 16), (64, 24, 1),
    ):  # fmt: skip
        one_tree = torch.eye(nodes, dtype=torch.bool)
        trees = (one_tree, one_tree.repeat(3, 1, 1))
        masks = itertools.cycle([tree_attention.NodeMask.of(tree) for tree in trees])
        for requests in BATCHES:
            for skipped in (0, 1):  # rows of other requests come first
                own = slice(skipped, skipped + requests)
                packed = torch.zeros(requests * width + skipped, 12, 64, dtype=torch.bfloat16)
                tree_attention.tree_attention(
                    packed[skipped:, :8], cache, cache, table[own], lengths[own],
                    lengths[skipped : skipped + requests + 1], next(masks), slots=slots[own],
                    first_node=first_node, scale=1.0, key_scale=scales[1], value_scale=scales[2],
                    workspace=workspace, output=torch.zeros_like(packed)[skipped:, :8],
                    max_queries=width,
                    written=lengths[own] if skipped else None,
                    max_slots=requests if skipped else None,
                )  # fmt: skip
    assert {len(keys) for keys in attend.keys.values()} == {1}
    tiles = {(dict(constants)["ROWS"], dict(constants)["WORDS"]) for constants in attend.keys}
    assert len(attend.keys) == len(tiles)
    assert tiles == {(16, 1), (16, 2), (32, 2), (64, 2), (128, 2)}
    # Of splits it needs only to know how many positions a tile takes at once.
    merged = {dict(constants)["KEYS"]: len(keys) for constants, keys in merge.keys.items()}
    assert merged == ({64: 1, 128: 1} if blocks == 37 else {})


def test_draws_have_a_version_per_branching(record):
    kernels = [
        record(children, name)
        for name in ("row_statistics_kernel", "block_best_kernel", "merge_best_kernel")
    ]
    kernels += [record(truncation, name) for name in ("count_bins_kernel", "lowest_inside_kernel")]
    vocabulary, most = 5000, max(BATCHES)
    kept = torch.zeros(most, 9, vocabulary)
    stats = torch.zeros(most, 9, 2)
    workspace = children.DrawWorkspace()
    told = torch.full((most, 3), -1)
    numbers = torch.zeros(256, dtype=torch.int32)
    slots = torch.zeros(most, dtype=torch.int64)
    for size in (16, 33, 64):  # of the tree
        tokens = torch.zeros(most, size, dtype=torch.int64)
        for depth, (width, branches) in enumerate(((1, 8), (3, 5), (16, 7))):
            for requests in BATCHES:
                level = slice(depth, depth + width)  # of one tensor for all levels
                # Of all requests, or each slot's own.
                nodes = numbers[level] if requests % 2 else numbers[level].repeat(2, 1)
                children.draw_children(
                    logits=torch.zeros(requests * width, vocabulary),
                    temperature=torch.ones(most)[:requests],
                    top_k=numbers[:requests],
                    top_p=torch.ones(most)[:requests],
                    min_p=torch.zeros(most)[:requests],
                    seeds=torch.zeros(most, dtype=torch.int64)[:requests],
                    modes=torch.full((most,), SAMPLED, dtype=torch.int32)[:requests],
                    positions=numbers[:requests],
                    depth=depth,
                    slots=slots[:requests],
                    nodes=nodes,
                    counts=numbers[level],
                    columns=numbers[depth : depth + width * branches].view(width, branches),
                    tokens=tokens[:requests],
                    draft_logits=kept,
                    draft_stats=stats,
                    state_rows=numbers[:requests],
                    inner_rows=numbers[level],
                    told=told[:requests],
                    workspace=workspace,
                )
    # 5, 7 and 8 children are all held in 8 places.
    assert [kernel.versions() for kernel in kernels] == [1] * 5


def test_target_states_have_one_version(record):
    """With trees and without, of uniform rows and ragged ones, which are made otherwise."""
    kernel = record(target_states, "gather_target_states_kernel")
    layers, most = [torch.zeros(64, 32)] * 3, max(BATCHES)
    starts = torch.zeros(most + 1, dtype=torch.int32)
    for requests in BATCHES:
        paths = torch.zeros(requests, 6, dtype=torch.int32)[:, 1:]
        for accepted in (None, paths, paths[:, :1]):
            target_states.gather_target_states(
                layers, query_start_loc=starts[: requests + 1], accepted=accepted,
                requests=torch.zeros(requests, dtype=torch.int64),
                offsets=torch.zeros(requests, dtype=torch.int32), states=torch.zeros(requests, 96),
            )  # fmt: skip
    assert kernel.versions() == 1


def test_inputs_of_the_verifier_have_one_version(record):
    """Also where a grammar excludes drafts."""
    kernel = record(scoring_inputs, "gather_for_verification_kernel")
    numbers = torch.zeros(max(BATCHES) * 4 + 1, dtype=torch.int32)
    for requests in BATCHES:
        rows = requests * 4
        for invalid in (None, torch.zeros(rows, dtype=torch.bool)):
            for columns in (2, 7):
                scoring_inputs.gather_for_verification(
                    rows=numbers[:rows].long(), row_slots=numbers[:rows], row_nodes=numbers[:rows],
                    invalid=invalid, input_ids=numbers, positions=numbers.long(),
                    slots=numbers[:requests], cu_rows=numbers[: requests + 1], num_nodes=numbers,
                    state_rows=numbers, modes=numbers, temperatures=numbers.float(),
                    seeds=numbers.long(),
                    scored=torch.zeros(requests, columns, dtype=torch.int32)[:, 0],
                )  # fmt: skip
    assert kernel.versions() == 1


def test_commits_have_one_version(record):
    kernel = record(commit, "commit_kernel")
    layers = commit.CacheLayers.of([torch.zeros(4, 2, 16, 128, dtype=torch.bfloat16)])
    most = max(BATCHES)
    numbers = torch.zeros(most + 1, 16, dtype=torch.int32)
    for requests in BATCHES:
        for depth in (1, 3, 16):
            for first in (0, 1):
                own = slice(first, first + requests)
                commit.commit_accepted(
                    layers,
                    block_table=numbers[own, :depth],
                    context_lens=numbers.flatten()[own],
                    accepted=torch.zeros(most + 1, depth, dtype=torch.int32)[own],
                )
    assert kernel.versions() == 1
