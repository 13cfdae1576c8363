"""Trees grown by a draft that is told nothing else than what an engine's is, and what it reads."""

from types import SimpleNamespace

import pytest
import torch

from sequoia_vllm.drafting.draft_batch import DraftBatch, SlotStates
from sequoia_vllm.drafting.draft_plan import DraftPlan, inner_nodes, inner_rows
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.growth import DraftModel, DraftStates, TreeGrowth
from sequoia_vllm.drafting.tree_tables import DraftLevels, TreeTables
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SKIP
from sequoia_vllm.kernels.node_masks import unpack_ancestors
from sequoia_vllm.tree import TokenTree

CPU = torch.device("cpu")
# One, two and one nodes with children at depths 0, 1 and 2.
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3))
VOCABULARY, LONGEST, DEPTH = 11, 32, 3
# Request slots of a batch; the third request is a graph's padding.
SLOTS, CONTEXTS = [2, 1, -1, 3], [5, 9, 0, 14]


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
        assert queries.max_keys == min(20 + queries.first + queries.width, LONGEST)
        self.tokens |= dict(zip(queries.slots[0].tolist(), token_ids.tolist(), strict=True))
        hidden = torch.zeros(len(token_ids), VOCABULARY)
        left = torch.zeros(len(token_ids), 1 + DEPTH)
        for row, token in enumerate(token_ids.tolist()):
            request, place = divmod(row, queries.width)
            slot = int(queries.request_slots[request])
            if slot < 0:
                assert token == 0
                continue
            own, node = queries.ancestors, queries.first + place
            if queries.mask is not None:
                own = unpack_ancestors(queries.mask.words[slot])
            seen = own[node].nonzero().flatten().tolist()
            assert seen[0] == 0
            root = int(queries.context_lens[request])
            path = [self.tokens[request * LONGEST + root + node] for node in seen[1:]]
            assert queries.mask is None or queries.mask.depths[slot, node] == len(path)
            assert queries.positions[row] == root + len(path)
            assert path[-1] == token
            assert torch.equal(queries.recurrent_states[row], remembered(path[:-1]))
            hidden[row], left[row] = logits_after(path), remembered(path)
        return DraftStates(hidden, left)

    def compute_logits(self, hidden):
        return hidden


def grown(shapes, mode, texts=None, levels_of=None):
    """The batch's `DraftedTrees`, and the levels that it was grown by."""
    requests, levels = len(SLOTS), shapes.levels
    batch = DraftBatch(requests + 1, CPU, depth=0 if texts is None else DEPTH)
    batch.slots[:requests] = torch.tensor(SLOTS)
    batch.roots[:requests] = torch.tensor(CONTEXTS)
    batch.modes[:requests] = torch.tensor([SKIP if slot < 0 else mode for slot in SLOTS])
    batch.temperature.fill_(1.0)
    batch.seeds.copy_(torch.arange(requests + 1) + 40)
    size, inner = shapes.tree.size, levels.rows_per_tree
    drafted = DraftedTrees.empty(
        requests, requests * inner, inner, size, VOCABULARY, torch.float32, CPU
    )
    if levels_of is not None:
        levels = levels_of(drafted)
    blocks = torch.arange(requests * 2, dtype=torch.int32).view(requests, 2)
    growth = TreeGrowth(
        batch=batch,
        drafted=drafted,
        model=PathModel(),
        inputs=DraftInputs.empty(
            PagedTables.of([blocks], [LONGEST // 2]),
            rows=32,
            all_token_ids=torch.zeros(4, LONGEST, dtype=torch.int32) if texts is None else texts,
            longest=LONGEST,
        ),
        depth=DEPTH,
        longest_chain=8,
    )
    roots = DraftStates(logits_after([]).repeat(requests, 1), remembered([]).repeat(requests, 1))
    batch.last_rows[:requests] = torch.arange(requests)
    growth.keep_roots(roots, requests)
    growth.grow(requests, levels, max_keys=20)
    return drafted, levels


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
def test_each_request_grows_the_tree(mode):
    drafted, levels = grown(TreeTables(TREE, CPU), mode)
    for request, slot in enumerate(SLOTS):
        if slot >= 0:
            check_tree(TREE, request, drafted, levels, mode)


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


# -- Where a batch keeps the Q of its nodes: there the verifier looks ------------------------


REQUESTS, WORDS = 3, 16
# In the first 3 drafts of the first, node 1 has lost its child and node 2 has one.
TREES = [(-1, 0, 0, 2, 1), (-1, 0, 0, 1, 2, 3, 1, 4), (-1, 0, 1, 0, 3, 3, 2, 4, 0, 1)]


def begun(levels: DraftLevels, drafted: DraftedTrees) -> DraftBatch:
    batch = DraftBatch(REQUESTS, CPU)

    def each(value: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((REQUESTS,), value, dtype=dtype)

    states = SlotStates(
        computed=each(10), read=each(10), modes=each(SAMPLED), most_nodes=each(99),
        temperature=each(1, torch.float32), top_k=each(WORDS), top_p=each(1, torch.float32),
        min_p=each(0, torch.float32), seeds=each(7, torch.int64),
        drafted_nodes=drafted.nodes, drafted_rows=drafted.rows,
    )  # fmt: skip
    batch.begin(
        SimpleNamespace(
            idx_mapping=torch.arange(REQUESTS, dtype=torch.int32), seq_lens=each(11),
            query_start_loc=torch.arange(REQUESTS + 1, dtype=torch.int32),
        ),
        num_sampled=each(1), bounds=each(1), states=states, levels=levels, longest=99,
        max_trees=REQUESTS,
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
        REQUESTS, plan.logits_rows, inner_nodes(tree), tree.size, WORDS, torch.float32, CPU
    )
    batch = begun(levels, drafted)
    drawn_from = {}
    torch.manual_seed(0)
    for level in levels.levels:
        logits = torch.randn(REQUESTS * level.width, WORDS)
        drafted.draw(batch, REQUESTS, levels, level, logits)
        of_each = logits.view(REQUESTS, level.width, WORDS)
        for place, node in enumerate(level.nodes.tolist()):
            drawn_from |= {(r, node): of_each[r, place] for r in range(REQUESTS)}
    assert drafted.nodes.tolist() == [drafts + 1] * REQUESTS
    for (request, node), logits in drawn_from.items():
        kept = drafted.logits[drafted.rows[request], tables.inner_rows[node]]
        assert torch.equal(kept, logits), (request, node)


# -- Committed tokens that are read in one pass, a different number of each request ----------


MAX_LEN, BLOCK = 64, 16


class Reader(DraftModel):
    def combine_hidden_states(self, target_states):
        return target_states + 0.5

    def forward(self, queries):
        self.queries = queries
        return DraftStates(queries.token_ids[:, None].float(), queries.recurrent_states)

    def compute_logits(self, hidden):
        return hidden


def reading(counts, rows, most, given=None):
    """The queries of such a pass of a batch with room for more, and the roots that it keeps."""
    requests = len(counts)
    batch = DraftBatch(requests + 1, CPU)
    batch.slots[:requests] = torch.arange(requests).flip(0)
    batch.starts[:requests] = torch.arange(requests) * 3
    first_rows = torch.tensor([0, *counts]).cumsum(0)
    batch.first_rows[: requests + 1] = first_rows
    batch.last_rows[:requests] = (first_rows[1:] - 1).clamp(min=0)
    blocks = torch.arange(requests * MAX_LEN // BLOCK, dtype=torch.int32).view(requests, -1)
    token_ids = torch.arange(requests * MAX_LEN, dtype=torch.int32).view(requests, MAX_LEN)
    growth = TreeGrowth(
        batch=batch, drafted=None, model=Reader(),
        inputs=DraftInputs.empty(PagedTables.of([blocks], [BLOCK]), rows + 3, token_ids, MAX_LEN),
        depth=3, longest_chain=32, target_states=torch.arange(2.0 * rows + 2).view(-1, 2),
    )  # fmt: skip
    growth.keep_roots(growth.read_committed(requests, rows, most, 40, given), requests)
    return growth._model.queries, growth._roots


@pytest.mark.parametrize(
    ("most", "chain", "rows"), [(4, 4, 12), (5, 32, 16), (5, 32, 20), (30, 32, 16)]
)
def test_growth_reads_what_follows_and_keeps_the_last_states(most, chain, rows):
    counts = [3, 0, 4, 1] if most == 4 else [3, 0, 5, 1]
    given = None if most == 5 else -torch.arange(2.0 * rows).view(rows, 2)
    queries, roots = reading(counts, rows, most, given)
    expected = [
        (3 - request) * MAX_LEN + 3 * request + offset
        for request, count in enumerate(counts)
        for offset in range(count)
    ]
    read = len(expected)
    assert queries.token_ids.tolist() == [*expected, *[0] * (rows - read)]
    assert queries.slots[0, read:rows].tolist() == [-1] * (rows - read)
    assert queries.query_start_loc.tolist() == [0, *torch.tensor(counts).cumsum(0).tolist()]
    assert (queries.first, queries.width, len(queries.ancestors)) == (0, most, chain)
    assert (queries.max_keys, queries.max_slots) == (min(40 + most, MAX_LEN), MAX_LEN)
    # Whole paths of all requests, or as many rows of each as one has, are not uneven.
    assert queries.uneven == (chain == 32 and rows < 4 * most)
    assert queries.ancestors.dtype == torch.bool
    assert torch.equal(queries.ancestors, torch.ones_like(queries.ancestors).tril())
    states = (torch.arange(2.0 * rows).view(rows, 2) if given is None else given) + 0.5
    assert torch.equal(queries.recurrent_states, states)
    last = [2, 2, read - 2, read - 1]
    assert roots.hidden[:, 0].tolist() == [*(expected[row] for row in last), 0]
    assert torch.equal(roots.recurrent_states[:4], states[last])
    assert len(roots.recurrent_states) == 5
