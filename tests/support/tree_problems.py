"""Small trees with exact distributions, and all that can become of them."""

import math
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from sequoia_vllm.verification import traversal, walk
from sequoia_vllm.verification.methods import DEFAULT_METHOD, method_of
from sequoia_vllm.verification.sampling import draft_distribution, draw_without_replacement
from tests.oracles.laws import Script
from tests.oracles.verification import (
    Uniforms,
    acceptance_probability,
    algorithm_2,
    children_of,
    normalized,
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


@contextmanager
def with_uniforms(uniforms):
    """Makes verifiers use these numbers: column i for node i, column 0 for the last token."""
    with ExitStack() as stack:
        for module in (walk, traversal):
            given = patch.object(module, "node_uniforms", lambda tokens, generator: uniforms)
            stack.enter_context(given)
        yield


def verify_tree(target, draft, tokens, parents, generator=None, method=DEFAULT_METHOD):
    """Verifies trees whose P and Q, ``[B, N+1, V]``, are computed for every node already."""
    return method_of(method).host_function()(
        lambda requests, nodes: target[requests, nodes],
        lambda requests, nodes: draft[requests, nodes],
        tokens, parents, generator,
    )  # fmt: skip


def rows_at(logits, temperature):
    """Q of rows ``[R, V]`` at one temperature, or at one for each row."""
    each = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    return draft_distribution(logits, each.expand(len(logits)))


def drawn_from(logits, k, temperature=1.0, generator=None):
    """Children of a node in draft order, ``[R, k]``, by its draft logits."""
    return draw_without_replacement(rows_at(logits, temperature), k, generator)


def as_lists(result):
    """Per request: accepted nodes and emitted tokens, after checking the padding."""
    paths = []
    columns = result.accepted_nodes, result.output_tokens, result.num_accepted
    for accepted, emitted, count in zip(*(each.tolist() for each in columns), strict=True):
        assert accepted[count:] == [-1] * (len(accepted) - count)
        assert emitted[count + 1 :] == [-1] * (len(emitted) - count - 1)
        paths.append((accepted[:count], emitted[: count + 1]))
    return paths


@dataclass
class Problem:
    parents: list
    tokens: list
    target: list  # [nodes][vocabulary], exact
    draft: list

    def tensors(self, batch=1, dtype=torch.float32):
        def rows(values):
            return torch.tensor([[float(p) for p in row] for row in values], dtype=dtype)

        return (
            rows(self.target).expand(batch, -1, -1),
            rows(self.draft).expand(batch, -1, -1),
            torch.tensor(self.tokens).expand(batch, -1),
            torch.tensor(self.parents).expand(batch, -1),
        )

    def reference(self, chance, rule=algorithm_2):
        return rule(
            self.target.__getitem__, self.draft.__getitem__, self.tokens, children_of(self.parents),
            chance,
        )  # fmt: skip


def random_problem(rng):
    """Any tree, any distributions (zeros, equal, one-hot), any distinct siblings."""
    vocabulary = rng.randint(2, 6)
    parents = [-1]
    for node in range(1, rng.randint(1, 8)):
        room = [p for p in range(node) if parents.count(p) < vocabulary]
        parents.append(rng.choice(room))

    def distribution():
        top = rng.choice([1, 3, 9])
        weights = [rng.randint(0, top) for _ in range(vocabulary)]
        weights[rng.randrange(vocabulary)] += 1
        return normalized([Fraction(w) for w in weights])

    def one_hot():
        hot = rng.randrange(vocabulary)
        return [Fraction(int(token == hot)) for token in range(vocabulary)]

    target = [distribution() for _ in parents]
    draft = [rng.choice([distribution, distribution, one_hot, row.copy])() for row in target]
    tokens = [0] * len(parents)
    for node, children in enumerate(children_of(parents)):
        order = rng.sample(range(vocabulary), vocabulary)
        if rng.random() < 0.7:  # as drafting does: what Q cannot draw comes last, and exhausts it
            order.sort(key=lambda token, q=draft[node]: q[token] == 0)
        for child, token in zip(children, order, strict=False):
            tokens[child] = token
    return Problem(parents, tokens, target, draft)


problems = st.integers(0, 2**32).map(lambda seed: random_problem(random.Random(seed)))

MARGIN = 1e-9


@dataclass
class Edges(Script):
    """Takes each decision once from just below its threshold and once from just above.

    Notes the uniform number that must lead the fast verifier to each.
    """

    uniforms: dict = field(default_factory=dict)

    def take(self, options, node):
        outcome, self.uniforms[node] = options[self.choose([1] * len(options))]
        return outcome

    def accepts(self, target, draft, node):
        p = float(acceptance_probability(target, draft))
        options = []
        if p > MARGIN:
            options.append((True, p - MARGIN))
        if p < 1 - MARGIN:
            options.append((False, p + MARGIN))
        return self.take(options, node)

    def draw(self, distribution, node):
        options, below = [], 0.0
        for token, p in enumerate(distribution):
            if p > 0:
                options.append((token, below + MARGIN))
                options.append((token, below + float(p) - MARGIN))
            below += float(p)
        return self.take(options, 0)


class FarFromEdges(Uniforms):
    """Notes whether a number fell so near its threshold that float32 may differ."""

    near = False

    def accepts(self, target, draft, node):
        probability = float(acceptance_probability(target, draft))
        self.near |= abs(self.values[node] - probability) < 1e-3
        return super().accepts(target, draft, node)

    def draw(self, distribution, node):
        token = super().draw(distribution, node)
        below = float(sum(distribution[:token]))
        above = below + float(distribution[token])
        self.near |= min(self.values[0] - below, above - self.values[0]) < 1e-3
        return token


def batch_of(problems_, width):
    """The problems as one batch, and what must not be read filled with NaN."""
    vocabulary = max(len(p.target[0]) for p in problems_)
    shape = (len(problems_), width, vocabulary)
    target, draft = torch.full(shape, math.nan), torch.full(shape, math.nan)
    tokens = torch.ones(shape[:2], dtype=torch.int64)  # padding may have any
    parents = torch.full(shape[:2], -2)
    for i, problem in enumerate(problems_):
        one_target, one_draft, one_tokens, one_parents = problem.tensors()
        size, own = len(problem.parents), len(problem.target[0])
        target[i, :size] = 0.0
        target[i, :size, :own] = one_target[0]
        inner = sorted(set(problem.parents) - {-1})
        draft[i, inner] = 0.0
        draft[i, inner, :own] = one_draft[0, inner]
        tokens[i, :size], parents[i, :size] = one_tokens[0], one_parents[0]
    return target, draft, tokens, parents
