"""Where a batch keeps the Q of its nodes: there the verifier looks, whatever is drafted."""

import pytest
import torch

from sequoia_vllm.drafting.draft_batch import DraftBatch, SlotStates
from sequoia_vllm.drafting.draft_plan import DraftPlan, inner_nodes
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.tree_tables import DraftLevels, TreeTables
from sequoia_vllm.kernels.modes import SAMPLED
from sequoia_vllm.tree import TokenTree

CPU = torch.device("cpu")
REQUESTS, VOCABULARY = 3, 16
# In the first 3 drafts of the first, node 1 has lost its child and node 2 has one.
TREES = [(-1, 0, 0, 2, 1), (-1, 0, 0, 1, 2, 3, 1, 4), (-1, 0, 1, 0, 3, 3, 2, 4, 0, 1)]


def begun(levels: DraftLevels, drafted: DraftedTrees) -> DraftBatch:
    """A batch of sampled requests that all draft."""
    batch = DraftBatch(REQUESTS, CPU)

    def each(value: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((REQUESTS,), value, dtype=dtype)

    states = SlotStates(
        computed=each(10), read=each(10), modes=each(SAMPLED), most_nodes=each(99),
        temperature=each(1, torch.float32), top_k=each(VOCABULARY), top_p=each(1, torch.float32),
        min_p=each(0, torch.float32), seeds=each(7, torch.int64),
        drafted_nodes=drafted.nodes, drafted_rows=drafted.rows,
    )  # fmt: skip
    batch.begin(
        requests=torch.arange(REQUESTS, dtype=torch.int32), num_sampled=each(1), bounds=each(1),
        seq_lens=each(11), query_start_loc=torch.arange(REQUESTS + 1, dtype=torch.int32),
        states=states, levels=levels, longest=99, max_trees=REQUESTS,
    )  # fmt: skip
    return batch


@pytest.mark.parametrize(
    ("parents", "drafts"),
    [(parents, drafts) for parents in TREES for drafts in range(1, len(parents))],
)
def test_each_node_is_verified_against_its_own_q(parents, drafts):
    tree = TokenTree(parents)
    tables = TreeTables(tree, CPU)
    levels = tables.levels_of(drafts)
    plan = DraftPlan(tree, [drafts] * REQUESTS, most_rows=999)
    drafted = DraftedTrees.empty(
        REQUESTS, plan.logits_rows, inner_nodes(tree), tree.size, VOCABULARY, torch.float32, CPU
    )
    batch = begun(levels, drafted)
    drawn_from = {}
    torch.manual_seed(0)
    for level in levels.levels:
        logits = torch.randn(REQUESTS * level.width, VOCABULARY)
        drafted.draw(batch, REQUESTS, levels, level, logits)
        of_each = logits.view(REQUESTS, level.width, VOCABULARY)
        for place, node in enumerate(level.nodes.tolist()):
            drawn_from |= {(r, node): of_each[r, place] for r in range(REQUESTS)}
    assert drafted.nodes.tolist() == [drafts + 1] * REQUESTS
    for (request, node), logits in drawn_from.items():
        kept = drafted.logits[drafted.rows[request], tables.inner_rows[node]]
        assert torch.equal(kept, logits), (request, node)
