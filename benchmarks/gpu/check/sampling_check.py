"""Drawing, verification and commit against their references."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.check.stage import KernelRun
from benchmarks.gpu.check.tree_batch import TreeBatch, best_tree
from sequoia_vllm.drafting.dynamic_levels import DynamicTrees, SlotTables
from sequoia_vllm.drafting.dynamic_trees import DynamicGrowth, TreeLayouts
from sequoia_vllm.drafting.tree_tables import Level, TreeTables
from sequoia_vllm.kernels.commit import CacheLayers
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED
from sequoia_vllm.kernels.node_masks import unpack_ancestors
from sequoia_vllm.kernels.random import DRAW, VERIFY
from sequoia_vllm.tree import TokenTree
from tests.oracles.attention import commit_reference
from tests.oracles.laws import chi_square
from tests.oracles.random_numbers import exponential, race_scores, target_noise, uniform_of
from tests.oracles.verification import algorithm_2, traversal
from tests.support.committing import bits, random_cache
from tests.support.committing import tables as block_tables

_RULES: dict[str, Callable[..., tuple[list[int], list[int]]]] = {
    "sequoia": algorithm_2,
    "traversal": traversal,
}
_NAMES: dict[str, str] = {
    "sequoia": "verification sampled",
    "traversal": "verification by traversal",
}
_MODES = {"greedy": GREEDY, "sampled": SAMPLED, "matched": SEEDED}
# Shares of a score by which float32 may prefer another token than float64.
_SCORE_ERROR = 1e-4
# Decisions nearer than this to their other side may go either way.
_NEAR = 1e-3
# Of a chi-square statistic, in standard deviations; the numbers are always the same.
_LAW_DEVIATIONS = 5.0


def check_sampling(run: KernelRun) -> None:
    """Everything but attention."""
    for dtype in (torch.float32,) if run.tiny else (torch.bfloat16, torch.float16, torch.float32):
        for vocabulary in (300,) if run.tiny else (32000, 128256):
            for mode in _MODES:
                with run.attempt(f"drawing {mode} {dtype} {vocabulary}"):
                    _check_drawing(run, mode, dtype, vocabulary)
    with run.attempt("dynamic trees"):
        _check_dynamic_trees(run, vocabulary=300 if run.tiny else 128256)
    for vocabulary in (50,) if run.tiny else (32000, 128256):
        with run.attempt(f"verification {vocabulary}"):
            _check_walks(run, vocabulary)
    for method in _RULES:
        with run.attempt(f"emitted law, {_NAMES[method]}"):
            _check_law(run, method)
    for dtype in (torch.float32,) if run.tiny else (torch.bfloat16, torch.float8_e4m3fn):
        with run.attempt(f"commit {dtype}"):
            _check_commit(run, dtype)


def _random_logits(run: KernelRun, rows: int, vocabulary: int, seed: int) -> Tensor:
    """float32 on the device; wide enough that few tokens are likely."""
    generator = torch.Generator(run.machine.device).manual_seed(seed)
    logits = torch.empty(rows, vocabulary, device=run.machine.device)
    return 3.0 * logits.normal_(generator=generator)


# -- drawing ------------------------------------------------------------------------


def _check_drawing(run: KernelRun, mode: str, dtype: torch.dtype, vocabulary: int) -> None:
    requests = 2
    tables = TreeTables(best_tree(64, 8), run.machine.device)
    level = tables.levels.levels[1]
    batch = TreeBatch(tables, requests, vocabulary, dtype, _MODES[mode])
    batch.requests.temperature.fill_(0.7)
    batch.requests.seeds[0] = -(2**40) + 5
    batch.requests.roots += (
        torch.arange(requests, device=run.machine.device, dtype=torch.int32) * 1000
    )
    logits = _random_logits(run, requests * level.width, vocabulary, 3).to(dtype)
    batch.drafted.tokens.fill_(-7)
    batch.draw(level, logits)
    worst = 0.0
    exact = logits.double().cpu().numpy().reshape(requests, level.width, vocabulary)
    for request in range(requests):
        for place in range(level.width):
            scores = _scores(batch, mode, level, request, place, exact[request, place])
            columns = level.columns[place, : int(level.counts[place])].long()
            worst = max(worst, _shortfall(scores, batch.drafted.tokens[request, columns].tolist()))
    name = f"drawing {mode}, {str(dtype).removeprefix('torch.')}, vocabulary {vocabulary}"
    run.check(name, worst, 0.0 if mode == "greedy" else _SCORE_ERROR)
    if mode == "sampled":
        run.check(f"{name}: Q that is kept", _statistics_error(batch, level, logits), 1e-5)


def _check_dynamic_trees(run: KernelRun, vocabulary: int) -> None:
    """Trees that kernels choose, against the same choice in torch; and the tables of each."""
    requests, tree = 2, best_tree(9, 3)
    tables = SlotTables(tree, run.machine.device, requests)
    batch = TreeBatch(tables, requests, vocabulary, torch.float32, GREEDY)
    trees = DynamicTrees(tables, batch.drafted)
    levels = trees.levels_of(tree.num_speculative_tokens)
    assert levels is not None
    plain = DynamicGrowth(torch.zeros(requests, dtype=torch.int64), tree.size, tree.depth)
    for level in levels.levels:
        logits = _random_logits(run, requests * level.width, vocabulary, level.depth)
        levels.draw(batch.drafted, batch.requests, requests, level, logits)
        if level.depth > 0:
            plain.descend()
        plain.add_children(logits.view(requests, level.width, vocabulary).cpu())
    trees.write(batch.requests.slots, chosen=True)
    nodes = torch.full((requests,), tree.num_speculative_tokens)  # of each: nothing is shared
    chosen = plain.best(torch.full((requests, tree.depth), -1), nodes, nodes)
    tokens, parents = chosen.tokens, chosen.parents
    layouts, seen = TreeLayouts.of(parents), unpack_ancestors(tables.mask.words)
    found = batch.drafted.tokens, tables.parents, tables.ancestors, seen, tables.mask.depths
    expected = tokens, parents, layouts.ancestors, layouts.ancestors, layouts.depths
    wrong = 0
    for ours, plainly in zip(found, expected, strict=True):
        own = ours[:requests, : tree.size].cpu()[..., : plainly.shape[-1]]
        wrong += int((own != plainly)[:, 1:].sum())  # the root's token is not written
    run.check("dynamic trees", float(wrong), 0.0)


def _scores(
    batch: TreeBatch, mode: str, level: Level, request: int, place: int, logits: NDArray[np.float64]
) -> NDArray[np.float64]:
    """What decides the draw, larger first; positive where they are compared by their ratio."""
    if mode == "greedy":
        return logits
    temperature = float(batch.requests.temperature[request])
    position = int(batch.requests.roots[request]) + level.depth
    seed = int(batch.requests.seeds[request])
    scaled = logits / temperature
    if mode == "matched":
        # As shares of what the unlikeliest differ by, these are absolute differences.
        return scaled + target_noise(seed, position, len(logits))
    weights = np.exp(scaled - scaled.max())
    tokens = np.arange(len(logits))
    arrivals = exponential(seed, tokens, position, int(level.nodes[place]), DRAW.value)
    return race_scores(weights / weights.sum(), arrivals)


def _shortfall(scores: NDArray[np.float64], drawn: list[int]) -> float:
    """By how much a drawn token's score is below the one that should have come there."""
    if len(set(drawn)) < len(drawn):
        return math.inf
    best = np.argsort(-scores, kind="stable")[: len(drawn)]
    if best.tolist() == drawn:
        return 0.0
    gaps = np.abs(scores[best] - scores[drawn]).max()
    # Equal scores have an order, too: the lower token first.
    return float(gaps) or 1e-9


def _statistics_error(batch: TreeBatch, level: Level, logits: Tensor) -> float:
    """Error of the maxima and sums that make Q; infinite where the copy of its logits differs."""
    kept = batch.draft_logits[:, level.rows.long()].reshape(logits.shape)
    if not torch.equal(kept, logits):
        return math.inf
    scaled = (
        logits.double()
        / batch.requests.temperature.double().repeat_interleave(level.width)[:, None]
    )
    maximum = scaled.amax(dim=1)
    total = (scaled - maximum[:, None]).exp().sum(dim=1)
    found = batch.draft_stats[:, level.rows.long()].reshape(-1, 2).double()
    errors = torch.stack([found[:, 0] / maximum - 1, found[:, 1] / total - 1])
    return float(errors.abs().max())


# -- verification -------------------------------------------------------------------


@dataclass
class _KernelChance:
    """One request's random numbers, and how the walk that they decide went.

    Attributes:
        seed, root_position: Of the request.
        closest: How near a decision was to the other one, as a share.
        residual: float64 ``[V]``: what the last token is drawn from.
    """

    seed: int
    root_position: int
    depths: Sequence[int]
    closest: float = math.inf
    residual: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    def accepts(self, target: float, draft: float, node: int) -> bool:
        position = self.root_position + self.depths[node]
        number = uniform_of(self.seed, position, node, VERIFY.value)
        ratio = target / draft if draft else math.inf
        self.closest = min(self.closest, abs(number - ratio) / number)
        return number < ratio

    def draw(self, distribution: NDArray[np.float64], node: int) -> int:
        """Any token: only what is possible is checked."""
        self.residual = distribution
        return int(distribution.argmax())


def _check_walks(run: KernelRun, vocabulary: int) -> None:
    """Accepted paths against the plain form in float64, and the last token's place in the residual.

    By Algorithm 2, then by traversal, of the same drafts.
    """
    requests = 4 if run.tiny else 12
    tables = TreeTables(best_tree(16 if run.tiny else 64, 6), run.machine.device)
    batch = TreeBatch(tables, requests, vocabulary, torch.float32, SAMPLED)
    batch.requests.roots.fill_(77)
    near = _random_logits(run, requests * tables.tree.size, vocabulary, 6) / 6
    target = batch.draw_accepted() + near
    target_p = _softmax(target).reshape(requests, tables.tree.size, vocabulary)
    for method in _RULES:
        batch.verify(target, method)
        _check_paths(run, batch, target_p, method)


def _check_paths(
    run: KernelRun, batch: TreeBatch, target: NDArray[np.float64], method: str
) -> None:
    requests, _, vocabulary = target.shape
    wrong = decided = accepted = 0
    for request in range(requests):
        expected, chance = _walk(batch, request, target[request], method)
        if chance.closest < _NEAR:
            continue
        path = [node for node in batch.accepted[request].tolist() if node >= 0]
        last = int(batch.sampled[request, len(path)])
        emitted = (
            batch.drafted.tokens[request, path].tolist()
            == batch.sampled[request].tolist()[: len(path)]
        )
        right = path == expected and emitted and last >= 0 and chance.residual[last] > 0
        wrong += not right
        decided += 1
        accepted += len(path)
    by = f"{_NAMES[method]}, vocabulary {vocabulary}"
    run.check(f"{by}: {accepted} nodes accepted, wrong paths", wrong, 0)
    run.check(f"{by}: paths too close to call", requests - decided, 2)


def _walk(
    batch: TreeBatch, request: int, target: NDArray[np.float64], method: str
) -> tuple[list[int], _KernelChance]:
    """The nodes that the plain form accepts of one request, whose P is ``target``, ``[N, V]``."""
    tree, row = batch.tables.tree, batch.tables.inner_rows.tolist()
    draft = _softmax(batch.draft_logits[request])
    chance = _KernelChance(
        int(batch.requests.seeds[request]), int(batch.requests.roots[request]), tree.depths.tolist()
    )
    path, _ = _RULES[method](
        target.__getitem__, lambda node: draft[row[node]], batch.drafted.tokens[request].tolist(),
        tree.children, chance,
    )  # fmt: skip
    return path, chance


def _softmax(logits: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = logits.double().softmax(dim=-1).cpu().numpy()
    return found


def _check_law(run: KernelRun, method: str) -> None:
    """Drawing and verification together: first tokens have the target's law.

    The second, too; where a tree emits one token only, it is drawn here: by traversal the
    number of tokens depends on what they are.
    """
    vocabulary, temperature = 17, 0.7
    requests = 64 if run.tiny else 200_000
    tables = TreeTables(TokenTree((-1, 0, 0, 1, 0, 1, 2)), run.machine.device)
    batch = TreeBatch(tables, requests, vocabulary, torch.float32, SAMPLED)
    batch.requests.temperature.fill_(temperature)
    draft = _random_logits(run, 1, vocabulary, 11) / 2
    target = _random_logits(run, 1, vocabulary, 12) / 2
    batch.draw_all(draft.expand(batch.draft_logits.shape))
    batch.verify(target.expand(requests * tables.tree.size, -1).contiguous(), method)
    law = _softmax(target / temperature)[0]
    first, second = batch.sampled[:, :2].T.cpu().numpy()
    drawn = np.random.default_rng(9).choice(vocabulary, len(second), p=law)
    pairs = first * vocabulary + np.where(second >= 0, second, drawn)
    firsts = np.bincount(first, minlength=vocabulary)
    seconds = np.bincount(pairs, minlength=vocabulary**2)
    emitted = int((second >= 0).sum())
    for what, counts, expected in (
        (f"first token of {requests} trees against the target's law", firsts, requests * law),
        (f"second token, given the first; {emitted} emitted", seconds, np.outer(firsts, law)),
    ):
        found = chi_square(counts, expected.ravel(), fewest=5)  # rare outcomes are pooled
        run.check(f"{_NAMES[method]}: {what}", found.deviations, _LAW_DEVIATIONS)


# -- commit -------------------------------------------------------------------------


def _check_commit(run: KernelRun, dtype: torch.dtype) -> None:
    """Every byte of every layer, also of what must stay."""
    roots = [3, 40, 15] if run.tiny else [0, 1000, 15, 4090]
    device, columns = run.machine.device, (max(roots) + 64) // 16 + 1
    blocks, layers = len(roots) * columns, 2 if run.tiny else 8
    caches = [random_cache(blocks, 4, 16, 2 * 64, dtype).to(device) for _ in range(layers)]
    block_table = block_tables(len(roots), columns, blocks).to(device)
    paths = [[2, 5, 9, 30], [1, 2, 3, -1], [-1, -1, -1, -1], [3, 4, 40, 63]][: len(roots)]
    expected = [bits(layer).clone() for layer in caches]
    commit_reference(expected, block_table, roots, torch.tensor(paths))
    tables = TreeTables(TokenTree.chain(4), device)
    batch = TreeBatch(tables, len(roots), 8, torch.float32, GREEDY)
    batch.requests.roots.copy_(torch.tensor(roots))
    batch.accepted.copy_(torch.tensor(paths))
    batch.commit(CacheLayers.of(caches), block_table)
    wrong = sum(
        int((bits(layer) != right).sum()) for layer, right in zip(caches, expected, strict=True)
    )
    run.check(f"commit, {str(dtype).removeprefix('torch.')}: wrong bytes", wrong, 0)
