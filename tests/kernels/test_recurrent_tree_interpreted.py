"""Trees over recurrent layers against every path walked by the plain recurrence in float64."""

from itertools import chain

import pytest
import torch

from sequoia_vllm.kernels.recurrent_channels import score_kda, score_kda_by_decays
from sequoia_vllm.kernels.recurrent_heads import score_gdn, score_linear, score_mamba
from sequoia_vllm.kernels.recurrent_tree import (
    KeptNodes,
    RecurrentHeads,
    RecurrentStates,
    ScoredNodes,
    commit_nodes,
    convolve_nodes,
)
from sequoia_vllm.tree import MOST_RECURRENT_NODES, TokenTree
from tests.oracles import recurrence
from tests.support.chessboard import chessboard

WIDTH, BLOCKS = 4, 9
KINDS = ["gdn", "kda", "decays", "mamba", "linear"]


def path_to(parents, node):
    return TokenTree(parents).ancestor_mask[node].nonzero()[0].tolist()


def random_tree(nodes, generator, reach):
    """Parents of a tree: each at most ``reach`` nodes before its child."""
    return [-1] + [
        int(torch.randint(max(0, node - reach), node, (), generator=generator))
        for node in range(1, nodes)
    ]


class Batch:
    """Requests with trees over two layers, whose states lie anywhere in a cache.

    `kind`: "gdn", "kda", "mamba", "linear", or "conv", whose layers are convolutions alone. Of
    "kda" the second layer's gates have a bound; in "decays" they were computed before.
    """

    def __init__(
        self, trees, counts, sizes=(2, 4, 16, 32), dtype=torch.float32, own=True, kind="gdn"
    ):
        self.generator = torch.Generator().manual_seed(0)
        by_channel = kind in ("kda", "decays")
        if by_channel or kind == "linear":
            sizes = (sizes[1], *sizes[1:])
        self.kind, self.shape = kind, RecurrentHeads(*sizes, by_channel=by_channel)
        shape = self.shape
        self.counts, self.dtype = counts, dtype
        self.trees = trees if own else trees * len(counts)
        starts = torch.tensor([0, *counts]).cumsum(0)
        self.rows = int(starts[-1])
        self.indices = torch.randperm(BLOCKS - 1, generator=self.generator)[: len(counts)] + 1
        parents = torch.tensor(trees if own else trees[0], dtype=torch.int32)
        ancestors = [torch.tensor(TokenTree(tree).ancestor_mask) for tree in trees]
        self.nodes = ScoredNodes(
            cu_nodes=starts.int(),
            slots=torch.arange(len(counts)),
            parents=parents,
            ancestors=torch.stack(ancestors) if own else ancestors[0],
            depth=max(int(each.sum(1).max()) for each in ancestors) - 1,
            state_indices=self.indices.int(),
        )
        self.layers = [self.layer(is_second) for is_second in (False, True)]
        self.inputs = [self.random(self.rows, shape.channels) for _ in range(2)]
        one = (shape.value_heads,)
        of_channels = [(shape.heads * shape.key,), one]
        of_kind = {
            "gdn": [one, one], "kda": of_channels, "decays": of_channels, "mamba": [one]
        }.get(kind, [])  # fmt: skip
        self.gates = [[self.random(self.rows, *size) * 3 for size in of_kind] for _ in range(2)]
        # Channels first in a block, as vLLM can keep them; a page has more than the state.
        before = WIDTH - 1 if kind != "linear" else 0
        self.history = [
            self.random(BLOCKS, shape.channels, before).transpose(1, 2) for _ in range(2)
        ]
        state = shape.value_heads * shape.value * shape.key
        self.states = [
            self.random(BLOCKS, state + 8).float()[:, :state].view(
                BLOCKS, shape.value_heads, shape.value, shape.key
            )
            for _ in range(2 if kind != "conv" else 0)
        ]  # fmt: skip
        heads = shape if kind != "conv" else None
        self.kept = KeptNodes.empty(heads, shape.channels, 2, self.rows + 3, dtype, "cpu")

    def layer(self, is_second):
        shape = self.shape
        weights = self.random(shape.channels, WIDTH)
        bias = self.random(shape.channels) if is_second else None
        if self.kind == "conv":
            return recurrence.Convolution(weights, bias)
        heads, sizes = (shape.heads, shape.value_heads), (shape.key, shape.value)
        each = [self.random(shape.value_heads) for _ in range(3)]
        if self.kind == "linear":
            return recurrence.LinearLayer(weights, bias, each[0].float().abs(), sizes)
        if self.shape.by_channel:
            bound, dt_bias = -5.0 if is_second else None, self.random(shape.heads * shape.key)
            log_a = each[0].float() * 2
            return recurrence.KdaLayer(weights, bias, log_a, dt_bias, bound, heads[0], sizes)
        if self.kind == "gdn":
            return recurrence.GdnLayer(weights, bias, each[0].float(), each[1], heads, sizes)
        return recurrence.MambaLayer(weights, bias, -each[0].float().exp(), *each[1:], heads, sizes)

    def random(self, *sizes):
        return torch.randn(sizes, generator=self.generator).to(self.dtype)

    def score(self):
        outputs = []
        for place, layer in enumerate(self.layers):
            more = {"nodes": self.nodes, "kept": self.kept, "layer": place}
            mixed = self.inputs[place]
            if self.kind != "linear":
                mixed = convolve_nodes(
                    mixed, layer.weights, layer.bias, history=self.history[place],
                    silu=self.kind != "conv", **more,
                )  # fmt: skip
            output = torch.full((self.rows, self.shape.value_heads, self.shape.value), -7.0)
            if self.kind == "conv":
                output = mixed
            else:
                more |= {"states": self.states[place], "output": output}
            beside = torch.zeros(self.rows, 3)  # of one projection
            if self.kind == "decays":
                self.score_decays(mixed, place, layer, more)
            elif self.kind == "linear":
                heads, key, value = self.shape.heads, self.shape.key, self.shape.value
                parts = mixed.split([heads * key, heads * key, heads * value], dim=1)
                parts = [part.unflatten(1, (heads, -1)) for part in parts]
                score_linear(*parts, layer.slopes, **more)
            elif self.kind == "kda":
                gates, strengths = self.gates[place]
                gates = torch.cat([beside, gates, beside], dim=1)[:, 3:-3]
                gates = gates.unflatten(1, (self.shape.heads, self.shape.key))
                strengths = torch.cat([beside, strengths], dim=1)[:, 3:]
                of_layer = layer.log_a, layer.dt_bias, layer.lower_bound
                score_kda(mixed, gates, strengths, *of_layer, **more)
            elif self.kind == "gdn":
                score_gdn(mixed, *self.gates[place], layer.log_a, layer.dt_bias, **more)
            elif self.kind == "mamba":
                [dt] = self.gates[place]
                dt = torch.cat([beside, dt, beside], dim=1)[:, 3:-3]
                score_mamba(mixed, dt, layer.a, layer.d, layer.dt_bias, **more)
            outputs.append(output)
        return outputs

    def score_decays(self, mixed, place, layer, more):
        gates, strengths = self.gates[place]
        gates = (gates + layer.dt_bias).unflatten(1, (self.shape.heads, self.shape.key))
        rate = layer.log_a.exp()[:, None]
        if layer.lower_bound is None:
            decays = -rate * torch.nn.functional.softplus(gates)
        else:
            decays = layer.lower_bound * torch.sigmoid(rate * gates)
        score_kda_by_decays(mixed, decays, strengths.sigmoid(), layer.lower_bound, **more)

    def walked(self, place, request, path):
        rows = slice(*self.nodes.cu_nodes[request : request + 2].tolist())
        block = self.indices[request]
        state = self.states[place][block] if self.states else torch.zeros(())
        gates = [gate[rows] for gate in self.gates[place]]
        return recurrence.walk(
            self.layers[place], self.history[place][block], state, self.inputs[place][rows], gates,
            path,
        )  # fmt: skip

    def commit(self, paths, contexts=None, table=None, **more):
        requests = len(self.counts)
        accepted = torch.full((requests, max(map(len, paths))), -1, dtype=torch.int32)
        for request, path in enumerate(paths):
            accepted[request, : len(path) - 1] = torch.tensor(path[1:], dtype=torch.int32)
        commit_nodes(
            RecurrentStates.of(self.history, self.states, [0, 1]),
            self.kept,
            nodes=self.nodes,
            accepted=accepted,
            context_lens=torch.tensor(contexts or [5] * requests, dtype=torch.int32),
            block_table=torch.zeros(requests, 3, dtype=torch.int32) if table is None else table,
            **more,
        )


def check(batch, tolerance=2e-5):
    """Outputs of all nodes in both layers, and that no state has changed."""
    before = [each.clone() for each in (*batch.history, *batch.states)]
    for place, output in enumerate(batch.score()):
        for request, count in enumerate(batch.counts):
            first = int(batch.nodes.cu_nodes[request])
            for node in range(count):
                expected, _, _ = batch.walked(place, request, path_to(batch.trees[request], node))
                torch.testing.assert_close(
                    output[first + node].double(), expected[-1], rtol=tolerance, atol=tolerance
                )
    after = (*batch.history, *batch.states)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


CHAIN, STAR = [-1, *range(11)], [-1, *[0] * 11]


@pytest.mark.parametrize("kind", [*KINDS, "conv"])
def test_outputs_are_those_of_the_paths(kind):
    generator = torch.Generator().manual_seed(1)
    trees = [CHAIN, STAR, random_tree(12, generator, 4), random_tree(12, generator, 12)]
    check(Batch(trees, [12, 12, 12, 12], kind=kind))


@pytest.mark.parametrize(("kind", "reach"), chessboard(KINDS, [2, 64]))
def test_large_trees(kind, reach):
    tree = random_tree(MOST_RECURRENT_NODES, torch.Generator().manual_seed(2), reach)
    batch = Batch([tree], [MOST_RECURRENT_NODES], sizes=(1, 1, 16, 16), own=False, kind=kind)
    check(batch, tolerance=2e-4)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gdn", (1, 2, 128, 128)),
        ("kda", (2, 2, 128, 128)),
        ("linear", (2, 2, 128, 128)),
        ("mamba", (1, 2, 128, 80)),
        ("mamba", (2, 2, 256, 64)),
    ],
)
def test_sizes_of_heads_that_models_have(kind, sizes):
    check(Batch([[-1, 0, 1, 0]], [4], sizes=sizes, own=False, kind=kind), tolerance=2e-4)


@pytest.mark.parametrize("kind", [*KINDS, "conv"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_only_the_nodes_below(kind, value):
    """In outputs, and in the states of paths that leave it out or end before it in a block."""
    tree = [-1, 0, 0, 1, 2, 2, 3, 4]
    found = []
    for part in (None, "inputs", *(["gates"] if kind != "linear" else [])):
        batch = Batch([tree], [8, 8], own=False, kind=kind)
        if part is not None:
            for each in batch.inputs if part == "inputs" else chain(*batch.gates):
                each[2] = value
        outputs = [output.clone() for output in batch.score()]
        batch.commit([[0, 1, 3, 6], [0, 2, 4, 7]])
        found.append([outputs, [each.clone() for each in (*batch.history, *batch.states)]])
    below = torch.tensor([2, 4, 5, 7])
    (expected, states), *spoilt = found
    for outputs, kept in spoilt:
        for output, finite in zip(outputs, expected, strict=True):
            others = torch.ones(16, dtype=torch.bool)
            others[below] = False
            torch.testing.assert_close(output[others], finite[others])
            # A state of these kinds that decays to nothing is finite.
            if kind != "conv" and not (kind in ("kda", "decays", "mamba") and value > 0):
                assert not output[below].isfinite().flatten(1).all(dim=1).any()
        for state, finite in zip(kept, states, strict=True):
            torch.testing.assert_close(state, finite)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_at_an_edge_does_not_know_what_follows(kind):
    """The path's last token is NaN, and a block of tokens ends before it."""
    states = []
    for value in (0.5, float("nan")):
        batch = Batch([[-1, 0, 1, 2]], [4], own=False, kind=kind)
        for each in batch.inputs:
            each[3] = value
        batch.score()
        free = next(i for i in range(1, BLOCKS) if i not in batch.indices)
        table = torch.full((1, 3), free, dtype=torch.int32)
        batch.commit([[0, 1, 2, 3]], contexts=[5], table=table, block_size=8)
        states.append([each[free].clone() for each in (*batch.history, *batch.states)])
        assert not batch.states[0][batch.indices[0]].isfinite().all() or value == 0.5
    for finite, state in zip(*states, strict=True):
        assert finite.isfinite().all()
        torch.testing.assert_close(state, finite)


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_of_one_tree_and_no_tree(kind):
    tree = random_tree(12, torch.Generator().manual_seed(3), 5)
    check(Batch([tree], [1, 7, 0, 12, 2], own=False, kind=kind))
    check(Batch([[-1]], [1, 1], own=False, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_left_alone(kind):
    batch = Batch([CHAIN], [3, 4, 2], own=False, kind=kind)
    batch.nodes.state_indices[1] = 0
    before = [each.clone() for each in (*batch.history, *batch.states)]
    assert all((output[3:7] == -7).all() for output in batch.score())
    batch.commit([[0], [0, 1], [0]])
    indices = batch.indices[[0, 2]]
    for old, new in zip(before, (*batch.history, *batch.states), strict=True):
        assert old.numel() == 0 or not torch.equal(old[indices], new[indices])
        old[indices] = new[indices]
        assert torch.equal(old, new)


def committed(batch, paths, **more):
    """Commits; whether inputs and states are those after the paths, and no other has changed."""
    expected = [[each.clone() for each in caches] for caches in (batch.history, batch.states)]
    edges = more.pop("edges", {})
    for place in range(2):
        for request, path in enumerate(paths):
            _, inputs, states = batch.walked(place, request, path)
            for block, step in [(int(batch.indices[request]), -1), *edges.get(request, [])]:
                expected[0][place][block] = inputs[step].to(batch.dtype)
                if batch.states:
                    expected[1][place][block] = states[step].float()
    batch.score()
    batch.commit(paths, **more)
    for found, wanted in zip((batch.history, batch.states), expected, strict=True):
        for each, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [*KINDS, "conv"])
def test_commits_replay_paths(kind):
    """From a root alone to more tokens than the convolution looks back."""
    generator = torch.Generator().manual_seed(4)
    trees = [CHAIN, STAR, random_tree(12, generator, 3), random_tree(12, generator, 6), CHAIN]
    paths = [list(range(12)), [0, 7], path_to(trees[2], 11), path_to(trees[3], 9), [0]]
    batch = Batch(trees, [12] * 5, kind=kind)
    committed(batch, paths)
    committed(batch, [[0], [0, 11], [0], path_to(trees[3], 4), [0, 1, 2]])  # from there on


@pytest.mark.parametrize("kind", [*KINDS, "conv"])
def test_a_block_that_ends_within_a_path_gets_its_state(kind):
    """Ends: within the path, with it, before it, with the root alone; and a path without one."""
    contexts, size = [13, 12, 16, 15, 17], 16
    batch = Batch([CHAIN], [12] * 5, own=False, kind=kind)
    free = [block for block in range(1, BLOCKS) if block not in batch.indices.tolist()]
    table = torch.tensor([[free[0], 0, 0]] * 5, dtype=torch.int32)
    table[2:, 0] = free[1]
    paths = [list(range(6)), [0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]
    edges = {0: [(free[0], 2)], 3: [(free[1], 0)]}
    committed(batch, paths, edges=edges, contexts=contexts, table=table, block_size=size)


def test_bfloat16():
    """As in vLLM's kernel each product is rounded, and their sum is not."""
    batch = Batch([[-1]], [1, 1, 1], own=False, dtype=torch.bfloat16)
    weights, history = batch.layers[0].weights, batch.history[0][batch.indices]
    window = torch.cat([history, batch.inputs[0][:, None]], dim=1)
    sums = torch.zeros(3, batch.shape.channels)
    for place in range(WIDTH):
        sums += (window[:, place] * weights[:, place]).float()
    found = convolve_nodes(
        batch.inputs[0], weights, None, nodes=batch.nodes, history=batch.history[0],
        kept=batch.kept,
    )  # fmt: skip
    expected = (sums / (1 + torch.exp(-sums))).bfloat16()
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-4)


def test_what_nodes_leave_takes_the_bytes_of_k_u_and_g():
    kept = KeptNodes.empty(RecurrentHeads(16, 32, 128, 128), 8192, 3, 5, torch.bfloat16, "cpu")
    per_node = 2 * 8192 + 4 * (16 * 128 + 32 * 128 + 32)
    assert kept.size_in_bytes == 3 * 5 * per_node
    by_channel = RecurrentHeads(32, 32, 128, 128, by_channel=True)
    kept = KeptNodes.empty(by_channel, 12288, 3, 5, torch.bfloat16, "cpu")
    per_node = 2 * 12288 + 4 * 3 * 32 * 128
    assert kept.size_in_bytes == 5 * (3 * per_node + 4 * 32 * 2 * (128 + 64))


def test_what_does_not_fit_is_refused():
    for sizes in [(2, 3, 16, 16), (1, 1, 24, 16), (1, 1, 16, 8), (1, 2, 16, 16, True)]:
        with pytest.raises(ValueError, match="powers of two"):
            RecurrentHeads(*sizes)
    with pytest.raises(ValueError, match="alike"):
        RecurrentStates.of(
            [torch.zeros(2, 3, 8), torch.zeros(2, 3, 9)], [torch.zeros(2)] * 2, [0, 1]
        )
    batch = Batch([[-1, *[0] * MOST_RECURRENT_NODES]], [1], own=False)
    with pytest.raises(ValueError, match="64 at most"):
        batch.score()
