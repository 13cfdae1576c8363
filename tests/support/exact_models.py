"""Pairs of models whose laws are fractions, different after every path; and small trees."""

import random
from fractions import Fraction
from functools import cache

import torch

from sequoia_vllm.verification.topology import Topology
from tests.oracles.verification import normalized

# Models have integer weights for each path.


def dense(rng, vocabulary):
    return [rng.randint(1, 9) for _ in range(vocabulary)]


def sparse(rng, vocabulary):
    weights = [rng.choice([0, 0, rng.randint(1, 9)]) for _ in range(vocabulary)]
    weights[rng.randrange(vocabulary)] = 5
    return weights


def one_hot(rng, vocabulary):
    hot = rng.randrange(vocabulary)
    return [int(token == hot) for token in range(vocabulary)]


def top_p(rng, vocabulary):
    """The most likely tokens that together hold 60 %."""
    weights = dense(rng, vocabulary)
    kept, order = [0] * vocabulary, sorted(range(vocabulary), key=lambda t: -weights[t])
    for token in order:
        kept[token] = weights[token]
        if 10 * sum(kept) >= 6 * sum(weights):
            break
    return kept


def disjoint(rng, vocabulary):
    half = vocabulary // 2
    target, draft = dense(rng, vocabulary), dense(rng, vocabulary)
    return [0] * half + target[half:], draft[:half] + [0] * (vocabulary - half)


def same(rng, vocabulary):
    weights = sparse(rng, vocabulary)
    return weights, weights


def told(rng, vocabulary):
    """One token first: what a text says comes next."""
    weights = dense(rng, vocabulary)
    weights[rng.randrange(vocabulary)] = 9 * sum(weights)
    return weights


def pair(target, draft):
    return lambda rng, vocabulary: (target(rng, vocabulary), draft(rng, vocabulary))


KINDS = {
    "dense": pair(dense, dense), "zeros in Q": pair(dense, sparse),
    "zeros in both": pair(sparse, sparse), "one-hot Q": pair(dense, one_hot),
    "told Q": pair(sparse, told),
    "one-hot P": pair(one_hot, dense), "top-p P": pair(top_p, dense), "Q = P": same,
    "disjoint": disjoint,
}  # fmt: skip

TREES = {
    "single": [-1],
    "chain": [-1, 0, 1, 2],
    "star": [-1, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1, 2],
    "scattered siblings": [-1, 0, 1, 0, 1, 0],
}


def models(kind, vocabulary):
    """P and Q as functions of the path, exact."""

    @cache
    def at(path):
        target, draft = KINDS[kind](random.Random(f"{kind} 0 {path}"), vocabulary)
        return tuple(normalized([Fraction(w) for w in weights]) for weights in (target, draft))

    return lambda path: at(path)[0], lambda path: at(path)[1]


def depth_of(parents):
    return Topology.from_parents(torch.tensor([parents])).max_depth
