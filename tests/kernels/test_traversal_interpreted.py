"""The kernels of traversal, run by Triton's interpreter, against plain Python."""

import numpy as np
import pytest
import torch

from sequoia_vllm.kernels.modes import GREEDY, SEEDED
from sequoia_vllm.kernels.traversal import TraversalOrder
from sequoia_vllm.tree import TokenTree
from tests.support.verifying import (
    KINDS,
    Request,
    check_walks,
    expected_match,
    random_request,
    random_tree,
    run,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("lanes")


def traverse(tree, requests, **options):
    return run(tree, requests, method="traversal", **options)


def check(tree, requests, lanes, **options):
    return check_walks(tree, requests, lanes, "traversal", most_at_edge=0.1, **options)


@pytest.mark.parametrize(
    ("target", "draft", "lanes"),
    [*zip(["dense", "sparse"] * 2, KINDS, [4, 16, 16, 4], strict=True), ("sparse", "dense", 4)],
    indirect=["lanes"],
)
def test_decides_as_the_plain_form(lanes, target, draft):
    rng = np.random.default_rng([lanes, *map(ord, target + draft)])
    tree = random_tree(rng, 10)
    requests = [
        random_request(rng, tree, 9, KINDS[target], KINDS[draft], seed=seed) for seed in range(5)
    ]
    check(tree, requests, lanes)


def test_paths_of_every_length(lanes):
    """Drafts that the target likes: at the end of the first path, and all the way back."""
    rng = np.random.default_rng(21)
    tree = TokenTree((-1, 0, 0, 1, 1, 3))
    requests = []
    for seed in range(16):
        request = random_request(rng, tree, 7, seed=seed)
        request.temperature = 1.0
        noise = rng.normal(size=request.draft_logits.shape) * 0.5
        request.logits[sorted(set(tree.parents[1:]))] = request.draft_logits + noise
        requests.append(request)
    assert set(check(tree, requests, lanes)) == {0, 1, 2, 3}


def test_visits_of_nodes_that_no_request_has_are_not_launched():
    rng = np.random.default_rng(4)
    tree = TokenTree((-1, 0, 1, 0, 1, 0, 2, 2))
    short = [random_request(rng, tree, 6, size=size, seed=size) for size in range(1, 5)]
    assert traverse(tree, short, most_nodes=4) == traverse(tree, short)
    alone = random_request(rng, tree, 6, size=1)
    alone.draft_logits = None
    assert [path for path, _ in traverse(tree, [alone, alone], most_nodes=1)] == [[], []]


def test_other_modes_and_requests_without_rows(lanes):
    """Theirs is the walk; in one batch, and a launch less where all are of one kind."""
    rng = np.random.default_rng(2)
    tree = TokenTree((-1, 0, 0, 1, 1, 3))
    requests = [random_request(rng, tree, 9, seed=seed) for seed in range(6)]
    for request, mode in zip(requests[::2], (GREEDY, SEEDED, GREEDY), strict=True):
        request.mode, request.target_tokens = mode, [3] * len(request.tokens)
    nothing = Request([], np.zeros((0, 9), np.float32), target_tokens=[])
    together = traverse(tree, [*requests, nothing])
    assert together[0::2][:3] == [expected_match(tree, request) for request in requests[::2]]
    sampled = [*requests[1::2], nothing]
    alone = traverse(tree, sampled, any_matched=False)
    assert alone == [*together[1::2], ([], [])]
    assert alone == traverse(tree, sampled)
    assert traverse(tree, requests[::2], any_sampled=False) == together[0:6:2]
    check(tree, requests[1::2], lanes)


@pytest.mark.parametrize("method", ["traversal", "sequoia"])
def test_a_token_after_which_the_target_is_nan_is_accepted_as_often_as_any(lanes, method):
    """Half of the time here. Its child never is, and token 0 follows."""
    target = np.log([[0.7, 0.3, 1e-9], [1, 1, 1], [0.2, 0.3, 0.5]]).astype(np.float32)
    target[1] = np.nan
    draft = np.log([[0.4, 0.6, 1e-9], [0.5, 0.25, 0.25]]).astype(np.float32)
    requests = [Request([0, 1, 2], target, draft, seed=seed) for seed in range(100)]
    found = run(TokenTree((-1, 0, 1)), requests, method=method)
    accepted = [tokens for path, tokens in found if path]
    assert 25 < len(accepted) < 75
    assert all(path == [1] and tokens == [1, 0] for path, tokens in found if path)
    assert all(tokens == [0] for path, tokens in found if not path)


# -- the order -----------------------------------------------------------------------


def test_every_node_has_its_turn_after_its_parent_and_earlier_siblings():
    rng = np.random.default_rng(30)
    for size in (2, 9, 40):
        tree = random_tree(rng, size)
        order = TraversalOrder.of(tree.parents, CPU)
        turns, closings = order.decided_in.tolist()
        visits = [visit for wave in order.waves for visit in wave.tolist()]
        closed = [-node for node in {*tree.parents} if node > 0]
        assert sorted(visits) == sorted([*closed, *range(1, size)])
        for number, wave in enumerate(order.waves):
            assert all((turns if visit > 0 else closings)[abs(visit)] == number for visit in wave)
        for node in range(1, size):
            parent, siblings = tree.parents[node], tree.children[tree.parents[node]]
            before = siblings[: siblings.index(node)]
            assert turns[node] > max([turns[parent] if parent else -1, *(turns[b] for b in before)])
            if own := tree.children[node]:
                assert closings[node] > max(turns[child] for child in own)


def test_waves_are_far_fewer_than_nodes():
    star_of_chains = [-1, *[0] * 8, *range(1, 9), *range(9, 17)]
    assert len(TraversalOrder.of(star_of_chains, CPU).waves) == 11
