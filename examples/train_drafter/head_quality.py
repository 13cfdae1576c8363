"""How long the chains are that a target accepts: of heads, and of the pair's draft beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from frozen_target import Frozen, FrozenTarget
from heads import LAYERS, Drafter, load_head
from numpy.typing import NDArray
from quality import Estimate, estimate
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

CHAINS = (4, 7)  # drafts in a step
CONTINUATION = 72  # tokens that the target adds to a prompt
PROMPTS_AT_ONCE = 50


@dataclass(frozen=True)
class ChainQuality:
    """Greedy chains over the target's greedy continuations.

    Attributes:
        steps: Number of the target's steps.
        tokens_per_step: Accepted drafts and the target's own token.
        acceptance: For each draft of a chain, in how many steps it was accepted.
    """

    steps: int
    tokens_per_step: Estimate
    acceptance: list[float]


class StandaloneDraft:
    """A draft model, which reads the text itself."""

    def __init__(self, folder: Path, device: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.to(device).eval()

    @torch.no_grad()
    def draft(
        self, target: FrozenTarget, tokens: torch.Tensor, frozen: Frozen, count: int
    ) -> torch.Tensor:
        """As a head's: every prefix is a row, and all rows share the text's keys and values."""
        cache = DynamicCache(config=self._model.config)
        logits = self._model(tokens[None], past_key_values=cache, use_cache=True).logits[0, 1:]
        ends = torch.arange(1, len(tokens), device=tokens.device)
        cache.batch_repeat_interleave(len(ends))
        seen = torch.arange(len(tokens), device=tokens.device) <= ends[:, None]
        drafts = [logits.argmax(-1)]
        while len(drafts) < count:
            seen = torch.cat((seen, torch.ones_like(seen[:, :1])), -1)
            logits = self._model(
                drafts[-1][:, None],
                attention_mask=seen.long(),
                position_ids=ends[:, None] + len(drafts),
                past_key_values=cache,
                use_cache=True,
            ).logits[:, 0]
            drafts.append(logits.argmax(-1))
        return torch.stack(drafts, -1)


def measure_chains(
    pair: Path, prompts: Sequence[str], device: str, on_prompt: Callable[[], None]
) -> dict[str, dict[str, ChainQuality]]:
    """For the pair's draft and every head beside it, the quality of chains of each length."""
    target = FrozenTarget(pair / "target", LAYERS, device)
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    drafters = _drafters(pair, target, device)
    texts = continuations(target, [tokenizer(prompt).input_ids for prompt in prompts], device)
    gained: dict[tuple[str, int], list[NDArray[np.int64]]] = {
        (name, count): [] for name in drafters for count in CHAINS
    }
    for prompt_length, tokens in texts:
        frozen = target(tokens[None])
        for name, drafter in drafters.items():
            drafts = drafter.draft(target, tokens, frozen, max(CHAINS))
            for count in CHAINS:
                lengths = accepted(drafts[:, :count], tokens)
                gained[name, count].append(walk(lengths, prompt_length))
        on_prompt()
    return {
        name: {str(count): _quality(gained[name, count], count) for count in CHAINS}
        for name in drafters
    }


def continuations(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], device: str
) -> list[tuple[int, torch.Tensor]]:
    """The prompts' lengths and, with the target's greedy continuation, their tokens."""
    texts = []
    for length, group in groupby(sorted(prompts, key=len), key=len):
        same_length = list(group)
        for first in range(0, len(same_length), PROMPTS_AT_ONCE):
            batch = torch.tensor(same_length[first : first + PROMPTS_AT_ONCE], device=device)
            texts += [(length, row) for row in target.continue_greedily(batch, CONTINUATION)]
    return texts


def accepted(drafts: torch.Tensor, tokens: torch.Tensor) -> NDArray[np.int64]:
    """How many drafts of each chain the target would accept.

    Args:
        drafts: Row s drafts the tokens from s + 2 on, shape ``[length - 1, count]``.
        tokens: The text that the target generates greedily, shape ``[length]``.

    Returns:
        Shape ``[length - 1 - count]``: of the chains that end inside of the text.
    """
    wanted = tokens[2:].unfold(0, drafts.shape[1], 1)
    right = (drafts[: len(wanted)] == wanted).long()
    return right.cumprod(-1).sum(-1).cpu().numpy()


def walk(lengths: NDArray[np.int64], prompt_length: int) -> NDArray[np.int64]:
    """Tokens of each step of a generation, the target's own token included.

    The prompt's pass gives one token; each step follows where the one before
    ended.

    Args:
        lengths: Accepted drafts of every chain; chain s has the target's states
            of the tokens up to s.
        prompt_length: Tokens of the prompt.
    """
    start, steps = prompt_length - 1, []
    while start < len(lengths):
        steps.append(lengths[start] + 1)
        start += lengths[start] + 1
    return np.array(steps, dtype=np.int64)


def _drafters(pair: Path, target: FrozenTarget, device: str) -> dict[str, Drafter]:
    """The draft, and the heads that are there."""
    drafters: dict[str, Drafter] = {"draft": StandaloneDraft(pair / "draft", device)}
    for kind in ("eagle3", "dflash"):
        if (pair / kind / "config.json").is_file():
            drafters[kind] = load_head(pair / kind, target, device)
    return drafters


def _quality(per_prompt: Sequence[NDArray[np.int64]], count: int) -> ChainQuality:
    tokens = np.concatenate(per_prompt)
    return ChainQuality(
        len(tokens),
        estimate([steps.astype(np.float64) for steps in per_prompt]),
        [float((tokens > depth).mean()) for depth in range(1, count + 1)],
    )
