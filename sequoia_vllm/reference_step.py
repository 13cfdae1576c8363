"""One step of Sequoia from top to bottom, for reading beside the paper; torch only, one request.

    grow     the draft grows a token tree, level by level
    score    the target scores all nodes in one pass, with a tree mask
    verify   Algorithm 2 accepts one path, and draws the bonus token behind it
    commit   keys and values of that path stay in the target's cache

The engine does the same for batches, in place, on vLLM's paged cache. Tests compare both.
``python -m sequoia_vllm.reference_step`` shows it with toy models.
Letters are the paper's: P is the target's distribution, Q the draft's, R what is left of P after
rejections, D what is left of Q.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Cache = list[Tensor]
"""Keys and values of a model, one tensor ``[..., S, head_size]`` each; S tokens are cached."""

Model = Callable[[Tensor, Tensor, Tensor, Cache], tuple[Tensor, Cache]]
"""A causal model: (tokens, positions, sees, cache) -> (logits, cache with these tokens behind).

``tokens`` and ``positions`` are int64 ``[T]``. ``sees`` is bool ``[T, S + T]``: which cached tokens
and which of these each token attends to. ``logits`` are float ``[T, V]``.
"""


@dataclass
class GrownTree:
    """A grown tree of N nodes; node 0 is the root, the last committed token."""

    parents: Sequence[int]  # parent of each node, lower than the node's own index; -1 for the root
    tokens: Tensor  # int64 ``[N]``
    q: dict[int, Tensor] = field(default_factory=dict)
    """By node with children, float ``[V]``: the distribution that its children were drawn from."""

    def children(self, node: int) -> list[int]:
        """Children of a node in draft order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one, both included."""
        return [node] if node == 0 else [*self.path(self.parents[node]), node]


@dataclass
class Request:
    """A request between two steps."""

    tokens: list[int]  # its committed tokens, the prompt first
    target_cache: Cache  # of all its tokens but the last, which is the next tree's root
    draft_cache: Cache  # of a beginning of its tokens; the draft reads the others when it grows


def cached(cache: Cache) -> int:
    """Tokens in a cache."""
    return cache[0].shape[-2] if cache else 0


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Next-token distribution of logits ``[..., V]``; one-hot at temperature 0."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits.double() / temperature).softmax(-1)


def read(model: Model, tokens: Sequence[int], cache: Cache) -> tuple[Tensor, Cache]:
    """Reads the tokens that are not cached yet, as a chain; returns logits ``[unread, V]``."""
    first, end = cached(cache), len(tokens)
    positions = torch.arange(first, end)
    sees = torch.arange(end) <= positions[:, None]
    return model(torch.tensor(tokens[first:]), positions, sees, cache)


def grow(
    draft: Model, request: Request, parents: Sequence[int], temperature: float, rng: torch.Generator
) -> GrownTree:
    """Grows a tree (section 3.2): children of a node are drawn from Q without replacement.

    Only nodes with children need a pass of the draft, one pass for each level.
    """
    tree = GrownTree(parents, torch.zeros(len(parents), dtype=torch.int64))
    tree.tokens[0] = request.tokens[-1]
    logits, cache = read(draft, request.tokens, request.draft_cache)
    request.draft_cache = cache  # of all committed tokens; that of nodes is thrown away
    level, logits = [0], logits[-1:]
    slots = {0: len(request.tokens) - 1}
    while level:
        for node, row in zip(level, logits, strict=True):
            tree.q[node] = distribution(row, temperature)
            children = tree.children(node)
            tree.tokens[children] = draw(row, len(children), temperature, rng)
        inner = [child for node in level for child in tree.children(node) if tree.children(child)]
        if inner:
            first = cached(cache)
            slots.update({node: first + place for place, node in enumerate(inner)})
            sees = torch.zeros(len(inner), first + len(inner), dtype=torch.bool)
            sees[:, : len(request.tokens)] = True
            for place, node in enumerate(inner):
                sees[place, [slots[ancestor] for ancestor in tree.path(node)]] = True
            depth = len(tree.path(inner[0])) - 1
            positions = torch.full((len(inner),), len(request.tokens) - 1 + depth)
            logits, cache = draft(tree.tokens[inner], positions, sees, cache)
        level = inner
    return tree


def draw(logits: Tensor, count: int, temperature: float, rng: torch.Generator) -> Tensor:
    """Tokens int64 ``[count]``, drawn without replacement; the best ones at temperature 0."""
    if temperature > 0:  # ordered Gumbel top k
        noise = torch.empty(logits.shape, dtype=torch.float64).exponential_(generator=rng)
        logits = logits.double() / temperature - noise.log()
    return logits.topk(count).indices


def score(target: Model, request: Request, tree: GrownTree) -> tuple[Tensor, Cache]:
    """Logits ``[N, V]`` of all nodes in one pass: each sees the context and its ancestors.

    A node's position is its depth behind the root's. Its cache slot is its index behind the root's.
    """
    context, size = cached(request.target_cache), len(tree.parents)
    sees = torch.zeros(size, context + size, dtype=torch.bool)
    sees[:, :context] = True
    for node in range(size):
        sees[node, [context + ancestor for ancestor in tree.path(node)]] = True
    positions = torch.tensor([context + len(tree.path(node)) - 1 for node in range(size)])
    return target(tree.tokens, positions, sees, request.target_cache)


def verify(
    tree: GrownTree, logits: Tensor, temperature: float, rng: torch.Generator
) -> tuple[list[int], int]:
    """Algorithm 2: the accepted nodes below the root, and the bonus token behind them."""
    accepted, node = [], 0
    while True:
        r = distribution(logits[node], temperature)
        d = tree.q.get(node, r).clone()
        rejected = torch.zeros(len(r), dtype=torch.bool)
        for child in tree.children(node):
            token = int(tree.tokens[child])
            u = torch.rand((), dtype=torch.float64, generator=rng)
            left = (r - d).clamp(min=0)
            # Without a residual the acceptance probability was 1, but for rounding.
            if u * d[token] < r[token] or left.sum() == 0:
                accepted.append(child)
                break
            r = left / left.sum()
            rejected[token] = True
            d[token] = 0
            if d.sum() == 0:  # Q is exhausted: later children were drawn evenly from the rest
                d = (~rejected).double()
            d = d / d.sum()
        else:
            return accepted, int(torch.multinomial(r, 1, generator=rng))
        node = accepted[-1]


def commit(
    request: Request, cache: Cache, tree: GrownTree, accepted: list[int], bonus: int
) -> None:
    """Keeps keys and values of the root and the accepted path, in order, and the tokens."""
    context = cached(request.target_cache)
    kept = [*range(context), context, *(context + node for node in accepted)]
    request.target_cache = [tensor[..., kept, :] for tensor in cache]
    request.tokens += [*tree.tokens[accepted].tolist(), bonus]


def step(
    target: Model,
    draft: Model,
    request: Request,
    parents: Sequence[int],
    temperature: float,
    rng: torch.Generator,
) -> int:
    """Grows, scores, verifies and commits one tree.

    Args:
        target, draft: Models of one vocabulary.
        parents: Shape of the tree, see `GrownTree`.
        temperature: 0 is greedy.
        rng: Draws children, and decides what is accepted.

    Returns:
        Accepted nodes; the request has one token more than that.
    """
    tree = grow(draft, request, parents, temperature, rng)
    logits, cache = score(target, request, tree)
    accepted, bonus = verify(tree, logits, temperature, rng)
    commit(request, cache, tree, accepted, bonus)
    return len(accepted)


def begin(
    target: Model, prompt: Sequence[int], temperature: float, rng: torch.Generator
) -> Request:
    """Reads a prompt with the target, and draws the first token as plain decoding does."""
    logits, cache = read(target, prompt, [])
    first = torch.multinomial(distribution(logits[-1], temperature), 1, generator=rng)
    return Request([*prompt, int(first)], cache, [])


_WORDS = ("the", "cat", "dog", "sat", "ran", "on", "a", "mat", "and")


def show(steps: int = 3, temperature: float = 0.7, seed: int = 1) -> None:
    """Prints trees of two toy models, and the walk through each: ``*`` marks accepted nodes."""
    rng = torch.Generator().manual_seed(seed)
    weights = 2 * torch.randn(len(_WORDS), len(_WORDS), generator=rng)
    target = _bigram(weights)
    draft = _bigram(weights + torch.randn(weights.shape, generator=rng))
    request = begin(target, [0], temperature, rng)
    for _ in range(steps):
        print("committed:", *(_WORDS[token] for token in request.tokens))
        tree = grow(draft, request, (-1, 0, 0, 1, 1, 2, 3), temperature, rng)
        logits, cache = score(target, request, tree)
        accepted, bonus = verify(tree, logits, temperature, rng)
        for node in sorted(range(len(tree.tokens)), key=tree.path):
            mark = "*" if node in [0, *accepted] else " "
            print(mark, "    " * (len(tree.path(node)) - 1) + _WORDS[tree.tokens[node]])
        commit(request, cache, tree, accepted, bonus)
        print(f"accepted: {len(accepted)}, and the target adds: {_WORDS[bonus]}\n")


def _bigram(weights: Tensor) -> Model:
    """A model whose next token depends on the last one alone; logits ``[V, V]``."""
    return lambda tokens, positions, _, cache: (
        weights[tokens],
        [torch.cat([*cache, positions[:, None].double()], dim=-2)],
    )


if __name__ == "__main__":
    show()
