"""Penalties and bad words along each node's path, against plain loops over histories."""

import numpy as np
import pytest
import torch

from sequoia_vllm.kernels.path_edits import NodeRows, exclude_bad_words, penalise_paths
from sequoia_vllm.tree import TokenTree
from tests.support.histories import Histories, penalised, with_bad_words

#   0 ─┬─ 1 ─┬─ 3 ─── 6
#      │     └─ 4
#      └─ 2 ─── 5
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3))
# Four requests' own trees.
OWN = [
    TokenTree(parents)
    for parents in ((-1, 0, 1, 2, 0, 0, 3), (-1, 0, 0, 2), (-1,), (-1, 0, 0, 0, 3, 4, 3))
]
SLOTS = 5


def histories(vocabulary: int, seed: int = 0, trees: list[TokenTree] | None = None) -> Histories:
    """Four requests: a whole tree, a prefix, none, and a whole one again."""
    return Histories.random(trees or TREE, [7, 4, 1, 7], vocabulary, seed)


def rows_of(
    found: Histories, slots: list[int], dtype: torch.dtype, trees: list[TokenTree] | None = None
) -> NodeRows:
    parents = torch.tensor(TREE.parents, dtype=torch.int32)
    if trees is not None:
        parents = torch.zeros(SLOTS, TREE.size, dtype=torch.int32)
        for slot, tree in zip(slots, trees, strict=True):
            parents[slot, : tree.size] = torch.tensor(tree.parents)
    return NodeRows(
        slots=torch.tensor([slots[request] for request in found.requests]).to(dtype),
        nodes=torch.tensor(found.nodes).to(dtype),
        token_ids=torch.tensor(found.token_ids, dtype=torch.int32),
        parents=parents,
    )


def by_slot(values: list[float], slots: list[int], otherwise: float) -> torch.Tensor:
    found = torch.full((SLOTS,), otherwise)
    found[slots] = torch.tensor(values)
    return found


@pytest.mark.parametrize("trees", [None, OWN], ids=["one tree", "own trees"])
@pytest.mark.parametrize("vocabulary", [50, 4100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_penalties_are_by_path(vocabulary, dtype, trees):
    """Each kind alone, and all together; one request has none, and keeps its logits to the bit."""
    found, slots = histories(vocabulary, trees=trees), [3, 0, 4, 1]
    repetition, frequency, presence = [1.3, 0.8, 1.0, 1.2], [0.0, 0.5, 0.0, -0.4], [0.0, 0, 0, 0.7]
    logits = torch.randn(len(found.nodes), vocabulary)
    expected = penalised(logits, found, repetition, frequency, presence)
    counts = torch.zeros(SLOTS, vocabulary, dtype=torch.int32)
    bits = np.zeros((SLOTS, -(-vocabulary // 32) * 32), dtype=np.uint8)
    for request, slot in enumerate(slots):
        counts[slot] = torch.tensor(found.outputs[request]).bincount(minlength=vocabulary)
        bits[slot, found.prompts[request]] = 1
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    penalise_paths(
        logits, rows_of(found, slots, dtype, trees), repetition=by_slot(repetition, slots, 1.0),
        frequency=by_slot(frequency, slots, 0.0), presence=by_slot(presence, slots, 0.0),
        prompt_bits=torch.from_numpy(packed.copy()), output_counts=counts,
    )  # fmt: skip
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    untouched = torch.tensor(found.requests) == 2
    assert torch.equal(logits[untouched], expected[untouched])
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("trees", [None, OWN], ids=["one tree", "own trees"])
@pytest.mark.parametrize("seed", range(6))
def test_bad_words_are_excluded_where_a_path_would_complete_them(seed, trees):
    """Words of one to six tokens, longer than paths and than what was generated."""
    vocabulary, slots = 3, [1, 2, 0, 4]
    found = histories(vocabulary, seed, trees)
    rng = np.random.default_rng(seed)
    bad_words = [
        [rng.integers(0, vocabulary, rng.integers(1, 7)).tolist() for _ in range(count)]
        for count in (4, 6, 3, 0)
    ]
    logits = torch.randn(len(found.nodes), vocabulary)
    expected = with_bad_words(logits, found, bad_words)
    width = max(sum(map(len, words)) for words in bad_words)
    words = torch.full((SLOTS, width), -7, dtype=torch.int32)
    offsets = torch.zeros(SLOTS, 8, dtype=torch.int32)
    numbers = torch.zeros(SLOTS, dtype=torch.int32)
    lengths = torch.zeros(2, SLOTS, dtype=torch.int32)
    tokens = torch.full((SLOTS, 40), -9, dtype=torch.int32)
    for request, slot in enumerate(slots):
        own = bad_words[request]
        flat = [token for word in own for token in word]
        words[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        ends = np.cumsum([0, *map(len, own)])
        offsets[slot, : len(ends)] = torch.from_numpy(ends)
        numbers[slot] = len(own)
        history = [*found.prompts[request], *found.outputs[request]]
        tokens[slot, : len(history)] = torch.tensor(history)
        lengths[:, slot] = torch.tensor([len(found.prompts[request]), len(history)])
    exclude_bad_words(
        logits, rows_of(found, slots, torch.int32, trees), words=words, offsets=offsets,
        num_words=numbers, most_words=6, all_tokens=tokens, prompt_lens=lengths[0],
        total_lens=lengths[1],
    )  # fmt: skip
    assert torch.equal(logits, expected)
    assert logits.isinf().any()
    assert logits.isfinite().any()
