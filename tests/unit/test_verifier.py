"""The fast verifier decides as the reference does; batches, padding, rounding."""

import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sequoia_vllm.verification.methods import method_of
from sequoia_vllm.verification.topology import Topology
from sequoia_vllm.verification.walk import match_nodes, match_tree, walk_tree
from tests.oracles.verification import algorithm_2, children_of, match, traversal
from tests.support.tree_problems import (
    Edges,
    FarFromEdges,
    as_lists,
    batch_of,
    drawn_from,
    generator,
    problems,
    random_problem,
    rows_at,
    verify_tree,
    with_uniforms,
)

RULES = {"sequoia": algorithm_2, "traversal": traversal}
both_methods = pytest.mark.parametrize("method", RULES)


# A path that is certain, though rejections went before: rounding must not make it less.
CERTAIN = random_problem(random.Random(18644))


@both_methods
@settings(deadline=None, max_examples=400)
@given(problem=problems)
@example(problem=CERTAIN)
def test_every_decision_has_the_probability_of_the_reference(method, problem):
    """In float64, all outcomes: each threshold agrees with the exact one to 1e-9."""
    expected, uniforms, scripts = [], [], [[]]
    while scripts:
        edges = Edges(scripts.pop())
        expected.append(problem.reference(edges, RULES[method]))
        scripts += edges.alternatives
        uniforms.append([edges.uniforms.get(n, math.nan) for n in range(len(problem.parents))])
    with with_uniforms(torch.tensor(uniforms, dtype=torch.float64)):
        result = verify_tree(*problem.tensors(len(uniforms), torch.float64), method=method)
    assert as_lists(result) == expected


@both_methods
def test_a_request_uses_one_float64_uniform_per_node_in_node_order(method):
    """The documented stream: with it the reference repeats a float32 run."""
    compared = 0
    for seed in range(300):
        problem = random_problem(random.Random(seed))
        own = generator(seed)
        result = verify_tree(*problem.tensors(), own, method)
        stream = generator(seed)
        size = len(problem.parents)
        chance = FarFromEdges(torch.rand(size, dtype=torch.float64, generator=stream).tolist())
        expected = problem.reference(chance, RULES[method])
        assert torch.equal(own.get_state(), stream.get_state())
        if not chance.near:
            compared += 1
            assert as_lists(result) == [expected]
    assert compared > 250


@both_methods
@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_what_is_emitted_is_always_possible_under_the_target(method, seed):
    """With probabilities from 1 down to float32's smallest, in P, Q, or both."""
    rng = random.Random(seed)
    vocabulary, batch = rng.randint(2, 6), 64
    parents = random_problem(rng).parents
    scale = rng.choice([1.0, 10.0, 40.0, 100.0])
    shape = (len(parents), vocabulary)
    noise = generator(seed % 2**31)
    target_logits = torch.randn(shape, generator=noise) * scale
    target_logits[torch.rand(shape, generator=noise) < 0.3] = -torch.inf
    target_logits[:, 0] = target_logits[:, 0].clamp(min=-1.0)
    target = target_logits.softmax(dim=1)
    if rng.random() < 0.5:  # Q is P up to rounding: residuals of rounding size
        draft = (target * (1 + 1e-7 * torch.randn(shape, generator=noise))).clamp(min=0)
    else:
        draft = (torch.randn(shape, generator=noise) * scale).softmax(dim=1)
    tokens = torch.zeros(batch, len(parents), dtype=torch.int64)
    for node, every_child in enumerate(children_of(parents)):
        children = every_child[:vocabulary]
        logits = draft[node].log().expand(batch, -1)
        tokens[:, children] = drawn_from(logits, len(children), 1.0, noise)
    result = verify_tree(
        target.expand(batch, -1, -1), draft.expand(batch, -1, -1), tokens,
        torch.tensor(parents).expand(batch, -1), noise, method,
    )  # fmt: skip
    for accepted, emitted in as_lists(result):
        for node, token in zip([0, *accepted], emitted, strict=True):
            assert 0 <= token < vocabulary
            assert target[node, token] > 0


def star(target, draft, tokens, uniforms):
    """A root with children ``tokens``, the same distributions at every node."""
    size = 1 + len(tokens)
    with with_uniforms(torch.tensor([uniforms], dtype=torch.float64)):
        result = verify_tree(
            torch.tensor(target).expand(1, size, -1),
            torch.tensor(draft).expand(1, size, -1),
            torch.tensor([[0, *tokens]]),
            torch.tensor([[-1] + [0] * len(tokens)]),
        )
    return as_lists(result)[0]


# P is below Q everywhere, as rounding can make it: u falls between P/Q and 1.
BELOW = [0.4999999, 0.4999999, 0.0], [0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("target", "draft", "tokens", "uniforms", "expected"),
    [
        # A residual that is lost to rounding means: accept.
        (*BELOW, [1], [0.1, 1 - 1e-12], ([1], [1, 0])),
        (*BELOW, [1, 0], [0.1, 1 - 1e-12, 0.0], ([1], [1, 0])),
        # And never emits an impossible token: its true Q is too small to show in Q[0] = 1.
        ([1.0, 0.0], [1.0, 1e-9], [1], [0.9999, 0.0], ([], [0])),
        # A uniform of zero rejects an impossible token.
        ([0.0, 1.0], [0.5, 0.5], [0], [0.0, 0.0], ([], [1])),
        ([0.0, 1.0], [0.0, 1.0], [0], [0.0, 0.0], ([], [1])),
    ],
)
def test_rounding(target, draft, tokens, uniforms, expected):
    assert star(target, draft, tokens, uniforms) == expected


@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.7, 1e-30])
def test_equal_distributions_accept_for_every_uniform_below_one(p):
    assert star([p, 1 - p], [p, 1 - p], [0], [0.0, 1 - 2.0**-53])[0] == [1]


def test_the_last_token_is_drawn_finely_enough_for_a_large_vocabulary():
    rare = 1e-9  # in float32 the running sum near 1 moves in steps of 6e-8
    row = torch.full((100_001,), rare)
    row[0] = 1 - 1e-4
    first = float(row[0].double() / row.double().sum())
    wanted = torch.tensor([1, 77, 50_000, 100_000])
    uniforms = first + (wanted.double() - 0.5) * (1 - first) / 100_000
    rows, root = row.expand(4, 1, -1), torch.full((4, 1), -1)
    with with_uniforms(uniforms[:, None]):
        result = verify_tree(rows, rows, torch.zeros(4, 1, dtype=torch.int64), root)
    assert torch.equal(result.output_tokens[:, 0], wanted)


@pytest.mark.parametrize("method", RULES)
def test_a_token_after_which_the_target_is_nan_is_accepted_as_often_as_any(method):
    """Half of the time here. Its child never is, and token 0 follows, as in vLLM's sampler."""
    target = torch.tensor([[0.7, 0.3, 0.0], [math.nan] * 3, [0.2, 0.3, 0.5]])
    draft, count = torch.tensor([[0.4, 0.6, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]), 4000
    found = method_of(method).host_function()(
        lambda requests, nodes: target[nodes],
        lambda requests, nodes: draft[nodes],
        torch.tensor([[0, 1, 2]]).expand(count, -1).contiguous(),
        torch.tensor([[-1, 0, 1]]).expand(count, -1).contiguous(),
        torch.Generator().manual_seed(0),
    )
    assert (found.accepted_nodes[:, 1] == -1).all()
    is_accepted = found.num_accepted == 1
    assert abs(is_accepted.float().mean() - 0.5) < 5 * 0.5 / count**0.5
    assert (found.output_tokens[is_accepted] == torch.tensor([1, 0, -1])).all()
    assert (found.output_tokens[~is_accepted] == torch.tensor([0, -1, -1])).all()


def problems_of(count):
    """The first random problems, as one batch."""
    return batch_of([random_problem(random.Random(seed)) for seed in range(count)], 9)


@both_methods
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), extra=st.integers(0, 3))
def test_a_batch_is_its_requests_one_by_one(method, seed, extra):
    """Each padded as a tree is that was trimmed."""
    rng = random.Random(seed)
    mixed = [random_problem(rng) for _ in range(rng.randint(1, 6))]
    mixed += rng.choices(mixed, k=2)  # some trees are alike
    width = max(len(p.parents) for p in mixed) + extra
    target, draft, tokens, parents = batch_of(mixed, width)
    uniforms = torch.rand(tokens.shape, dtype=torch.float64, generator=generator(seed % 2**31))
    with with_uniforms(uniforms):
        together = verify_tree(target, draft, tokens, parents, None, method)
    max_depth = Topology.from_parents(parents).max_depth
    assert together.accepted_nodes.shape == (len(mixed), max_depth)
    assert together.output_tokens.shape == (len(mixed), max_depth + 1)
    for i, (problem, path) in enumerate(zip(mixed, as_lists(together), strict=True)):
        one = slice(i, i + 1), slice(len(problem.parents))
        with with_uniforms(uniforms[one]):
            alone = verify_tree(target[one], draft[one], tokens[one], parents[one], None, method)
        assert as_lists(alone) == [path]


def test_inputs_are_left_alone_and_a_topology_stands_for_parents():
    inputs = problems_of(8)
    before = [values.clone() for values in inputs]
    result = verify_tree(*inputs, generator(0))
    for values, original in zip(inputs, before, strict=True):
        assert torch.equal(values.nan_to_num(-7), original.nan_to_num(-7))
    topology = Topology.from_parents(inputs[3])
    assert as_lists(verify_tree(*inputs[:3], topology, generator(0))) == as_lists(result)


def test_nothing_depends_on_torchs_defaults_but_the_generator():
    inputs, logits = problems_of(64), torch.randn(4, 9)
    expected = as_lists(verify_tree(*inputs, generator(0)))
    torch.manual_seed(0)
    assert as_lists(verify_tree(*inputs)) == expected
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert as_lists(verify_tree(*inputs, generator(0))) == expected
        assert rows_at(torch.zeros(1, 3), 1.0).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):  # a tensor made there could not be used with the others
        result = verify_tree(*inputs, generator(0))
        match_tree(lambda r, n, depth: r, *inputs[2:])
        drawn_from(logits, 3, torch.full((4,), 0.5, device="cpu"), generator(0))
    assert as_lists(result) == expected


def test_distributions_are_asked_for_once_per_depth_and_only_where_needed():
    #   request 0:  0 ─ 1 ─ 2        request 1:  0 ─┬─ 1      request 2:  0
    #                                               └─ 2
    parents = torch.tensor([[-1, 0, 1], [-1, 0, 0], [-1, -2, -2]])
    tokens = torch.tensor([[0, 1, 2], [0, 3, 4], [0, 0, 0]])
    target = torch.tensor([[1, 2, 0], [4, 0, 0], [2, 0, 0]])  # the certain token at each node
    calls = []

    def recorded(name, distributions):
        def at(requests, nodes):
            calls.append((name, requests.tolist(), nodes.tolist()))
            return distributions[requests, nodes]

        return at

    one_hot = torch.nn.functional.one_hot(target, 5).float()
    uniform = torch.full((3, 3, 5), 0.2)
    result = walk_tree(recorded("P", one_hot), recorded("Q", uniform), tokens, parents)
    assert as_lists(result) == [([1, 2], [1, 2, 0]), ([2], [4, 0]), ([], [2])]
    assert calls == [
        ("P", [0, 1, 2], [0, 0, 0]),
        ("Q", [0, 1], [0, 0]),
        ("P", [0, 1], [1, 2]),
        ("Q", [0], [1]),
        ("P", [0], [2]),
    ]


def test_no_requests_and_mismatched_ones():
    empty = torch.empty(0, 3, dtype=torch.int64)
    result = verify_tree(torch.empty(0, 3, 4), torch.empty(0, 3, 4), empty, empty)
    assert (result.accepted_nodes.shape, result.output_tokens.shape) == ((0, 0), (0, 1))
    assert match_tree(lambda r, n, d: r, empty, empty).num_accepted.shape == (0,)
    assert match_nodes(empty, empty, empty).num_accepted.shape == (0,)
    probabilities = torch.full((2, 2, 3), 1 / 3)
    tokens, parents = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[-1, 0]] * 2)
    with pytest.raises(ValueError, match=r"tokens are \[2, 2\] but parents \[1, 2\]"):
        verify_tree(probabilities, probabilities, tokens, parents[:1])
    with pytest.raises(ValueError, match="request 0: node 1 has parent 1"):
        verify_tree(probabilities, probabilities, tokens, torch.tensor([[-1, 1]] * 2))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_match_tree_follows_the_target_as_the_reference_does(seed):
    rng = random.Random(seed)
    mixed = [random_problem(rng) for _ in range(rng.randint(1, 5))]
    for problem in mixed:  # also twins, though drafts never make them
        problem.tokens = [rng.choice([t, 0]) for t in problem.tokens]
    _, _, tokens, parents = batch_of(mixed, 9)
    target = torch.randint(0, 4, (len(mixed), 9, 9), generator=generator(seed % 2**31))

    result = match_tree(
        lambda r, n, depth: target[r, n, torch.full_like(r, depth)], tokens, parents
    )

    assert as_lists(result) == [
        match(
            lambda n, depth, i=i: int(target[i, n, depth]),
            problem.tokens,
            children_of(problem.parents),
        )
        for i, problem in enumerate(mixed)
    ]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_with_a_one_hot_target_any_draft_gives_the_greedy_path(seed):
    """So the order in which greedy drafting ranks its children is free."""
    rng = random.Random(seed)
    mixed = [random_problem(rng) for _ in range(4)]
    _, draft, tokens, parents = batch_of(mixed, 9)
    vocabulary = draft.shape[2]
    if rng.random() < 0.5:  # the one-hot Q of greedy drafting
        draft = torch.nn.functional.one_hot(draft.nan_to_num(0).argmax(2), vocabulary).float()
    best = torch.randint(0, vocabulary, tokens.shape, generator=generator(seed % 2**31))
    target = torch.nn.functional.one_hot(best, vocabulary).float()
    verified = verify_tree(target, draft, tokens, parents)
    matched = match_tree(lambda r, n, depth: best[r, n], tokens, parents)
    assert as_lists(verified) == as_lists(matched)
    assert as_lists(match_nodes(best, tokens, parents)) == as_lists(matched)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_decides_as_the_cpu_does():
    inputs = problems_of(200)
    on_gpu = [values.cuda() for values in inputs]
    uniforms = torch.rand(inputs[2].shape, dtype=torch.float64, generator=generator(0))
    with with_uniforms(uniforms):
        expected = as_lists(verify_tree(*inputs))
    with with_uniforms(uniforms.cuda()):
        result = as_lists(verify_tree(*on_gpu))
    assert sum(a != b for a, b in zip(expected, result, strict=True)) <= 1  # rounding at an edge
    logits = torch.randn(5, 1000, device="cuda")
    tokens = drawn_from(logits, 20, 0.7, torch.Generator("cuda"))
    assert all(len(set(row)) == 20 for row in tokens.tolist())
