"""Whole trees grown by a draft that is told nothing else than what an engine's is."""

import pytest
import torch

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.draft_plan import inner_rows
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.growth import DraftModel, DraftStates, TreeGrowth
from sequoia_vllm.drafting.tree_tables import TreeShapes, TreeTables
from sequoia_vllm.kernels import children_kernels
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SKIP
from tests.support.own_trees import OWN_TREES, row_of_the_first

CPU = torch.device("cpu")
VOCABULARY, MAX_LEN, DEPTH = 11, 32, 3
# Request slots of a batch; the third request is a graph's padding.
SLOTS, CONTEXTS = [2, 0, -1, 3], [5, 9, 0, 14]


def logits_after(path):
    """The draft's ``[V]`` after these tokens below the root."""
    seed = sum((token + 1) * 13**depth for depth, token in enumerate(path))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, generator=generator)


def remembered(path):
    """float32 ``[1 + D]``: the recurrent state that a node's pass leaves."""
    return torch.tensor([len(path), *path, *[0] * (DEPTH - len(path))], dtype=torch.float32)


class PathModel(DraftModel):
    """Its logits depend on a node's path, which it knows from its cache and from states above."""

    def __init__(self):
        self.tokens = {}  # by cache slot

    def forward(self, queries):
        token_ids = queries.token_ids
        self.tokens |= dict(zip(queries.slots[0].tolist(), token_ids.tolist(), strict=True))
        hidden = torch.zeros(len(token_ids), VOCABULARY)
        left = torch.zeros(len(token_ids), 1 + DEPTH)
        for row, token in enumerate(token_ids.tolist()):
            request, place = divmod(row, queries.width)
            slot = int(queries.request_slots[request])
            if slot < 0:
                assert token == 0
                continue
            own = queries.ancestors if queries.ancestors.ndim == 2 else queries.ancestors[slot]
            seen = own[queries.first + place].nonzero().flatten().tolist()
            root = int(queries.context_lens[request])
            path = [self.tokens[request * MAX_LEN + root + node] for node in seen if node > 0]
            assert queries.positions[row] == root + len(path)
            assert path[-1] == token
            assert torch.equal(queries.recurrent_states[row], remembered(path[:-1]))
            hidden[row], left[row] = logits_after(path), remembered(path)
        return DraftStates(hidden, left)

    def compute_logits(self, hidden):
        return hidden


def grown(shapes, mode):
    """The batch's `DraftedTrees`, and the levels that it was grown by."""
    requests, levels = len(SLOTS), shapes.levels
    batch = DraftBatch(requests, CPU)
    batch.slots.copy_(torch.tensor(SLOTS))
    batch.roots.copy_(torch.tensor(CONTEXTS))
    batch.modes.copy_(torch.tensor([SKIP if slot < 0 else mode for slot in SLOTS]))
    batch.temperature.fill_(1.0)
    batch.seeds.copy_(torch.arange(requests) + 40)
    size, inner = shapes.tree.size, levels.rows_per_tree
    drafted = DraftedTrees.empty(
        requests, requests * inner, inner, size, VOCABULARY, torch.float32, CPU
    )
    blocks = torch.arange(requests * 2, dtype=torch.int32).view(requests, 2)
    growth = TreeGrowth(
        batch=batch,
        drafted=drafted,
        model=PathModel(),
        inputs=DraftInputs.empty(
            PagedTables.of([blocks], [MAX_LEN // 2]),
            rows=16,
            all_token_ids=torch.zeros(4, MAX_LEN, dtype=torch.int32),
            longest=MAX_LEN,
        ),
        depth=DEPTH,
        longest_chain=8,
    )
    roots = DraftStates(logits_after([]).repeat(requests, 1), remembered([]).repeat(requests, 1))
    batch.last_rows.copy_(torch.arange(requests))
    growth.keep_roots(roots, requests)
    growth.grow(requests, levels, max_keys=MAX_LEN)
    return drafted, levels


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
@pytest.mark.parametrize("per_request", [False, True])
def test_each_request_grows_its_own_tree(per_request, mode):
    trees = OWN_TREES if per_request else OWN_TREES[:1] * 4
    shapes = TreeShapes(OWN_TREES[0], CPU, 4) if per_request else TreeTables(OWN_TREES[0], CPU)
    for slot, tree in enumerate(OWN_TREES if per_request else []):
        shapes.set(slot, tree)
    drafted, levels = grown(shapes, mode)
    for request, slot in enumerate(SLOTS):
        if slot >= 0:
            check_tree(trees[slot], request, drafted, levels, mode)


def check_tree(tree, request, drafted, levels, mode):
    """Children are drawn from what the draft says after their path, and that is kept."""
    tokens, paths = drafted.tokens[request].tolist(), [[]]
    for node in range(1, tree.size):
        paths.append([*paths[tree.parents[node]], tokens[node]])
    for node, children in enumerate(tree.children):
        logits, drawn = logits_after(paths[node]), [tokens[child] for child in children]
        if mode == GREEDY:
            assert drawn == logits.topk(len(children)).indices.tolist()
        elif children:
            assert len(set(drawn)) == len(drawn)
            row = request * levels.rows_per_tree + inner_rows(tree)[node]
            assert torch.equal(drafted.logits[row, 0], logits), (request, node)


def test_draws_by_the_first_requests_tree_are_caught(monkeypatch):
    monkeypatch.setattr(children_kernels, "shape_row", row_of_the_first)
    with pytest.raises(AssertionError):
        test_each_request_grows_its_own_tree(True, GREEDY)
