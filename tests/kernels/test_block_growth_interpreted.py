"""Trees grown from one pass over a block of each request."""

import pytest
import torch

from sequoia_vllm.drafting.block_growth import BlockGrowth, BlockModel
from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables
from sequoia_vllm.kernels.modes import GREEDY
from tests.kernels.test_growth_interpreted import (
    CPU,
    DEPTH,
    MAX_LEN,
    TREE,
    VOCABULARY,
    logits_after,
)

MASK, ROWS = 77, 12


class BlockReader(BlockModel):
    """Notes what it is given. Its logits depend on a level, and on the node's path by its token."""

    def combine_hidden_states(self, target_states):
        return target_states + 0.5

    def store_context(self, states, positions, slots):
        self.stored = states.clone(), positions.tolist(), slots.tolist()

    def forward(self, queries):
        self.queries = queries
        return DraftStates(torch.stack([queries.token_ids, queries.positions], dim=1).float())

    def compute_logits(self, hidden):
        raise NotImplementedError

    def block_logits(self, hidden, context, roots):
        self.given = hidden.tolist(), context.clone(), roots.tolist()
        return lambda depth, tokens: torch.stack(
            [level_logits(depth, token) for of_request in tokens.tolist() for token in of_request]
        )


def level_logits(depth, token):
    return logits_after([depth, token])


@pytest.mark.parametrize("root_predicts", [True, False])
@pytest.mark.parametrize("levels", [None, DEPTH + 1])
def test_a_block_of_each_request_grows_its_tree(root_predicts, levels):
    slots, roots, starts = [1, 0], [5, 9], [3, 7]
    batch, shapes = DraftBatch(3, CPU), TreeTables(TREE, CPU)
    batch.slots[:2], batch.roots[:2] = torch.tensor(slots), torch.tensor(roots)
    batch.starts[:2], batch.modes[:2] = torch.tensor(starts), GREEDY
    batch.first_rows[:3], batch.last_rows[:2] = torch.tensor([0, 2, 5]), torch.tensor([1, 4])
    drafted = DraftedTrees.empty(2, 8, 4, TREE.size, VOCABULARY, torch.float32, CPU)
    blocks = torch.arange(2, dtype=torch.int32)[:, None]
    token_ids = torch.arange(2 * MAX_LEN, dtype=torch.int32).view(2, MAX_LEN)
    states, model = torch.arange(4.0 * ROWS).view(2 * ROWS, 2), BlockReader()
    growth = BlockGrowth(
        batch=batch, drafted=drafted, model=model,
        inputs=DraftInputs.empty(PagedTables.of([blocks], [MAX_LEN]), ROWS, token_ids, MAX_LEN),
        depth=DEPTH, longest_chain=8, target_states=states, mask_token=MASK,
        root_predicts=root_predicts, levels=levels,
    )  # fmt: skip
    given = None if levels else -states[:6]
    contexts = (states[:6] if given is None else given) + 0.5
    read = growth.read_committed(2, 6, 3, MAX_LEN, given)
    assert torch.equal(read.hidden, contexts)
    assert torch.equal(model.stored[0], contexts)
    places = [(0, 3), (0, 4), (1, 7), (1, 8), (1, 9)]
    assert model.stored[1] == [*(position for _, position in places), 0]
    assert model.stored[2] == [[*(row * MAX_LEN + position for row, position in places), -1]]
    growth.keep_roots(read, 2)
    growth.grow(2, shapes.levels, 40)

    queries, before = model.queries, 0 if root_predicts else 1
    width = (levels or DEPTH) + before
    block = [
        [[slot * MAX_LEN + root, root], *([MASK, root + i] for i in range(1, width))]
        for slot, root in zip(slots, roots, strict=True)
    ]
    assert queries.token_ids.tolist() == [token for rows in block for token, _ in rows]
    assert (queries.first, queries.width, queries.uneven) == (0, width, False)
    assert queries.context_lens.tolist() == roots
    assert (queries.max_keys, queries.mask) == (40 + width, None)
    assert queries.ancestors.tolist() == [[True] * (DEPTH + 1)] * (DEPTH + 1)
    assert queries.recurrent_states is None
    hidden, context, tokens = model.given
    assert hidden == [rows[before:] for rows in block]
    assert torch.equal(context, contexts[[1, 4]])
    assert tokens == [[rows[0][0]] for rows in block]
    for request, (root_token,) in enumerate(tokens):
        drawn = [root_token, *drafted.tokens[request, 1:].tolist()]
        for node, children in enumerate(TREE.children):
            best = level_logits(int(TREE.depths[node]), drawn[node]).topk(len(children))
            assert [drawn[child] for child in children] == best.indices.tolist()
