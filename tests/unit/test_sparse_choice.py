"""Trees over sparse attention: a node's row is that of plain decoding of its path, in float64."""

import pytest
import torch

from sequoia_vllm.kernels.sparse_choice import AncestorScores, parts_of_keys
from tests.oracles.sparse_attention import Tokens, attend, index_scores, plainly_decoded

#       0
#     /   \
#    1     2        Requests draft prefixes of it: of 8, 5, 1 and 3 nodes.
#   / \   / \
#  3   4 5   6
#      |
#      7
PARENTS = [-1, 0, 0, 1, 1, 2, 2, 4]
OTHER_PARENTS = [-1, 0, 1, 2, 2, 0, 5, 5]  # trees of their own: every second request's
SIZES, CONTEXTS = [8, 5, 1, 3], [11, 3, 8, 1]
OTHER_ROWS = 2  # of a prompt, behind the trees
BLOCK, LENGTH = 4, 24


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root to this one."""
    return [*path_to(parents[node], parents), node] if node > 0 else [0]


def ancestors_of(parents: list[int]) -> torch.Tensor:
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        seen[node, path_to(node, parents)] = True
    return seen


class Cache:
    """A paged cache: values ``[blocks, BLOCK, ...]`` by blocks in any order; NaN where none are."""

    def __init__(self, requests: list[torch.Tensor]) -> None:
        each = LENGTH // BLOCK
        self.table = torch.randperm(len(requests) * each).view(len(requests), each)
        width = requests[0].shape[1:]
        shape = len(requests) * each, BLOCK, *width
        self.values = torch.full(shape, torch.nan, dtype=torch.float64)
        for request, values in enumerate(requests):
            for slot, value in enumerate(values):
                self.values[self.table[request, slot // BLOCK], slot % BLOCK] = value

    def read(self, request: int, slots: torch.Tensor) -> torch.Tensor:
        return self.values[self.table[request, slots // BLOCK], slots % BLOCK]


def chosen_by_operator(scores: torch.Tensor, lengths: torch.Tensor, most: int) -> torch.Tensor:
    """int32 ``[T, most]``, as vLLM's: a short row's is all that it has, then -1."""
    chosen = torch.full((len(scores), most), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        count = min(length, most)
        best = scores[row, :length].topk(count).indices if length > most else torch.arange(length)
        chosen[row, :count] = best.int()
    return chosen


@pytest.mark.parametrize("own_trees", [False, True])
@pytest.mark.parametrize("most", [2, 5, 9, 30])
def test_a_nodes_row_is_that_of_plain_decoding_of_its_path(most, own_trees):
    torch.manual_seed(most)
    parents = [OTHER_PARENTS if own_trees and one % 2 else PARENTS for one in range(len(SIZES))]
    contexts = [Tokens.random(length) for length in CONTEXTS]
    trees = [Tokens.random(size) for size in SIZES]
    every = [context.then(tree) for context, tree in zip(contexts, trees, strict=True)]
    index_keys = Cache([one.index_keys for one in every])
    latents = Cache([one.latents for one in every])

    starts = torch.tensor([0, *SIZES]).cumsum(0).int()
    rows = int(starts[-1]) + OTHER_ROWS
    scores = torch.full((rows, LENGTH), torch.nan, dtype=torch.float64)
    lengths = torch.full((rows,), 3, dtype=torch.int32)
    for request, tree in enumerate(trees):
        for node in range(SIZES[request]):
            row, length = int(starts[request]) + node, CONTEXTS[request] + node + 1
            keys = index_keys.read(request, torch.arange(length))
            scores[row, :length] = index_scores(tree, node, keys)
            lengths[row] = length
    scores[-OTHER_ROWS:, :3] = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    before = scores.clone()

    masks = torch.stack([ancestors_of(one) for one in parents])
    held = AncestorScores(rows + 3, masks if own_trees else masks[0])
    context_lens = torch.tensor(CONTEXTS, dtype=torch.int32)
    held.place(starts, context_lens, masks if own_trees else masks[0])
    counted = held.bring_together(scores, lengths)
    chosen = chosen_by_operator(scores, counted, most)
    held.to_slots(chosen)

    for request, tree in enumerate(trees):
        for node in range(SIZES[request]):
            path = path_to(node, parents[request])
            expected = plainly_decoded(contexts[request].then(tree.of(path)), most)
            slots = chosen[int(starts[request]) + node]
            slots = slots[slots >= 0]
            assert len(slots) == min(most, CONTEXTS[request] + len(path))
            found = attend(tree.queries[node], latents.read(request, slots.long()))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(scores[-OTHER_ROWS:], before[-OTHER_ROWS:], equal_nan=True)
    assert counted[-OTHER_ROWS:].tolist() == [3, 3]
    assert chosen[-1].tolist() == chosen_by_operator(before[-1:], lengths[-1:], most)[0].tolist()


def test_fewer_rows_than_buffers_and_more_rows():
    ancestors = torch.tensor([[True, False, False], [True, True, False], [True, False, True]])
    held = AncestorScores(4, ancestors)
    held.place(torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2]).int(), ancestors)
    scores = torch.arange(12.0).view(2, 6)
    assert held.bring_together(scores, torch.tensor([9, 9]).int()).tolist() == [3, 4]
    scores = torch.arange(36.0).view(6, 6)
    assert held.bring_together(scores, torch.full((6,), 9).int()).tolist() == [3, 4, 4, 9, 9, 9]
    assert scores[2].tolist() == [12, 13, 14, 16, 16, 17]  # node 2 lies behind its root
    chosen = torch.tensor([[2, -1], [3, 0], [3, 2], [3, 2], [3, 2], [3, -1]]).int()
    held.to_slots(chosen)
    assert chosen.tolist() == [[2, -1], [3, 0], [4, 2], [3, 2], [3, 2], [3, -1]]


def test_a_token_of_an_indexers_cache_moves_with_its_scale():
    """Keys of all slots of a block, then their scales, as vLLM's operators read them."""
    blocks, slots, size = 3, 4, 8
    memory = torch.arange(1 + blocks * (slots * (size + 4) + 16), dtype=torch.uint8)
    cache = memory[1:].view(blocks, -1)[:, : slots * (size + 4)].unflatten(1, (slots, size + 4))
    before = cache.clone()
    for part in parts_of_keys(cache):
        assert part.shape[:3] == (blocks, 1, slots)
        part[2, 0, 3] = part[1, 0, 2]
    widths = [slots * size, slots * 4]
    parts = zip(*(each.flatten(1).split(widths, dim=1) for each in (cache, before)), strict=True)
    for found, old in parts:
        found, old = (each.unflatten(1, (slots, -1)) for each in (found, old))
        assert torch.equal(found[2, 3], old[1, 2])
        assert not torch.equal(old[2, 3], old[1, 2])
        rest = torch.ones(blocks, slots, dtype=torch.bool)
        rest[2, 3] = False
        assert torch.equal(found[rest], old[rest])
