"""Is decoding with trees lossless? A whole loop of steps, without an engine.

Greedy, in float32, with a draft that is often wrong: the tokens must be those of
decoding one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.check.grower import TreeGrower
from benchmarks.gpu.check.llama import Llama, LlamaShape, ScoredNodes
from benchmarks.gpu.check.paged import PagedCache
from benchmarks.gpu.check.stage import StageRun
from benchmarks.gpu.check.timing import capture
from benchmarks.gpu.check.tree_batch import TreeBatch
from benchmarks.gpu.check.trees import best_tree, first_path_depth
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels.commit import CacheLayers
from sequoia_vllm.kernels.modes import GREEDY

_SHAPE = LlamaShape("small", 4, 512, 1024, 8, 4, 64, 2000)
_TINY_SHAPE = LlamaShape("tiny", 2, 32, 32, 2, 1, 16, 50)
# Of the target's own weights: the draft's best token is right about every second time.
_NOISE, _TINY_NOISE = 0.15, 0.25
_NEAR_TIES = 0.02


def check_decoding(run: StageRun) -> None:
    """Plain decoding against decoding with trees, growth and scoring each as a graph."""
    with run.attempt("decoding with trees"), torch.inference_mode():
        device = run.machine.device
        shape = _TINY_SHAPE if run.tiny else _SHAPE
        prompt_length, count = (8, 8) if run.tiny else (100, 200)
        tables = TreeTables(best_tree(*((6, 2) if run.tiny else (32, 6))), device)
        longest = prompt_length + count + tables.tree.size + tables.tree.depth + 2
        models = []
        for noise in (0.0, _TINY_NOISE if run.tiny else _NOISE):
            generator = torch.Generator(device).manual_seed(21)
            models.append(Llama(shape, torch.float32, longest, generator))
            models[-1].perturb(noise, generator)
        target, draft = models
        drawn = torch.Generator().manual_seed(22)
        prompt = torch.randint(shape.vocab, (prompt_length,), generator=drawn).tolist()
        plain = _decode_plainly(target, prompt, count, longest)

        def tokens_per_step(drafting: Llama, name: str) -> float:
            loop = _TreeLoop(target, drafting, tables, prompt, longest, run.machine.interpreted)
            steps = 0
            while len(loop.tokens) < len(plain):
                loop.step()
                steps += 1
            wrong = sum(a != b for a, b in zip(loop.tokens, plain, strict=False))
            run.check(f"greedy decoding of {count} tokens with {name}", wrong, 0)
            return (len(loop.tokens) - prompt_length - 1) / steps

        found = tokens_per_step(draft, "trees: tokens unlike plain's")
        run.found.facts["decoding_tokens_per_step"] = found
        # Were no node ever accepted, or each, the loop would show little.
        name = "the same: share of steps' depth that was accepted"
        share = (found - 1) / tables.tree.depth
        run.check(f"{name} is between 0.02 and 0.98: distance from 0.5", abs(share - 0.5), 0.48)
        own = tokens_per_step(target, "its own drafts: tokens unlike plain's")
        # Growth that reads or keeps something else drafts something else. A near tie may
        # go the other way, as the two passes add in another order.
        shortfall = 1 - own / (1 + first_path_depth(tables.tree))
        run.check("the same: share of accepted tokens that is missing", shortfall, _NEAR_TIES)


def _prefilled(model: Llama, prompt: list[int], longest: int) -> tuple[PagedCache, int]:
    """A cache that holds the prompt, and the best token after it."""
    generator = torch.Generator(model.device).manual_seed(23)
    cache = model.new_cache(1, longest, generator)
    return cache, _best(model, _zeros(model), prompt, cache)


def _decode_plainly(model: Llama, prompt: list[int], count: int, longest: int) -> list[int]:
    cache, token = _prefilled(model, prompt, longest)
    tokens = [*prompt, token]
    length = _zeros(model)
    while len(tokens) < len(prompt) + 1 + count:
        length.fill_(len(tokens) - 1)
        tokens.append(_best(model, length, tokens[-1:], cache))
    return tokens


def _best(model: Llama, context_lens: Tensor, tokens: list[int], cache: PagedCache) -> int:
    """The best token after these, which are read on the way."""
    read = torch.tensor(tokens, device=context_lens.device)
    nodes = ScoredNodes.chain(context_lens, len(tokens)).place(cache)
    hidden = model.score(read, nodes, cache)
    return int(model.logits(hidden[-1:]).argmax())


def _zeros(model: Llama) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=model.device)


class _TreeLoop:
    """Decodes one request with trees.

    Attributes:
        tokens: Committed so far, the prompt first.
    """

    def __init__(
        self,
        target: Llama,
        draft: Llama,
        tables: TreeTables,
        prompt: list[int],
        longest: int,
        eager: bool,
    ) -> None:
        self._target = target
        self._cache, token = _prefilled(target, prompt, longest)
        self._layers = CacheLayers.of(self._cache.layers)
        draft_cache, _ = _prefilled(draft, prompt, longest)
        self.tokens = [*prompt, token]
        self._batch = TreeBatch(tables, 1, target.shape.vocab, torch.float32, GREEDY)
        self._grower = TreeGrower(draft, draft_cache, self._batch)
        depths = torch.from_numpy(tables.tree.depths.copy())
        self._nodes = ScoredNodes(self._batch.requests.roots, depths, tables.ancestors)
        # Capturing runs the work: from a state in which that does no harm.
        self._load()
        self._step = self._device_step if eager else self._captured(self._device_step)

    @staticmethod
    def _captured(work: Callable[[], object]) -> Callable[[], object]:
        return capture([work]).replay

    def _load(self) -> None:
        """Brings the committed tokens to the device."""
        self._grower.token_ids[0, : len(self.tokens)] = torch.tensor(self.tokens)
        self._batch.drafted.tokens[:, 0] = self.tokens[-1]
        self._batch.requests.roots.fill_(len(self.tokens) - 1)

    def _device_step(self) -> None:
        """Grow, score, verify, commit: no value is read on the host."""
        self._grower.grow()
        tokens = self._batch.drafted.tokens.view(-1)
        hidden = self._target.score(tokens, self._nodes.place(self._cache), self._cache)
        logits = self._target.logits(hidden)
        self._batch.verify(logits, logits.argmax(dim=-1))
        self._batch.commit(self._layers, self._cache.block_table)

    def step(self) -> None:
        """One step; its tokens are added."""
        self._load()
        self._step()
        count = int(self._batch.num_sampled[0])
        self.tokens += self._batch.sampled[0, :count].tolist()
