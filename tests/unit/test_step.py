"""A host's step for a batch: each request gets what a plain loop gives it alone."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm._custom_ops  # noqa: F401  loads vLLM's sampler
from torch import Tensor

from sequoia_vllm.attention.cpu_kernel import keys_and_values
from sequoia_vllm.drafting.dynamic_trees import CHILDREN_ON_CPUS, DynamicGrowth, SharedNodes
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.v1.verifier import cut
from sequoia_vllm.step.commit import TargetCaches, layers_by_cache
from sequoia_vllm.step.grow import Draft, DraftSampling, GrownTrees, grow, grow_dynamic, grow_told
from sequoia_vllm.step.paths import drafted_nodes, node_paths
from sequoia_vllm.step.score import StepState, lay_out
from sequoia_vllm.step.seeds import SessionSeeds, consume_seeds, gumbel_noise, peek_seeds
from sequoia_vllm.step.verify import TargetDistribution, TreeVerifier
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.retrieval import preferred
from sequoia_vllm.verification.sampling import Truncation, draft_distribution
from tests.oracles.dynamic_trees import likeliest, paths_of
from tests.oracles.laws import assert_same_law
from tests.support.tree_problems import generator

CPU = torch.device("cpu")
VOCABULARY = 9
SMALL_TREE = TokenTree((-1, 0, 0, 1))
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3, 3, 5))
argmax_with_noise = torch.ops._C.fused_gumbel_argmax  # vLLM's own
VERIFIER = TreeVerifier(partial(torch.argmax, dim=-1), argmax_with_noise)


# -- grow ------------------------------------------------------------------------------------


WEIGHTS = 2 * torch.randn(4, VOCABULARY, VOCABULARY, generator=generator(0))


def scores_after(path: tuple[int, ...]) -> Tensor:
    """Logits ``[V]`` after tokens, the root's first: each token counts by its depth."""
    return sum(WEIGHTS[depth, token] for depth, token in enumerate(path))


class PathDraft:
    """`scores_after`, asked as `grow` asks its draft: by what each node sees."""

    def __init__(self, roots: Tensor) -> None:
        self.read = roots[:, None]
        self.depths = torch.zeros(1, dtype=torch.int64)

    def __call__(self, tokens: Tensor, depth: int, sees: Tensor, first: int) -> Tensor:
        assert first == self.read.shape[1]  # nothing is read twice
        self.read = torch.cat([self.read, tokens], dim=1)
        self.depths = torch.cat([self.depths, torch.full((tokens.shape[1],), depth)])
        seen = sees.expand(len(tokens), -1, -1)[..., : self.read.shape[1]]
        of_each = WEIGHTS[self.depths, self.read]
        return torch.einsum("bmn,bnv->bmv", seen.float(), of_each).flatten(0, 1)


def grown_from(
    roots: Tensor, sampling: DraftSampling | None = None, tree: TokenTree = TREE
) -> GrownTrees:
    sampling = sampling or DraftSampling.greedy(len(roots))
    nothing = torch.full((len(roots), tree.depth), -1)
    levels, draft = TreeTables(tree, CPU).levels, PathDraft(roots)
    return grow(levels, roots, WEIGHTS[0, roots], nothing, sampling, draft)


def paths(tree: TokenTree, tokens: list[int]) -> list[tuple[int, ...]]:
    """Tokens from the root to each node."""
    return [(tokens[0], *path) for path in [(), *paths_of(tokens, tree.parents)]]


def test_greedy_trees_have_the_likeliest_children():
    roots = torch.arange(VOCABULARY)
    grown = grown_from(roots)
    assert grown.layouts is None
    for tokens in grown.tokens.tolist():
        for path, children in zip(paths(TREE, tokens), TREE.children, strict=True):
            best = scores_after(path).topk(len(children)).indices.tolist()
            assert [tokens[child] for child in children] == best


def test_requests_of_all_kinds_grow_as_they_do_alone():
    """Seeded ones have the likeliest under their noise; of sampled ones Q is kept."""
    temperature = torch.tensor([0.0, 0.7, 0.9, 1e-9, 1.3, 0.6])  # two are greedy
    generators = {0: generator(7), 2: generator(1), 4: generator(2)}
    before = {place: one.get_state() for place, one in generators.items()}
    sampling = DraftSampling.of(
        np.arange(6), temperature, generators, Truncation(), TREE.depth
    )  # fmt: skip
    roots = torch.tensor([3, 1, 4, 1, 5, 2])
    grown = grown_from(roots, sampling)
    plain = grown_from(roots).tokens
    assert torch.equal(grown.tokens[[0, 3]], plain[[0, 3]])
    for place, one in generators.items():
        assert torch.equal(one.get_state(), before[place])
    kept = []
    for row, tokens in enumerate(grown.tokens.tolist()):
        seeds = peek_seeds(generators[row], TREE.depth) if row in (2, 4) else None
        for node, path in enumerate(paths(TREE, tokens)):
            children = [tokens[child] for child in TREE.children[node]]
            stored, scores = int(grown.probs_rows[row, node]), scores_after(path)
            assert len(set(children)) == len(children)
            if seeds is not None and children:
                noise = gumbel_noise(seeds[len(path) - 1, None], VOCABULARY)[0]
                noisy = scores / temperature[row] + noise
                assert children == noisy.topk(len(children)).indices.tolist()
            if row in (1, 5) and children:
                own = draft_distribution(scores[None], temperature[row, None])[0]
                assert torch.allclose(grown.probs[stored], own)
                kept.append(stored)
            else:
                assert stored == -1
    assert sorted(kept) == list(range(len(grown.probs)))


def test_sampling_is_that_of_the_requests_that_draft():
    requests, temperature = np.array([3, 1]), torch.tensor([0.5, 0.7, 0.9, 0.0])
    top_k = torch.tensor([1, 2, 3, 4])
    generators = {1: generator(5), 2: generator(6)}
    found = DraftSampling.of(requests, temperature, generators, Truncation(top_k), 2)
    assert found.temperature.tolist() == pytest.approx([0.0, 0.7])
    assert (found.seeded.tolist(), found.sampled.tolist()) == ([1], [])
    assert torch.equal(found.seeds[1], peek_seeds(generators[1], 2))
    assert found.truncation.top_k.tolist() == [4, 2]
    greedy = DraftSampling.of(requests, None, generators, Truncation(top_k), 2)
    assert greedy.temperature.tolist() == [0, 0]
    assert not len(greedy.seeded)
    assert not greedy.truncation


@pytest.mark.parametrize("sampled", [False, True])
def test_what_the_text_says_is_drafted_first(sampled):
    roots, told = torch.tensor([3, 1]), torch.tensor([[8, 7, 6], [-1, -1, -1]])
    sampling = DraftSampling.greedy(2)
    if sampled:
        zeros = torch.zeros(2, 3, dtype=torch.int64)
        sampling = DraftSampling(torch.ones(2), zeros, torch.zeros(2) > 0, Truncation())
    levels = TreeTables(TokenTree((-1, 0, 1, 2)), CPU).levels
    torch.manual_seed(0)
    grown = grow(levels, roots, WEIGHTS[0, roots], told, sampling, PathDraft(roots))
    if sampled:  # it has half of Q, or more
        at_root = grown.probs[grown.probs_rows[:, 0]]
        assert at_root[0, 8] >= 0.5
        assert torch.allclose(at_root[1], WEIGHTS[0, 1].softmax(0))
    else:
        assert grown.tokens[0].tolist() == [3, 8, 7, 6]


def test_what_is_told_of_one_request_is_drafted_for_it_alone():
    """The second has a seed: what is told is drafted where its noise lets it be the best."""
    temperature, generators = torch.tensor([0.0, 1.0]), {1: generator(3)}
    roots, told = torch.tensor([3, 1]), torch.tensor([[-1, -1], [8, 7]])
    sampling = DraftSampling.of(np.arange(2), temperature, generators, Truncation(), 2)
    levels = TreeTables(TokenTree((-1, 0, 0, 1)), CPU).levels
    grown = grow(levels, roots, WEIGHTS[0, roots], told, sampling, PathDraft(roots))
    assert grown.tokens[0, 1:3].tolist() == WEIGHTS[0, 3].topk(2).indices.tolist()
    noise = gumbel_noise(peek_seeds(generators[1], 1), VOCABULARY)
    best = (preferred(WEIGHTS[0, 1, None], torch.tensor([8])) + noise)[0].topk(2).indices
    assert grown.tokens[1, 1:3].tolist() == best.tolist()
    assert 8 in best


@pytest.mark.parametrize("told", [None, (8, 7, 6)])
@pytest.mark.parametrize("root", [3, 1, 4])
def test_a_dynamic_tree_has_the_likeliest_nodes(root, told):
    roots, nodes, depth = torch.tensor([root]), 12, 3
    growth, nothing = DynamicGrowth(roots, nodes, depth), torch.full((1, depth), -1)
    if told:
        nothing[0] = torch.tensor(told)
    most, deepest, logits = torch.tensor([nodes - 1]), torch.tensor([depth]), WEIGHTS[0, roots]
    shared = grow_dynamic(growth, logits, nothing, PathDraft(roots), most, deepest)
    found = paths_of(shared.tokens[0].tolist(), shared.parents[0].tolist())
    assert (told in found) == bool(told)

    def scores(path: tuple[int, ...]) -> Tensor:
        given = told[len(path)] if told and path == told[: len(path)] else -1
        return preferred(scores_after((root, *path))[None], torch.tensor([given]))[0]

    assert found == likeliest(scores, nodes, depth, growth.width, CHILDREN_ON_CPUS)


def test_a_branch_has_the_told_tokens_in_a_row():
    told = torch.tensor([[8, 7, 6, 5], [4, 3, -1, -1]])
    grown = grow_told(torch.tensor([3, 1]), told, torch.tensor([3, 1]))
    assert grown.is_told
    assert (grown.probs_rows == -1).all()
    assert grown.shared.sizes.tolist() == [4, 2]
    assert grown.tokens[0].tolist() == [3, 8, 7, 6]
    assert grown.tokens[1, :2].tolist() == [1, 4]
    assert grown.layouts.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert grown.layouts.ancestors[0].tolist() == torch.ones(4, 4).tril().bool().tolist()


def test_a_broken_draft_draws_anything_and_says_so_once(caplog, monkeypatch):
    from sequoia_vllm.step import grow as module

    module._say_that_it_is_broken.cache_clear()
    monkeypatch.setattr(module.logger, "propagate", True)
    for _ in range(2):
        sampling = DraftSampling.of(np.arange(2), torch.ones(2), {}, Truncation(), 1)
        levels = TreeTables(TokenTree((-1, 0, 0)), CPU).levels
        logits = torch.stack([WEIGHTS[0, 0], torch.full((VOCABULARY,), torch.nan)])
        nothing = torch.full((2, 1), -1)
        grown = grow(levels, torch.tensor([0, 0]), logits, nothing, sampling, None)
        sound, broken = grown.probs[grown.probs_rows[:, 0]]
        assert torch.allclose(sound, WEIGHTS[0, 0].softmax(0))
        assert torch.equal(broken, torch.full((VOCABULARY,), 1 / VOCABULARY))
    assert caplog.text.count("NaN") == 1


# -- score -----------------------------------------------------------------------------------


def laid_out(
    scheduled: dict[str, list[int]], request_index: dict[str, int], grown: GrownTrees,
    grammars: str = "", tree: TokenTree = SMALL_TREE,
) -> StepState | None:  # fmt: skip
    """Trees of ``grown``, one row after another; each request has 10 tokens before its root."""
    lengths = np.ones(len(request_index), dtype=np.int64)
    for request, drafts in scheduled.items():
        lengths[request_index[request]] = len(drafts) + 1
    drafts = {request: Draft(grown, row) for row, request in enumerate(scheduled)}
    follows, ends = grammars.__contains__, lengths.cumsum()
    tables = TreeTables(tree, CPU)
    return lay_out(tables, scheduled, drafts, request_index, follows, ends, lengths + 10)


def test_rows_shapes_and_places_of_trees():
    """The first tree is trimmed, the second one is dynamic, and a third request has none."""
    parents = torch.tensor([[-1, 0, 1, 1], [-1, 0, 1, 2]])
    tokens, nothing = torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]]), torch.empty(0)
    shared = SharedNodes(tokens, parents, torch.tensor([[0, 1, 2, 3]] * 2))
    grown = GrownTrees(tokens, nothing, nothing, shared)
    index = {"b": 2, "plain": 0, "a": 1}
    trees = laid_out({"a": [1, 2], "b": [4, 5, 6], "plain": []}, index, grown)
    assert trees.requests.tolist() == [1, 2]
    assert trees.num_nodes.tolist() == [3, 4]
    assert trees.context_lens.tolist() == [10, 10]
    assert trees.first_row.tolist() == trees.first_logits_row.tolist() == [1, 4]
    assert trees.tokens.tolist() == trees.drawn.tolist() == [[0, 1, 2, 0], [0, 4, 5, 6]]
    assert trees.parents.tolist() == [[-1, 0, 1, -2], [-1, 0, 1, 2]]
    assert trees.is_node.tolist() == [[True, True, True, False], [True] * 4]
    assert trees.depths[1].tolist() == [0, 1, 2, 3]
    assert trees.depths[0, :3].tolist() == [0, 1, 2]
    assert trees.is_dynamic.tolist() == [True, True]
    assert trees.ancestors[1].tolist() == torch.ones(4, 4).tril().bool().tolist()
    assert trees.rows.tolist() == [[1, 2, 3, 1], [4, 5, 6, 7]]
    assert torch.equal(trees.logits_rows, trees.rows)
    assert not trees.is_all
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    queries = trees.queries(table, tokens=8)
    assert queries.rows.tolist() == [[1, 2, 3, -1], [4, 5, 6, 7]]
    assert queries.block_table.tolist() == [[2, 3], [4, 5]]
    assert (queries.max_keys, queries.only_trees) == (14, False)
    assert trees.queries(table, tokens=7).only_trees


def test_static_trees_share_one_shape():
    grown = GrownTrees(torch.tensor([[0, 1, 2, 3]] * 2), torch.empty(0), torch.empty(0))
    trees = laid_out({"a": [1, 2, 3], "b": [1]}, {"a": 0, "b": 1}, grown)
    assert trees.ancestors.tolist() == SMALL_TREE.ancestor_mask.tolist()
    assert trees.depths.tolist() == [[0, 1, 1, 2]] * 2
    assert trees.parents.tolist() == [[-1, 0, 0, 1], [-1, 0, -2, -2]]
    assert not trees.is_dynamic.any()
    assert trees.is_all
    assert [each.tolist() for each in trees.shifts()] == [[0, 1, 2, 3, 4, 5], [0, 0, -1, -1, 0, 0]]
    assert trees.tree_of(0) == ([0, 1, 2, 3], [-1, 0, 0, 1])
    assert trees.tree_of(2) == ([0], [-1])
    found = drafted_nodes(trees, 0), drafted_nodes(trees, 1)
    assert found == ([(0, 1, 1), (0, 1, 2), (1, 2, 3)], [(0, 1, 1)])
    nodes = node_paths(trees, torch.tensor([False, True]))
    assert nodes.generated(before=5).tolist() == [5, 6]
    assert (nodes.rows.tolist(), nodes.requests.tolist()) == ([4, 5], [1, 1])
    assert laid_out({"a": []}, {"a": 0}, grown) is None


def test_paths_lead_from_the_root_to_each_node():
    grown = grown_from(torch.arange(VOCABULARY))
    names = {str(row): row for row in range(VOCABULARY)}
    scheduled = {name: grown.tokens[row, 1:].tolist() for name, row in names.items()}
    nodes = node_paths(laid_out(scheduled, names, grown, tree=TREE), torch.ones(9) > 0)
    expected = [list(path[1:]) for row in grown.tokens.tolist() for path in paths(TREE, row)]
    assert nodes.own_tokens() == expected


# -- verify ----------------------------------------------------------------------------------


def verified(
    scheduled: dict[str, list[int]], request_index: dict[str, int], rows: list[int],
    grammars: str = "", temperature: float | None = None,
):  # fmt: skip
    """What is emitted where row i of the logits says token ``rows[i]``; drafted were 1, 2 and 3."""
    tokens = torch.tensor([[0, 1, 2, 3]]).expand(len(scheduled), -1)
    probs = torch.full((2, 9), 1 / 9)
    grown = GrownTrees(tokens, probs, torch.tensor([[0, 1, -1, -1]]).expand_as(tokens))
    trees = laid_out(scheduled, request_index, grown, grammars)
    logits = torch.nn.functional.one_hot(torch.tensor(rows), 9).log()
    every = None if temperature is None else torch.full((len(request_index),), temperature)
    result = VERIFIER.verify(trees, TargetDistribution(logits, every, Truncation(), cut), {})
    return result.output_tokens.tolist()


def test_whole_batch_of_whole_trees():
    found = verified({"a": [1, 2, 3], "b": [1, 2, 3]}, {"a": 0, "b": 1}, [1, 3, 8, 7, 2, 8, 6, 8])
    assert found == [[1, 3, 7], [2, 6, -1]]


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["a", "plain", "b"], [1, 7, 8, 5, 1, 3, 8, 6]),
        (["plain", "a", "b"], [5, 1, 7, 8, 1, 3, 8, 6]),
    ],
)
def test_rows_of_others_are_not_taken_for_padding(names, rows):
    """A trimmed tree and a request without one: as many rows as two whole trees have."""
    index = {name: place for place, name in enumerate(names)}
    scheduled = {"a": [1, 2], "b": [1, 2, 3]}
    grown = GrownTrees(torch.tensor([[0, 1, 2, 3]] * 2), torch.empty(0), torch.empty(0))
    assert not laid_out(scheduled, index, grown).is_all
    found = verified(scheduled, index, rows)
    assert found == [[1, 7, -1], [1, 3, 6]]


def test_kinds_of_requests_with_trees_of_different_depths_are_joined():
    grown = GrownTrees(torch.tensor([[0, 1, 2, 3]] * 2), torch.full((2, 9), 1 / 9),
                       torch.tensor([[0, 1, -1, -1]] * 2))  # fmt: skip
    trees = laid_out({"greedy": [1], "sampled": [1, 2, 3]}, {"greedy": 0, "sampled": 1}, grown)
    logits = torch.nn.functional.one_hot(torch.tensor([1, 7, 1, 3, 8, 6]), 9).log()
    target = TargetDistribution(logits, torch.tensor([0.0, 1.0]), Truncation(), cut)
    result = VERIFIER.verify(trees, target, {})
    assert result.output_tokens.tolist() == [[1, 7, -1], [1, 3, 6]]
    assert result.accepted_nodes.tolist() == [[1, -1], [1, 3]]


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_replaced_drafts_are_accepted_where_a_grammar_may_have_replaced_them(temperature):
    index = {"a": 0, "b": 1, "plain": 2}
    replaced = {"a": [5, 2, 3], "b": [5, 2, 6], "plain": [5, 2, 3]}
    rows = [5, 3, 8, 7, 5, 6, 8, 4, 5, 3, 8, 7]
    found = verified(replaced, index, rows, grammars="ab", temperature=temperature)
    assert [[token for token in row if token >= 0] for row in found] == [[5, 3, 7], [5, 6, 4], [5]]
    alone = verified({"plain": [5, 2, 3]}, {"plain": 0}, [5, 3, 8, 7], temperature=temperature)
    assert alone[0][0] == 5
    grown = GrownTrees(torch.tensor([[0, 1, 2, 3]]), torch.empty(0), torch.empty(0))
    trees = laid_out({"a": [5, 2, 3]}, {"a": 0}, grown, grammars="a")
    assert (trees.tokens.tolist(), trees.drawn.tolist()) == ([[0, 5, 2, 3]], [[0, 1, 2, 3]])


def test_nodes_that_requests_share_count_by_their_places():
    """One has four of six nodes, of two each in the mean; a third request has the engine's tree.

    The first node of each counts for trees with one draft; with two there are the others, too.
    """
    tokens = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 0]])
    parents = torch.tensor([[-1, 0, 1, 2], [-1, 0, 0, 0]])
    shared = SharedNodes(tokens, parents, torch.tensor([[0, 1, 2, 2], [0, 1, 0, 0]]))
    assert shared.sizes.tolist() == [4, 2]
    nothing = torch.empty(0)
    own, other = (GrownTrees(tokens, nothing, nothing, trees) for trees in (shared, None))
    drafts = {"a": Draft(own, 0), "b": Draft(own, 1), "c": Draft(other, 0)}
    trees = lay_out(
        TreeTables(SMALL_TREE, torch.device("cpu")),
        {"a": [1, 2, 3], "b": [1], "c": [1, 2, 3]},
        drafts,
        {"a": 0, "b": 1, "c": 2},
        lambda name: False,
        np.array([4, 6, 10]),
        np.array([14, 12, 14]),
    )
    assert trees.is_dynamic.tolist() == [True, True, False]
    logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 3, 4, 1, 5, 2, 8, 6, 8]), 9).log()
    result = VERIFIER.verify(trees, TargetDistribution(logits, None, Truncation(), cut), {})
    assert result.output_tokens.tolist() == [[1, 2, 3, 4], [1, 5, -1, -1], [2, 6, -1, -1]]
    nodes, sizes = trees.counted(result.accepted_nodes)
    assert nodes.tolist() == [[1, 2, 2], [1, -1, -1], [2, -1, -1]]
    assert sizes.tolist() == [3, 3, 4]


def long_branch() -> GrownTrees:
    return grow_told(torch.tensor([0]), torch.tensor([[8, 7, 6, 5, 4]]), torch.tensor([5]))


STATIC = GrownTrees(torch.tensor([[0, 1, 2, 3]]), torch.empty(0), torch.empty(0))


@pytest.mark.parametrize(("scheduled", "accepted"), [(5, 5), (5, 2), (5, 0), (3, 3)])
def test_a_branch_may_be_longer_than_the_tree(scheduled, accepted):
    """And is trimmed like a tree. Only how much of it was accepted is counted."""
    branch = [8, 7, 6, 5, 4][:scheduled]
    trees = lay_out(
        TreeTables(SMALL_TREE, CPU), {"a": branch, "b": [1, 2, 3]},
        {"a": Draft(long_branch(), 0), "b": Draft(STATIC, 0)}, {"a": 0, "b": 1}, lambda name: False,
        np.array([scheduled + 1, scheduled + 5]), np.array([20, 14]),
    )  # fmt: skip
    depths = list(range(scheduled + 1))
    assert trees.depths[0].tolist() == depths
    assert trees.parents[0].tolist() == [-1, *depths[:-1]]
    assert (
        trees.ancestors[0].tolist() == torch.ones(len(depths), len(depths)).tril().bool().tolist()
    )
    assert trees.depths[1, :4].tolist() == SMALL_TREE.depths.tolist()
    assert trees.parents[1].tolist() == [-1, 0, 0, 1, -2, -2][: len(depths)]
    assert torch.equal(
        trees.ancestors[1, :4, :4], torch.from_numpy(SMALL_TREE.ancestor_mask.copy())
    )
    assert trees.context_lens.tolist() == [20 - len(depths), 10]
    own = node_paths(trees, torch.tensor([True, True])).own_tokens()
    assert own == [*(branch[:depth] for depth in depths), [], [1], [2], [1, 3]]
    said = [*branch[:accepted], *[0] * (len(depths) - accepted), 1, 3, 0, 2]
    logits = torch.nn.functional.one_hot(torch.tensor(said), VOCABULARY).log()
    result = VERIFIER.verify(trees, TargetDistribution(logits, None, Truncation(), cut), {})
    found = [[token for token in row if token >= 0] for row in result.output_tokens.tolist()]
    assert found == [[*branch[:accepted], 0], [1, 3, 2]]
    nodes, sizes = trees.counted(result.accepted_nodes)
    assert (nodes[0, 0], sizes.tolist()) == (accepted, [0, 4])
    assert nodes[1, :2].tolist() == [1, 3]


def test_trees_that_are_not_ours_may_be_longer_than_the_tree():
    trees = laid_out({"a": [1, 2, 3, 4, 5, 6]}, {"a": 0}, STATIC)
    assert trees.drafts == (None,)
    assert trees.parents[0].tolist() == [-1, *[-2] * 6]
    assert trees.ancestors[0].diagonal().all()


@pytest.mark.parametrize("method", ["sequoia", "traversal"])
def test_a_branch_keeps_the_law(method):
    """Of 8,000 requests: how far each comes, and with which token it ends (chi-square,
    false-alarm rate 1e-6). The tree has two levels, and the branch five."""
    requests, told = 8_000, [8, 7, 6, 5, 4]
    names = list(map(str, range(requests)))
    trees = lay_out(
        TreeTables(SMALL_TREE, CPU), dict.fromkeys(names, told),
        dict.fromkeys(names, Draft(long_branch(), 0)),
        {name: row for row, name in enumerate(names)},
        lambda name: False, np.arange(6, 6 * requests + 1, 6), np.full(requests, 20),
    )  # fmt: skip
    logits = 0.5 * WEIGHTS[0, :6]
    logits[range(5), told] += 2.5  # so that each level is reached
    verifier = TreeVerifier(VERIFIER.greedy_argmax, argmax_with_noise, method)
    torch.manual_seed(0)
    target = TargetDistribution(logits.repeat(requests, 1), torch.ones(requests), Truncation(), cut)
    result = verifier.verify(trees, target, {})
    ends = result.num_accepted
    last = result.output_tokens.gather(1, ends[:, None])[:, 0]
    counts = torch.zeros(6, VOCABULARY).index_put_((ends, last), torch.ones(()), accumulate=True)
    law = logits.softmax(dim=1)
    reached = torch.cat([torch.ones(1), law[range(5), told].cumprod(0)])
    law[range(5), told] = 0
    assert reached[-1] > 0.005
    assert_same_law(counts, reached[:, None] * law)


def test_trees_and_branches_have_the_q_of_their_own():
    """In a batch of both, 2,000 each, with a target that is as likely to give any token."""
    zeros, count = torch.zeros(1, 2, dtype=torch.int64), 2_000
    sampling = DraftSampling(torch.ones(1), zeros, torch.zeros(1) > 0, Truncation())
    torch.manual_seed(0)
    grown = [grown_from(torch.tensor([0]), sampling, SMALL_TREE) for _ in range(count)]
    drafts = [Draft(each, 0) for each in grown] + [Draft(long_branch(), 0)] * count
    names = list(map(str, range(2 * count)))
    scheduled = [each.grown.tokens[0, 1:].tolist() for each in drafts]
    lengths = np.array([1 + len(each) for each in scheduled])
    trees = lay_out(
        TreeTables(SMALL_TREE, CPU), dict(zip(names, scheduled, strict=True)),
        dict(zip(names, drafts, strict=True)), {name: row for row, name in enumerate(names)},
        lambda name: False, lengths.cumsum(), lengths + 10,
    )  # fmt: skip
    logits = torch.zeros(int(lengths.sum()), VOCABULARY)
    target = TargetDistribution(logits, torch.ones(2 * count), Truncation(), cut)
    first = VERIFIER.verify(trees, target, {}).output_tokens[:, 0]
    for own in (first[:count], first[count:]):
        assert_same_law(own.bincount(minlength=VOCABULARY), np.full(VOCABULARY, 1 / VOCABULARY))


@pytest.mark.parametrize("mixed", [True, False])
def test_seeded_requests_emit_what_plain_decoding_draws(mixed):
    """A token each with the next seed, by vLLM's own function; seeds of drafts are kept."""
    temperature = torch.tensor([0.0, 0.8, 0.6, 0.9] if mixed else [0.5, 0.8, 0.6, 0.9])
    seeded = [1, 3] if mixed else [0, 1, 2, 3]
    generators = {row: generator(row + 40) for row in seeded}
    roots = torch.tensor([3, 1, 4, 2])
    sampling = DraftSampling.of(np.arange(4), temperature, generators, Truncation(), TREE.depth)
    grown = grown_from(roots, sampling)
    names = {name: place for place, name in enumerate("abcd")}
    scheduled = {name: grown.tokens[row, 1:].tolist() for name, row in names.items()}
    trees = laid_out(scheduled, names, grown, tree=TREE)
    all_paths = [path for tokens in grown.tokens.tolist() for path in paths(TREE, tokens)]
    logits = torch.stack([*map(scores_after, all_paths)])  # the draft is the target
    target = TargetDistribution(logits, temperature, Truncation(), cut)
    plain = {row: generator(row + 40) for row in seeded}
    result = VERIFIER.verify(trees, target, generators)
    assert result.num_accepted[seeded].tolist() == [TREE.depth] * len(seeded)
    emitted = grown.tokens.gather(1, result.accepted_nodes.clamp(min=0))
    is_accepted = result.accepted_nodes >= 0
    assert torch.equal(is_accepted.sum(dim=1), result.num_accepted)
    assert torch.equal(emitted[is_accepted], result.output_tokens[:, :-1][is_accepted])
    for row in seeded:
        path: tuple[int, ...] = (int(roots[row]),)
        for _ in range(TREE.depth + 1):
            seed = torch.randint(0, 2**31, (1,), generator=plain[row])
            scores = (scores_after(path) / temperature[row])[None]
            path = (*path, int(argmax_with_noise(scores, seed)))
        assert result.output_tokens[row].tolist() == list(path[1:])
        assert torch.equal(generators[row].get_state(), plain[row].get_state())


def test_min_p_is_relative_to_the_likeliest_token():
    logits = torch.tensor([[0.0, -1.0, -2.0, -3.0]] * 3)
    temperature = torch.tensor([0.5, 0.5, 0.0])
    truncation = Truncation(min_p=torch.tensor([0.1, 0.0, 0.9]))
    target = TargetDistribution(logits, temperature, truncation, lambda logits, *_: logits)
    found = target.process(torch.arange(3), torch.tensor([0, 1, 2]))
    excluded = found == -torch.inf
    assert excluded.tolist() == [[False, False, True, True], [False] * 4, [False, True, True, True]]
    assert torch.equal(found[:2][~excluded[:2]], (logits / 0.5)[:2][~excluded[:2]])
    assert found[2, 0] == 0.0  # greedy: as it is
    assert torch.equal(target.probabilities(torch.tensor([1]), torch.tensor([1]))[0],
                       (logits[0] / 0.5).softmax(0))  # fmt: skip


def test_edits_come_before_the_engines_cut():
    given = []

    def edit(logits: Tensor, rows: Tensor, requests: Tensor) -> Tensor:
        given.append((rows.tolist(), requests.tolist()))
        return logits + 1

    def cut(logits: Tensor, top_k: Tensor, top_p: None) -> Tensor:
        given.append((top_k.tolist(), top_p))
        return 2 * logits

    of_requests = torch.tensor([1.0, 0.5]), Truncation(torch.tensor([4, 5]))
    target = TargetDistribution(torch.ones(3, 2), *of_requests, cut, edit)
    found = target.process(torch.tensor([2, 0]), torch.tensor([1, 0]))
    assert found.tolist() == [[6.0, 6.0], [4.0, 4.0]]
    assert given == [([2, 0], [1, 0]), ([5, 4], None)]


# -- seeds and commit ------------------------------------------------------------------------


def test_noise_is_that_of_vllms_sampler():
    logits = torch.randn(300, 50, generator=generator(3))
    seeds = torch.randint(0, 2**31, (300,), generator=generator(4))
    noisy = logits + gumbel_noise(seeds, 50)
    assert noisy.dtype == torch.float32
    assert torch.equal(noisy.argmax(dim=1), argmax_with_noise(logits.clone(), seeds))


def test_peeked_seeds_are_the_next_ones():
    one, plain = generator(1), generator(1)
    first = peek_seeds(one, 5)
    assert torch.equal(first, peek_seeds(one, 5))
    consume_seeds(one, 2)
    drawn = [int(torch.randint(0, 2**31, (1,), generator=plain)) for _ in range(5)]
    assert first.tolist() == drawn
    assert peek_seeds(one, 3).tolist() == drawn[2:]


def test_a_sessions_next_turn_goes_on_with_the_seeds_of_all_its_tokens():
    sessions, found, plain = SessionSeeds(), generator(9), generator(9)
    consume_seeds(found, 7)  # some for tokens behind the turn's end
    sessions.continue_session("a", found, 4)
    consume_seeds(plain, 4)
    assert torch.equal(found.get_state(), plain.get_state())
    consume_seeds(found, 9)
    sessions.continue_session("a", found, 6)
    consume_seeds(plain, 6)
    assert torch.equal(found.get_state(), plain.get_state())
    sessions.continue_session("unseeded", None, 3)
    sessions.forget("a")
    sessions.forget("never seen")
    sessions.continue_session("a", found, 1)
    assert torch.equal(peek_seeds(found, 3), peek_seeds(generator(9), 4)[1:])


def test_layers_move_together_where_their_caches_are_alike():
    one, other = object(), object()
    alike, wider = torch.zeros(2, 4), torch.zeros(2, 8)
    caches = {
        "a": alike, "b": alike.clone(), "c": wider, "d": alike.clone(), "e": alike.half(),
        "f": wider[:, :4],
    }  # fmt: skip
    metadata = {"a": one, "b": one, "c": one, "d": other, "e": one, "f": one}
    assert layers_by_cache(caches, metadata) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]


@pytest.mark.parametrize(("spoilt", "left"), [(False, (4, 6, 7)), (True, (0, 0, 0))])
def test_what_is_not_finite_is_cleared_behind_the_paths(spoilt, left):
    """vLLM's kernel multiplies it by 0 in the next step, and NaN stays NaN."""
    caches = {name: torch.empty(2, 1, 4, 2) for name in "ab"}  # two layers of eight slots
    stored = [part for cache in caches.values() for part in keys_and_values(cache)]
    for part in stored:
        part.copy_(torch.arange(1.0, 9.0).view(2, 1, 4, 1))
    tree = SimpleNamespace(spoilt=spoilt, is_packed=lambda cache: False)
    step = SimpleNamespace(slot_mapping=torch.arange(8), tree=tree)
    first_row, num_nodes = torch.tensor([0, 4]), torch.tensor([4, 3])
    paths = torch.tensor([[1, 3], [-1, -1]])
    TargetCaches().commit(caches, dict.fromkeys(caches, step), first_row, num_nodes, paths)
    for part in stored:
        assert part.flatten().tolist() == [1, 2, 4, left[0], 5, *left[1:], 8]
