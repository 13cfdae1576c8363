"""Is decoding with trees lossless? A whole loop of steps, without an engine.

Greedy, in float32, with a draft that is often wrong: the tokens must be those of
decoding one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sequoia_vllm.gpu_check.drafts import DraftedBatch
from sequoia_vllm.gpu_check.growth import TreeGrower
from sequoia_vllm.gpu_check.llama import Llama, LlamaShape, Nodes
from sequoia_vllm.gpu_check.paged import PagedCache
from sequoia_vllm.gpu_check.stage import StageRun
from sequoia_vllm.gpu_check.timing import capture
from sequoia_vllm.gpu_check.trees import TreeTables, best_tree
from sequoia_vllm.kernels.commit import CacheLayers
from sequoia_vllm.kernels.modes import GREEDY

_SHAPE = LlamaShape("small", 4, 512, 1024, 8, 4, 64, 2000)
_TINY_SHAPE = LlamaShape("tiny", 2, 32, 32, 2, 1, 16, 50)
# Of the target's own weights: the draft's best token is right about every second time.
_NOISE, _TINY_NOISE = 0.15, 0.25


def check_decoding(run: StageRun) -> None:
    """Plain decoding against decoding with trees, growth and scoring each as a graph."""
    with run.attempt("decoding with trees"), torch.inference_mode():
        device = run.machine.device
        shape = _TINY_SHAPE if run.tiny else _SHAPE
        prompt_length, count = (8, 8) if run.tiny else (100, 200)
        tables = TreeTables.of(best_tree(*((6, 2) if run.tiny else (32, 6))), device)
        longest = prompt_length + count + tables.tree.size + tables.tree.depth + 2
        models = []
        for noise in (0.0, _TINY_NOISE if run.tiny else _NOISE):
            generator = torch.Generator(device).manual_seed(21)
            models.append(Llama(shape, torch.float32, longest, generator))
            models[-1].perturb(noise, generator)
        drawn = torch.Generator().manual_seed(22)
        prompt = torch.randint(shape.vocab, (prompt_length,), generator=drawn).tolist()
        plain = _decode_plainly(models[0], prompt, count, longest)
        loop = _TreeLoop(models[0], models[1], tables, prompt, longest, run.machine.interpreted)
        steps = 0
        while len(loop.tokens) < len(plain):
            loop.step()
            steps += 1
        wrong = sum(a != b for a, b in zip(loop.tokens, plain, strict=False))
        emitted = len(loop.tokens) - prompt_length - 1
        run.check(f"greedy decoding of {count} tokens with trees: tokens unlike plain's", wrong, 0)
        run.found.facts["decoding_tokens_per_step"] = emitted / steps
        # Were no node ever accepted, or each, the loop would show little.
        name = "the same: share of steps' depth that was accepted"
        share = (emitted / steps - 1) / tables.tree.depth
        run.check(f"{name} is between 0.02 and 0.98: distance from 0.5", abs(share - 0.5), 0.48)


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
    hidden = model.forward(read, Nodes.chain(context_lens, len(tokens)), cache)
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
        self._batch = DraftedBatch.make(tables, 1, target.shape.vocab, torch.float32, GREEDY)
        self._grower = TreeGrower(draft, draft_cache, self._batch)
        self._nodes = Nodes.of(
            self._batch.roots, 0, tables.tree.size, tables.depths, tables.ancestors
        )
        # Capturing runs the work: from a state in which that does no harm.
        self._load()
        self._step = self._device_step if eager else self._captured(self._device_step)

    @staticmethod
    def _captured(work: Callable[[], object]) -> Callable[[], object]:
        return capture([work]).replay

    def _load(self) -> None:
        """Brings the committed tokens to the device."""
        width = self._grower.read.shape[1]
        self._grower.read.copy_(torch.tensor([self.tokens[-width:]]))
        self._batch.tokens[:, 0] = self.tokens[-1]
        self._batch.roots.fill_(len(self.tokens) - 1)

    def _device_step(self) -> None:
        """Grow, score, verify, commit: no value is read on the host."""
        self._grower.grow()
        hidden = self._target.forward(self._batch.tokens.view(-1), self._nodes, self._cache)
        logits = self._target.logits(hidden)
        self._batch.verify(logits, logits.argmax(dim=-1))
        self._batch.commit(self._layers, self._cache.block_table)

    def step(self) -> None:
        """One step; its tokens are added."""
        self._load()
        self._step()
        count = int(self._batch.num_sampled[0])
        self.tokens += self._batch.sampled[0, :count].tolist()
