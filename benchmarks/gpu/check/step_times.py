"""Whole steps of a 7B-shaped target and a 68M-shaped draft, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.check.grower import TreeGrower
from benchmarks.gpu.check.llama import Llama, LlamaShape, ScoredNodes
from benchmarks.gpu.check.stage import StageRun
from benchmarks.gpu.check.timing import capture
from benchmarks.gpu.check.tree_batch import TreeBatch
from benchmarks.gpu.check.trees import best_tree, level_tree
from benchmarks.gpu.check.verification_times import accepted_drafts, deepest_path
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels.commit import CacheLayers
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED
from sequoia_vllm.tree import TokenTree

TARGET = LlamaShape("meta-llama/Llama-2-7b-hf", 32, 4096, 11008, 32, 32, 128, 32000)
DRAFT = LlamaShape("JackFram/llama-68m", 2, 768, 3072, 12, 12, 64, 32000)
LARGE_VOCABULARY = 128256
_TINY_TARGET = LlamaShape("tiny target", 2, 32, 32, 2, 2, 16, 60)
_TINY_DRAFT = LlamaShape("tiny draft", 1, 16, 32, 1, 1, 16, 60)
TREE_SIZE, TREE_DEPTH = 64, 8
CONTEXTS = (1024, 8192)
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
_MOST_ROWS = 2048
_SEEDS = 5

DRAFT_READ = "draft read"
DRAFT_LEVEL = "draft level"
DRAFT_GROWTH = "draft growth"
LEVEL_CURVE = "draft level by width"
TARGET_CURVE = "target"
VERIFICATION_CURVE = "verification by nodes"
COMMIT = "commit"
PLAIN_STEP = "plain step"
TREE_STEP = "tree step"
SPECULATIVE_STEP = "speculative step"


class Steps:
    """Everything of the stage that is timed with these two models.

    Args:
        run: The stage.
    """

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self._device = run.machine.device
        # Triton's interpreter cannot multiply bfloat16.
        self._dtype = torch.float32 if run.tiny else torch.bfloat16
        self._target_shape = _TINY_TARGET if run.tiny else TARGET
        self._draft_shape = _TINY_DRAFT if run.tiny else DRAFT
        self._tree = best_tree(6, 2) if run.tiny else best_tree(TREE_SIZE, TREE_DEPTH)
        self._contexts = (20,) if run.tiny else CONTEXTS

    def growth(self) -> None:
        """Draft growth, level by level and as a whole, at both vocabularies."""
        vocabularies = (self._draft_shape.vocab, 100 if self._run.tiny else LARGE_VOCABULARY)
        for vocabulary in vocabularies:
            with self._run.attempt(f"growth, vocabulary {vocabulary}"):
                shape = replace(self._draft_shape, vocab=vocabulary)
                self._time_growth(self._model(shape))

    def drafts_by_width(self) -> None:
        """One level against its width and the batch size."""
        model = self._model(self._draft_shape)
        for batch, tokens in self._sizes():
            with self._run.attempt(f"draft level of {tokens}, batch {batch}"):
                grower = self._grower(model, level_tree(tokens), batch, self._contexts[0], SAMPLED)
                self._run.time_part(
                    LEVEL_CURVE, [partial(grower.grow_level, 1)], model=model.shape.name,
                    batch_size=batch, context_length=self._contexts[0], tokens=tokens,
                    vocabulary=model.shape.vocab,
                )  # fmt: skip

    def targets(self) -> None:
        """The target's pass against tokens and batch size, and whole steps."""
        model = self._model(self._target_shape)
        for batch, tokens in self._sizes():
            with self._run.attempt(f"target, {tokens} tokens, batch {batch}"):
                self._time_target(model, batch, tokens)
        for context in self._contexts:
            with self._run.attempt(f"steps at context {context}"):
                self._time_steps(model, context)

    def _sizes(self) -> list[tuple[int, int]]:
        if self._run.tiny:
            return [(1, 1), (2, 3)]
        return [(b, n) for b in BATCH_SIZES for n in TOKENS if b * n <= _MOST_ROWS]

    def _generator(self) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(31)

    def _model(self, shape: LlamaShape) -> Llama:
        return Llama(shape, self._dtype, max(self._contexts) + 1024, self._generator())

    def _batch(self, tree: TokenTree, requests: int, vocabulary: int, mode: int) -> TreeBatch:
        tables = TreeTables(tree, self._device)
        return TreeBatch(tables, requests, vocabulary, self._dtype, mode)

    def _grower(
        self, model: Llama, tree: TokenTree, requests: int, context: int, mode: int
    ) -> TreeGrower:
        batch = self._batch(tree, requests, model.shape.vocab, mode)
        batch.requests.roots.fill_(context)
        cache = model.new_cache(requests, context + tree.size, self._generator())
        grower = TreeGrower(model, cache, batch)
        grower.token_ids.random_(model.shape.vocab, generator=self._generator())
        batch.drafted.tokens.random_(model.shape.vocab, generator=self._generator())
        return grower

    # -- the draft ------------------------------------------------------------------

    def _time_growth(self, model: Llama) -> None:
        context = self._contexts[0]
        grower = self._grower(model, self._tree, 1, context, SAMPLED)
        time = partial(
            self._run.time_part, model=model.shape.name, context_length=context,
            vocabulary=model.shape.vocab,
        )  # fmt: skip
        time(
            DRAFT_READ, [lambda: grower.draw_below_roots(grower.read_committed())],
            tokens=self._tree.depth + 1,
        )  # fmt: skip
        for level in grower.batch.tables.levels.levels[1:]:
            time(DRAFT_LEVEL, [partial(grower.grow_level, level.depth)], tokens=level.width)
        time(DRAFT_GROWTH, [grower.grow], tokens=self._tree.size)
        self._check_captured(grower)

    def _check_captured(self, grower: TreeGrower) -> None:
        """Same seeds, same tokens: one by one, and as one graph."""
        replay: Callable[[], object] = (
            grower.grow if self._run.machine.interpreted else capture([grower.grow]).replay
        )
        batch = grower.batch
        differing = 0
        seen = set()
        for seed in range(_SEEDS):
            for mode in (GREEDY, SAMPLED, SEEDED):
                batch.requests.modes.fill_(mode)
                batch.requests.seeds.fill_(seed)
                found = []
                for grow in (grower.grow, replay):
                    batch.drafted.tokens[:, 1:] = 0
                    grow()
                    found.append(batch.drafted.tokens.clone())
                differing += int((found[0] != found[1]).sum())
                seen.add(tuple(found[1].flatten().tolist()))
        vocabulary = batch.draft_logits.shape[2]
        self._run.check(
            f"growth as a graph, vocabulary {vocabulary}: tokens unlike eager's", differing, 0
        )
        # Were seeds and modes not read by the graph, all would be alike.
        self._run.check(
            f"growth as a graph, vocabulary {vocabulary}: trees missing of "
            f"{2 * _SEEDS + 1} different ones", 2 * _SEEDS + 1 - len(seen), 0,
        )  # fmt: skip

    # -- the target -----------------------------------------------------------------

    def _nodes(self, batch: TreeBatch) -> ScoredNodes:
        depths = torch.from_numpy(batch.tables.tree.depths.copy())
        return ScoredNodes(batch.requests.roots, depths, batch.tables.ancestors)

    def _time_target(self, model: Llama, requests: int, tokens: int) -> None:
        """One pass over trees of this size, and what follows it."""
        context = self._contexts[0]
        if not self._fits(model, requests, context + tokens):
            self._run.say(f"target, {tokens} tokens, batch {requests}: memory is too small")
            return
        cache = model.new_cache(requests, context + tokens, self._generator())
        read = torch.zeros(requests * tokens, dtype=torch.int64, device=self._device)
        read.random_(model.shape.vocab, generator=self._generator())
        if tokens == 1:
            roots = torch.full((requests,), context, dtype=torch.int32, device=self._device)
            nodes = ScoredNodes.chain(roots, 1)
        else:
            tree = best_tree(tokens, TREE_DEPTH)
            batch = self._batch(tree, requests, model.shape.vocab, SAMPLED)
            batch.requests.roots.fill_(context)
            nodes = self._nodes(batch)
        nodes.place(cache)
        time = partial(
            self._run.time_part, model=model.shape.name, batch_size=requests,
            context_length=context, tokens=tokens, vocabulary=model.shape.vocab,
        )  # fmt: skip
        time(TARGET_CURVE, [lambda: model.logits(model.score(read, nodes, cache))])
        if tokens > 1:
            logits, unused = accepted_drafts(batch, self._generator())
            time(VERIFICATION_CURVE, [lambda: batch.verify(logits, unused)])
            layers = CacheLayers.of(cache.layers)
            batch.accepted.copy_(deepest_path(tree))
            time(COMMIT, [lambda: batch.commit(layers, cache.block_table)])

    def _fits(self, model: Llama, requests: int, positions: int) -> bool:
        """Whether a cache of this size, and as much again for the rest, can be had."""
        needed = model.shape.cache_bytes(requests, positions, self._dtype)
        return 1.2 * needed + (4 << 30) < self._run.machine.free_bytes or self._run.tiny

    def _time_steps(self, model: Llama, context: int) -> None:
        """Plain and with a tree; the speculative one with growth, in one graph."""
        tree = self._tree
        if not self._fits(model, 1, context + tree.size):
            self._run.say(f"steps at context {context}: memory is too small")
            return
        draft = self._model(self._draft_shape)
        grower = self._grower(draft, tree, 1, context, SAMPLED)
        batch = grower.batch
        cache = model.new_cache(1, context + tree.size, self._generator())
        layers = CacheLayers.of(cache.layers)
        nodes = self._nodes(batch).place(cache)
        one = ScoredNodes.chain(batch.requests.roots, 1).place(cache)
        root = batch.drafted.tokens[0, :1].clone()
        unused = torch.zeros(tree.size, dtype=torch.int64, device=self._device)

        def plain() -> None:
            model.logits(model.score(root, one, cache)).float().argmax(dim=-1)

        def score() -> None:
            logits = model.logits(model.score(batch.drafted.tokens.view(-1), nodes, cache)).float()
            batch.verify(logits, unused)
            batch.commit(layers, cache.block_table)

        def speculate() -> None:
            grower.grow()
            score()

        time = partial(
            self._run.time_part, model=model.shape.name, context_length=context,
            vocabulary=model.shape.vocab,
        )  # fmt: skip
        time(PLAIN_STEP, [plain])
        time(TREE_STEP, [score], tokens=tree.size)
        time(SPECULATIVE_STEP, [speculate], tokens=tree.size)


def run_steps(run: StageRun) -> None:
    """All of it, one thing after the other: each may fail alone."""
    steps = Steps(run)
    with torch.inference_mode():
        for part in (steps.growth, steps.drafts_by_width, steps.targets):
            with run.attempt(part.__name__):
                part()
