"""Verifies batches of small trees by the kernels, and by the reference for each of them."""

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
import triton
import triton.language as tl

from sequoia_vllm.drafting.draft_plan import inner_nodes, inner_rows
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels.modes import SAMPLED, SKIP
from sequoia_vllm.kernels.random import RESIDUAL, VERIFY, uniform64
from sequoia_vllm.kernels.scoring_inputs import VerifierInputs
from sequoia_vllm.kernels.verify import TreesToVerify
from sequoia_vllm.tree import TokenTree
from sequoia_vllm.verification.methods import method_of
from tests.oracles.verification import algorithm_2, draw_without_replacement, match, traversal

STALE = 77
INF = float("inf")


# -- trees and requests --------------------------------------------------------------


def random_tree(rng, size, branches=4):
    parents = [-1]
    while len(parents) < size:
        parent = int(rng.integers(max(0, len(parents) - 6), len(parents)))
        if parents.count(parent) < branches:
            parents.append(parent)
    return TokenTree(tuple(parents))


@dataclass
class Request:
    """One request of a batch: its nodes are the tree's first ``len(tokens)``."""

    tokens: list
    logits: np.ndarray  # [nodes, V]
    draft_logits: np.ndarray = None  # [inner nodes of the tree, V]
    target_tokens: list = None
    mode: int = SAMPLED
    temperature: float = 1.0  # of the draft
    target_temperature: float = 1.0
    seed: int = 1
    position: int = 5
    stats: dict = field(default_factory=dict)  # inner index -> statistics that are not Q's own

    def draft_stats(self):
        """float32 ``[inner, 2]``, as kernels/children_kernels.py writes them."""
        scaled = self.draft_logits.astype(np.float32) / np.float32(self.temperature)
        maximum = scaled.max(axis=1)
        total = np.exp(scaled - maximum[:, None]).sum(axis=1)
        stats = np.stack([maximum, total], axis=1)
        for inner, values in self.stats.items():
            stats[inner] = values
        return stats


def run(
    tree, requests, *, dtype=torch.float32, token_dtype=torch.int32, columns=None, method="sequoia",
    **options,
):  # fmt: skip
    """Each request's accepted nodes and emitted tokens, after checking the padding.

    ``tree`` is of all requests, or a list with each one's own, of one size.
    """
    trees = tree if isinstance(tree, list) else [tree]
    inner = max(1, *map(inner_nodes, trees))
    vocabulary = max(request.logits.shape[1] for request in requests)
    state_rows = [2 * i + 1 for i in range(len(requests))]  # rows between belong to nobody
    # One token wider: rows of a state need not lie end to end.
    draft_logits = torch.full((2 * len(requests) + 1, inner, vocabulary + 1), torch.nan)
    draft_stats = torch.full((2 * len(requests) + 1, inner, 2), torch.nan)
    for i, request in enumerate(requests):
        if request.draft_logits is None:
            state_rows[i] = 10**6 if i % 2 else -1  # must not be read
        else:
            own = len(request.draft_logits)
            draft_logits[state_rows[i], :own, :-1] = torch.from_numpy(request.draft_logits)
            draft_stats[state_rows[i], :own] = torch.from_numpy(request.draft_stats())
    sizes = [len(request.tokens) for request in requests]
    rows = sum(sizes)
    targets = [token for r in requests for token in r.target_tokens or [-9] * len(r.tokens)]
    children, inner_index, slots = shapes_of(trees, len(requests))
    depth = max(one.depth for one in trees)
    width = columns or depth + 1
    sampled = torch.full((len(requests), width), STALE)
    accepted = torch.full((len(requests), max(depth, 1)), STALE, dtype=torch.int32)
    accepted = accepted[:, :depth] if depth else accepted[:, :0]
    num_sampled = torch.full((len(requests),), STALE, dtype=torch.int32)
    logits = np.concatenate([request.logits for request in requests if len(request.tokens)])
    to_verify = TreesToVerify(
        logits=torch.from_numpy(logits).to(dtype),
        target_temperatures=torch.tensor([r.target_temperature for r in requests]),
        inputs=VerifierInputs(
            tokens=torch.tensor([t for r in requests for t in r.tokens], dtype=token_dtype),
            token_ids=torch.empty(0),
            positions=torch.empty(0),
            modes=torch.tensor([r.mode for r in requests], dtype=torch.int32),
            root_positions=torch.tensor([r.position for r in requests], dtype=torch.int32),
            state_rows=torch.tensor(state_rows, dtype=token_dtype),
            temperatures=torch.tensor([r.temperature for r in requests]),
            seeds=torch.tensor([r.seed for r in requests]),
            slots=slots,
        ),
        target_tokens=torch.tensor(targets, dtype=torch.int64),
        cu_num_logits=torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
        children=children,
        inner_index=inner_index,
        draft_logits=draft_logits.to(dtype)[:, :, :-1],
        draft_stats=draft_stats,
        sampled_tokens=sampled,
        num_sampled=num_sampled,
        accepted=accepted,
    )
    found = method_of(method)
    found.kernel_launcher()(to_verify, found.tree_tables(trees[0].parents, "cpu"), **options)
    assert rows == logits.shape[0]
    results = []
    for i, count in enumerate(num_sampled.tolist()):
        path, emitted = accepted[i].tolist(), sampled[i].tolist()
        assert emitted[count:] == [-1] * (width - count)
        length = max(count - 1, 0)
        assert path[length:] == [-1] * (depth - length)
        results.append((path[:length], emitted[:count]))
    return results


def shapes_of(trees, requests):
    """Children and rows of Q of one tree, or of each slot's own; and slots of these requests."""
    slots = torch.arange(requests).flip(0) + 1
    tables = [TreeTables(tree, torch.device("cpu")) for tree in trees]
    if len(trees) == 1:
        return tables[0].children, tables[0].inner_rows, slots
    branches = max(tree.max_branch for tree in trees)
    children = torch.full((len(trees) + 2, trees[0].size, branches), STALE, dtype=torch.int32)
    inner_index = torch.full(children.shape[:2], STALE, dtype=torch.int32)
    for slot, own in zip(slots.tolist(), tables, strict=True):
        inner_index[slot] = own.inner_rows
        children[slot] = -1
        children[slot, :, : own.children.shape[1]] = own.children
    return children, inner_index, slots


# -- references ----------------------------------------------------------------------


@triton.jit
def uniforms_kernel(seed, position, depths, verifying, ending):
    node = tl.program_id(0)
    depth = tl.load(depths + node)
    own = tl.load(seed)
    tl.store(verifying + node, uniform64(own, 0, position + depth, node, VERIFY))
    tl.store(ending + node, uniform64(own, 0, position + depth, node, RESIDUAL))


def kernel_uniforms(tree, request):
    """What decides each node, and what picks the token after it: two lists per node."""
    verifying, ending = torch.empty(2, tree.size, dtype=torch.float64)
    uniforms_kernel[(tree.size,)](
        torch.tensor([request.seed]), request.position, torch.tensor(tree.depths), verifying, ending
    )
    return verifying.tolist(), ending.tolist()


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def draft_probabilities(logits, temperature):
    probabilities = softmax(logits.astype(np.float64) / temperature)
    return np.where(probabilities < 2.0**-126, 0.0, probabilities)


@dataclass
class KernelChance:
    """The kernel's numbers, and the least distance of a decision from its edge.

    Attributes:
        verifying: What decides each node.
        ending: What picks the token after each node.
        lanes: The kernel's: its order of the tokens.
    """

    verifying: list
    ending: list
    lanes: int
    margin: float = 1.0

    def accepts(self, target, draft, node):
        threshold = self.verifying[node] * draft
        self.margin = min(self.margin, abs(threshold - target))
        return threshold < target

    def draw(self, distribution, node):
        """Inversion over the tokens in the kernel's order."""
        tokens = range(len(distribution))
        order = sorted(tokens, key=lambda token: (token % self.lanes, token // self.lanes))
        cumulative = distribution[order].cumsum()
        threshold = self.ending[node] * cumulative[-1]
        self.margin = min(self.margin, np.abs(cumulative - threshold).min())
        return order[int((cumulative > threshold).argmax())]


def expected_walk(tree, request, uniforms, lanes, rule=algorithm_2):
    """Accepted nodes, emitted tokens, and the least distance of a decision from its edge."""

    def target(node):
        return softmax(request.logits[node] / request.target_temperature)

    def draft(node):
        row = request.draft_logits[inner_rows(tree)[node]]
        return draft_probabilities(row, request.temperature)

    chance = KernelChance(*uniforms, lanes)
    path, emitted = rule(target, draft, request.tokens, drafted_children(tree, request), chance)
    return path, emitted, chance.margin


def check_walks(tree, requests, lanes, method="sequoia", most_at_edge=0.05, **options):
    """Every decision is that of the reference; those at its edge, a few, are left out.

    Returns the number of accepted nodes of each request that was compared.
    """
    rule = {"sequoia": algorithm_2, "traversal": traversal}[method]
    lengths = []
    results = run(tree, requests, method=method, **options)
    for request, result in zip(requests, results, strict=True):
        uniforms = kernel_uniforms(tree, request)
        *expected, margin = expected_walk(tree, request, uniforms, lanes, rule)
        if margin > 1e-5:
            assert result == tuple(expected)
            lengths.append(len(expected[0]))
    assert len(lengths) >= (1 - most_at_edge) * len(requests)
    return lengths


def drafted_children(tree, request):
    """Each of the request's nodes: its children up to the first placeholder."""
    return [
        list(takewhile(lambda child: request.tokens[child] >= 0, children))
        for children in tree.trim(len(request.tokens)).children
    ]


def expected_match(tree, request):
    """Accepted nodes and emitted tokens where the target's token is given."""
    children = tree.trim(1 if request.mode == SKIP else len(request.tokens)).children
    return match(lambda node, _: request.target_tokens[node], request.tokens, children)


# -- random problems -----------------------------------------------------------------


def dense(rng, vocabulary):
    return rng.integers(-16, 17, vocabulary) / 8  # exact in bfloat16


def sparse(rng, vocabulary):
    logits = np.where(rng.random(vocabulary) < 0.5, -INF, dense(rng, vocabulary))
    logits[rng.integers(vocabulary)] = 1.0
    return logits


def one_hot(rng, vocabulary):
    logits = np.full(vocabulary, -INF)
    logits[rng.integers(vocabulary)] = 2.0
    return logits


def underflowing(rng, vocabulary):
    """Differences of about a hundred: most of Q is below the smallest normal float32."""
    return rng.integers(-3, 4, vocabulary) * 64.0


KINDS = {"dense": dense, "sparse": sparse, "one-hot": one_hot, "underflowing": underflowing}


def random_request(rng, tree, vocabulary, target=dense, draft=dense, size=None, seed=1):
    size = tree.size if size is None else size
    logits = np.stack([target(rng, vocabulary) for _ in range(size)])
    draft_logits = np.stack([draft(rng, vocabulary) for _ in range(inner_nodes(tree))])
    request = Request([0] * size, logits.astype(np.float32), draft_logits.astype(np.float32))
    request.seed, request.position = seed, int(rng.integers(0, 1000))
    request.temperature = float(rng.choice([0.5, 1.0, 1.25]))
    for row, children in zip(inner_rows(tree), tree.trim(size).children, strict=False):
        if children:
            probabilities = draft_probabilities(request.draft_logits[row], request.temperature)
            drawn = draw_without_replacement(
                probabilities, len(children),
                lambda rest: int(rng.choice(len(rest), p=rest / rest.sum())),
            )  # fmt: skip
            for child, token in zip(children, drawn, strict=True):
                request.tokens[child] = token
    return request
