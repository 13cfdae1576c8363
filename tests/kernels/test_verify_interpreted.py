"""The verifier's kernel, run by Triton's interpreter, against plain Python."""

from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sequoia_vllm.kernels import target_statistics, verify
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED, SKIP
from sequoia_vllm.kernels.scoring_inputs import VerifierInputs
from sequoia_vllm.kernels.verify import TreesToVerify
from sequoia_vllm.tree import TokenTree
from tests.oracles.laws import assert_same_law
from tests.oracles.verification import draft_tree
from tests.support.chessboard import chessboard
from tests.support.verifying import (
    INF,
    KINDS,
    Request,
    check_walks,
    dense,
    expected_match,
    kernel_uniforms,
    random_request,
    random_tree,
    run,
    softmax,
    sparse,
)

pytestmark = [
    # What is far below a row's maximum becomes -inf before its exponential is taken.
    pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")
]


@pytest.fixture(params=[True, False], ids=["few rows", "many rows"])
def few(request, monkeypatch):
    """Whether rows' statistics come from a launch of their own."""
    monkeypatch.setattr(target_statistics, "pays_off", lambda rows, device: request.param)
    return request.param


of_each_method = pytest.mark.parametrize("method", ["sequoia", "traversal"])


# -- the target's token is given -----------------------------------------------------


def test_matching_walks_as_plain_python_does():
    rng = np.random.default_rng(1)
    deepest = 0
    for size in (1, 2, 9, 30):
        tree = random_tree(rng, size)
        requests = []
        for i in range(20):  # each size in each mode
            own = [size, max(1, size - 3), 1, min(size, 5)][i % 4]
            # Siblings may be equal, too.
            tokens = rng.choice([-1, 0, 1, 2], own, p=[0.1, 0.6, 0.2, 0.1]).tolist()
            request = Request(tokens, np.zeros((own, 3), np.float32))
            request.target_tokens = rng.choice(3, own, p=[0.7, 0.2, 0.1]).tolist()
            request.mode = [GREEDY, GREEDY, SEEDED, SEEDED, SKIP][i % 5]
            requests.append(request)
        expected = [expected_match(tree, request) for request in requests]
        assert run(tree, requests, columns=size + 2) == expected
        assert run(tree, requests, token_dtype=torch.int64) == expected
        deepest = max(deepest, *(len(path) for path, _ in expected))
    assert deepest >= 3


def test_a_placeholder_matches_no_target():
    tree = TokenTree((-1, 0))
    logits = np.zeros((2, 3), np.float32)
    request = Request([0, -1], logits, target_tokens=[-1, 2], mode=SEEDED)
    assert run(tree, [request]) == [([], [-1])]


def test_a_request_without_rows_emits_nothing(lanes):
    rng = np.random.default_rng(2)
    tree = TokenTree((-1, 0, 0))
    requests = [random_request(rng, tree, 5, seed=seed) for seed in (1, 2)]
    nothing = Request([], np.zeros((0, 5), np.float32), target_tokens=[])
    greedy_nothing = Request([], np.zeros((0, 5), np.float32), target_tokens=[], mode=GREEDY)
    results = run(tree, [requests[0], nothing, requests[1], greedy_nothing])
    assert results == [run(tree, [requests[0]])[0], ([], []), run(tree, [requests[1]])[0], ([], [])]


# -- Algorithm 2: every decision -----------------------------------------------------


@pytest.mark.parametrize(
    ("target", "draft", "lanes"), chessboard(["dense", "sparse"], KINDS, [4, 16]),
    indirect=["lanes"],
)  # fmt: skip
def test_decides_as_algorithm_2(lanes, target, draft, monkeypatch):
    few = lanes == 4
    monkeypatch.setattr(target_statistics, "pays_off", lambda rows, device: few)
    rng = np.random.default_rng([lanes, *map(ord, target + draft)])
    tree = random_tree(rng, 12)
    requests = [
        random_request(rng, tree, 9, KINDS[target], KINDS[draft], seed=seed) for seed in range(8)
    ]
    lengths = check_walks(tree, requests, lanes)
    assert sum(length < max(tree.depths) for length in lengths) >= 3


def test_temperature_is_applied_to_what_is_read(lanes, few):
    """The result is that of logits divided before, as vLLM does; each neighbour has its own.

    Raw logits of 16 bits: those of 32 the law below is of, at a temperature.
    """
    rng = np.random.default_rng(11)
    # Many first decisions: a wrong sum changes few of them.
    tree = TokenTree((-1, 0, 0))
    raw = [random_request(rng, tree, 9, seed=seed) for seed in range(40)]
    divided = []
    for request, temperature in zip(raw, [0.3, 1.0, 1.7, 0.5] * 10, strict=True):
        request.target_temperature = temperature
        logits = request.logits / np.float32(temperature)
        divided.append(replace(request, logits=logits, target_temperature=1.0))
    raw[2].mode, raw[2].target_tokens = SEEDED, [3] * len(raw[2].tokens)
    raw[2].target_temperature = 0.0  # not used
    divided[2] = replace(divided[2], mode=SEEDED, target_tokens=raw[2].target_tokens)
    assert run(tree, raw, dtype=torch.bfloat16) == run(tree, divided)
    sampled = [request for request in raw if request.mode == SAMPLED][:12]
    lengths = check_walks(tree, sampled, lanes, dtype=torch.bfloat16)
    assert lengths.count(0) >= 3


@pytest.mark.parametrize(
    ("method", "dtype"), chessboard(["sequoia", "traversal"], [torch.bfloat16, torch.float16])
)
def test_reads_sixteen_bits(lanes, dtype, method):
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 10)
    requests = [random_request(rng, tree, 21, seed=seed) for seed in range(8)]
    for request, temperature in zip(requests, [0.3, 1.0, 1.7, 0.5] * 2, strict=True):
        request.target_temperature = temperature
    check_walks(tree, requests, lanes, method, dtype=dtype)


@of_each_method
def test_a_tree_may_be_cut_short(lanes, method):
    """Nodes past the request's last do not exist, though its neighbours have them."""
    rng = np.random.default_rng(4)
    tree = TokenTree((-1, 0, 1, 0, 1, 0, 2, 2))
    requests = [
        random_request(rng, tree, 6, size=size, seed=10 * size + i)
        for i in range(2)
        for size in range(1, tree.size + 1)
    ]
    check_walks(tree, requests, lanes, method, token_dtype=torch.int64)
    alone = random_request(rng, tree, 6, size=1)
    alone.draft_logits = None
    assert [path for path, _ in run(tree, [alone, alone], method=method)] == [[], []]


@pytest.mark.parametrize("mode", [SAMPLED, GREEDY])
def test_each_request_has_a_tree_of_its_own(lanes, few, mode):
    rng = np.random.default_rng(14)
    trees = [random_tree(rng, 9) for _ in range(12)]
    requests = [random_request(rng, tree, 6, seed=seed) for seed, tree in enumerate(trees)]
    for request in requests:
        request.mode, request.target_tokens = mode, rng.choice(6, 9).tolist()
    found = run(trees, requests)
    alone = [run(tree, [request])[0] for tree, request in zip(trees, requests, strict=True)]
    assert found == alone
    if mode == GREEDY:
        assert found == [expected_match(*pair) for pair in zip(trees, requests, strict=True)]
    else:
        pairs = zip(trees, requests, strict=True)
        compared = [check_walks(tree, [one], lanes, most_at_edge=1) for tree, one in pairs]
        assert compared.count([]) <= 2


def test_own_trees_have_no_order_of_one_tree(lanes):
    rng = np.random.default_rng(15)
    trees = [random_tree(rng, 5) for _ in range(3)]
    requests = [random_request(rng, tree, 6) for tree in trees]
    with pytest.raises(ValueError, match="by traversal needs one tree for all requests"):
        run(trees, requests, method="traversal")


@of_each_method
def test_a_placeholder_ends_its_nodes_children(lanes, method):
    rng = np.random.default_rng(5)
    tree = TokenTree((-1, 0, 0, 0, 1, 1, 2))
    requests = [random_request(rng, tree, 5, seed=seed) for seed in range(15)]
    for i, request in enumerate(requests):
        request.tokens[1 + i % 5] = -1
    check_walks(tree, requests, lanes, method)


def test_rejected_tokens_are_known_in_every_bit_of_a_lane(lanes):
    """Q has one token, in the last of a lane's 64 places; and P has it not."""
    vocabulary = 64 * lanes
    tree = TokenTree((-1, 0, 0))
    requests = []
    for first in (vocabulary - 1, 33 * lanes + 2, 1):
        logits = np.zeros((3, vocabulary), np.float32)
        logits[0, first] = -INF
        draft_logits = np.full((1, vocabulary), -INF, np.float32)
        draft_logits[0, first] = 0.0
        # Q exhausted, D is uniform as P is: whatever the second child, it is accepted.
        requests.append(Request([0, first, 5], logits, draft_logits, seed=first))
    verify_results = run(tree, requests)
    assert [(path, emitted[0]) for path, emitted in verify_results] == [([2], 5)] * 3


@pytest.mark.parametrize("lanes", [4, 16], indirect=True)
def test_accepts_the_draft_that_is_the_target(lanes, monkeypatch):
    monkeypatch.setattr(target_statistics, "pays_off", lambda rows, device: lanes == 4)
    rng = np.random.default_rng(6)
    tree = TokenTree((-1, 0, 1, 2))
    requests = []
    for seed in range(10):
        request = random_request(rng, tree, 50, draft=sparse, seed=seed)
        request.temperature = request.target_temperature = 0.5
        request.logits[:3] = request.draft_logits
        for node in range(3):
            probabilities = softmax(request.logits[node] / 0.5)
            request.tokens[node + 1] = int(rng.choice(50, p=probabilities))
        requests.append(request)
    assert [path for path, _ in run(tree, requests)] == [[1, 2, 3]] * len(requests)


# -- Algorithm 2: what only rounding or bad rows bring about -------------------------


def test_accepts_where_nothing_of_the_target_would_be_left(lanes, few):
    """R and D that differ by rounding alone, made visible: a Q that sums to 2.

    Then R - D is 0 everywhere, which says that the acceptance probability was 1.
    """
    tree = TokenTree((-1, 0))
    rng = np.random.default_rng(7)
    requests = []
    for seed in range(8):
        logits = np.stack([dense(rng, 7)] * 2).astype(np.float32)
        draft_logits = logits[:1]
        stats = {0: [logits.max(), np.exp(logits[0] - logits.max()).sum() / 2]}
        requests.append(Request([0, seed % 7], logits, draft_logits, seed=seed, stats=stats))
    uniforms = [kernel_uniforms(tree, request)[0][1] for request in requests]
    assert max(uniforms) > 0.5 > min(uniforms)
    assert [path for path, _ in run(tree, requests)] == [[1]] * len(requests)


def test_keeps_the_residual_where_nothing_is_left_and_the_token_is_impossible(lanes, few):
    """The case before, but the first child is a token that the target excludes."""
    tree = TokenTree((-1, 0, 0))
    draft_logits = np.array([[1.0, 0.0, 2.0, 0.5, 1.5]], np.float32)
    logits = np.repeat(draft_logits, 3, axis=0)
    logits[0, 2] = -INF
    stats = {0: [2.0, np.exp(draft_logits[0] - 2.0).sum() / 20]}
    # Q is 20 times P but for token 2: nothing is left, and 2 is impossible. R is P
    # still, and so is D without 2: whatever comes next is accepted.
    both = [Request([0, 2, 4], logits, draft_logits, seed=seed, stats=stats) for seed in range(6)]
    assert [path for path, _ in run(tree, both)] == [[2]] * len(both)
    # Without another child the last token is drawn from P.
    one = [Request([0, 2], logits[:2], draft_logits, seed=seed, stats=stats) for seed in range(24)]
    results = run(tree, one)
    assert [path for path, _ in results] == [[]] * len(one)
    assert {emitted[0] for _, emitted in results} == {0, 1, 3, 4}


@of_each_method
def test_a_row_without_any_draft_probability_counts_as_uniform(lanes, method):
    """Statistics that are NaN: the children were drawn uniformly (kernels/children_kernels.py)."""
    tree = TokenTree((-1, 0, 0))
    vocabulary = 6
    rng = np.random.default_rng(8)
    requests, uniform = [], []
    for seed in range(12):
        logits = np.stack([dense(rng, vocabulary)] * 3).astype(np.float32)
        tokens = [0, *(int(token) for token in rng.permutation(vocabulary)[:2])]
        nowhere = np.full((1, vocabulary), np.nan, np.float32)
        flat = np.zeros((1, vocabulary), np.float32)
        requests.append(Request(tokens, logits, nowhere, seed=seed))
        uniform.append(Request(tokens, logits, flat, seed=seed))
    results = run(tree, requests, method=method)
    assert results == run(tree, uniform, method=method)
    assert 0 < sum(path == [] for path, _ in results) < len(results)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ends_with_some_token_where_the_target_has_none(lanes, few):
    tree = TokenTree((-1, 0))
    requests = []
    for bad in (np.nan, -INF):
        logits = np.full((2, 9), bad, np.float32)
        requests.append(Request([0, 3], logits, np.zeros((1, 9), np.float32)))
    for _, emitted in run(tree, requests):
        assert all(0 <= token < 9 for token in emitted)


# -- the law -------------------------------------------------------------------------

LAWS = {
    # Q likes what P does not; P has a zero, Q another one.
    "apart": ([0.55, 0.05, 0.0, 0.4], [0.1, 0.7, 0.2, 0.0], [-1, 0, 0, 0]),
    "deeper": ([0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [-1, 0, 0, 1]),
}


@pytest.mark.parametrize("name", ["apart", pytest.param("deeper", marks=pytest.mark.sharded)])
def test_emits_by_the_targets_law(lanes, name, monkeypatch):
    """The first two tokens against P(first) P(second), by chi-square.

    A correct verifier fails it for one in a million choices of the seeds. One that draws the
    last token from P, or forgets to lessen R or Q, hardly ever passes with 200 samples.
    """
    few = name != "deeper"
    monkeypatch.setattr(target_statistics, "pays_off", lambda rows, device: few)
    probabilities, draft, parents = LAWS[name]
    tree, vocabulary, samples = TokenTree(tuple(parents)), len(probabilities), 200
    rng = np.random.default_rng(9)
    with np.errstate(divide="ignore"):
        shifted = [np.log(np.roll(probabilities, node)) for node in range(vocabulary + 1)]
        draft_logits = np.log(np.array([draft] * len({*parents[1:]}))) * 1.5

    def target(path):
        return shifted[path[-1] + 1 if path else 0]

    dice = SimpleNamespace(draw=lambda rest, node: int(rng.choice(vocabulary, p=rest)))
    requests = []
    for seed in range(samples):
        tokens = draft_tree(lambda path: draft, parents, dice)
        logits = np.stack([target([tokens[node]] if node else []) for node in range(tree.size)])
        requests.append(Request(tokens, logits.astype(np.float32), draft_logits.astype(np.float32)))
        requests[-1].logits *= np.float32(0.8)
        requests[-1].target_temperature = 0.8
        requests[-1].temperature, requests[-1].seed = 1.5, seed + 10**12
    counts = Counter()
    for _, emitted in run(tree, requests):
        pair = emitted[:2]
        if len(pair) == 1:
            pair.append(int(rng.choice(vocabulary, p=softmax(target(pair)))))
        counts[tuple(pair)] += 1
    pairs = list(product(range(vocabulary), repeat=2))
    law = [softmax(target([]))[one] * softmax(target([one]))[other] for one, other in pairs]
    assert counts.total() == samples
    assert_same_law([counts[pair] for pair in pairs], law, fewest=0)
    first = Counter(one for one, _ in counts.elements())
    assert_same_law([first[token] for token in range(vocabulary)], probabilities, fewest=0)


# -- the batch -----------------------------------------------------------------------


def test_statistics_are_taken_of_few_rows_with_a_sampled_request(lanes, monkeypatch):
    launches = []
    take = target_statistics.target_statistics
    monkeypatch.setattr(
        target_statistics, "target_statistics", lambda *args: [launches.append(1), take(*args)][1]
    )
    rng = np.random.default_rng(12)
    tree = TokenTree((-1, 0, 1))
    requests = [random_request(rng, tree, 9, seed=seed) for seed in range(11)]
    for count, any_sampled, expected in ((10, True, 1), (10, False, 0), (11, True, 0)):
        launches.clear()
        results = run(tree, requests[:count], any_sampled=any_sampled)
        assert (results, len(launches)) == (run(tree, requests)[:count], expected)


def test_seed_position_and_node_make_other_numbers(lanes):
    logits = np.zeros((1, 256), np.float32)
    requests = [
        Request([0], logits, seed=seed, position=position, draft_logits=None)
        for seed, position in ((1, 5), (1, 6), (2, 5), (1 + 2**40, 5))
    ]
    tokens = [emitted[0] for _, emitted in run(TokenTree((-1,)), requests)]
    assert len(set(tokens)) == 4


def test_refuses_tensors_that_do_not_fit():
    row = torch.zeros(1, 4)
    fitting = {
        name: torch.zeros(1, dtype=torch.int32)
        for name in (
            "target_temperatures", "target_tokens", "cu_num_logits", "inner_index", "num_sampled",
        )
    } | {
        "inputs": VerifierInputs.empty(1, torch.zeros(1, dtype=torch.int32)),
        "logits": row, "children": row.int(), "draft_logits": row[None],
        "draft_stats": row[None, :, :2], "sampled_tokens": torch.zeros(1, 3).long(),
        "accepted": torch.zeros(1, 2).int(),
    }  # fmt: skip
    for wrong, message in (
        ({"logits": torch.zeros(1, 5)}, "the target has 5"),
        ({"logits": torch.zeros(4, 2).T}, "side by side"),
        ({"sampled_tokens": torch.zeros(1, 2).long()}, "2 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            verify.verify_trees(TreesToVerify(**fitting | wrong))
