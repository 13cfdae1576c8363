"""A chat model's answers in batches of thousands, in the format of ``draft-data``, and a head.

vLLM answers 64 prompts at once there, and keeps 16 probabilities of each token on the host. Here
transformers answers, and a GPU keeps them: two million tokens in some two minutes on an H100.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chat_prompts import prompts
from draft_data import (
    LIKELIEST,
    PARTS,
    QUESTION,
    QUESTION_TOP_P,
    TEMPERATURES,
    DraftDataRecipe,
    Shard,
    _keep_recipe,
    _opening,
    _save,
    _shard_path,
    digest,
)
from heads import train_head
from training import Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, TopPLogitsWarper

from sequoia_vllm.prompts import Prompt, encode_prompts

_VALIDATION = 192
_TIMED_STEPS = 12
_VALIDATIONS = 5


def write_answers(target: Path, out: Path, texts: int, answer: int, at_once: int) -> dict[str, Any]:
    """Writes answers of the target to learn from, and some for validation.

    Every second question is the target's own if it chats.

    Args:
        texts: Number of answers to learn from.
        answer: Most tokens of each.
        at_once: Answers that are written together.
    """
    begun = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(target)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    model.to(device).eval()
    writer = _Writer(model, tokenizer, answer)
    out.mkdir(parents=True, exist_ok=True)
    hashed = digest(target, "*.safetensors")
    _keep_recipe(DraftDataRecipe(str(target.absolute()), None, answer, 0, "bfloat16", hashed), out)
    tokens = 0
    for part, count in zip(reversed(PARTS), (min(_VALIDATION, texts), texts), strict=True):
        asked = prompts(part == "validation", count, 0, own=writer.writes_questions)
        for number, first in enumerate(range(0, count, at_once)):
            shard = writer.shard(asked[first : first + at_once])
            _save(shard, _shard_path(out, part, number))
            tokens += len(shard.likely)
            begin = shard.prompt_lengths[0]
            sample = tokenizer.decode(shard.tokens[begin : shard.ends[0]].tolist())
            print(f"answers: {part} {number}, {tokens:,} tokens, {sample[:80]!r}", flush=True)
    del writer, model
    if on_gpu:
        torch.cuda.empty_cache()
    return {"answered_tokens": tokens, "seconds": round(time.monotonic() - begun, 1)}


class _Writer:
    """Samples texts of a model, a batch at a time."""

    def __init__(self, model: Any, tokenizer: Any, answer: int) -> None:
        self._model, self._tokenizer, self._answer = model, tokenizer, answer
        end = model.generation_config.eos_token_id
        self._ends = torch.tensor([end] if isinstance(end, int) else end, device=model.device)
        self._opening = _opening(tokenizer)
        self.writes_questions = self._opening is not None

    def shard(self, asked: Sequence[Prompt | None]) -> Shard:
        """The answers to these prompts; the model writes those that are None itself."""
        begun = time.monotonic()
        own = sum(one is None for one in asked)
        questions = iter(self._questions(own) if own else [])
        known = [one or Prompt(prompt=next(questions).strip() or "?") for one in asked]
        encoded = encode_prompts(known, self._tokenizer)
        heats = [TEMPERATURES[place % len(TEMPERATURES)] for place in range(len(asked))]
        answers, likely, shares = self._sample(encoded, heats, self._answer, 1.0)
        texts = [[*prompt, *given] for prompt, given in zip(encoded, answers, strict=True)]
        return Shard(
            tokens=np.array([token for text in texts for token in text], dtype=np.uint16),
            ends=np.cumsum([len(text) for text in texts], dtype=np.int64),
            prompt_lengths=np.array([len(one) for one in encoded], dtype=np.int64),
            temperatures=np.array(heats, dtype=np.float32),
            likely=likely.astype(np.uint16),
            log_probabilities=shares,
            seconds=time.monotonic() - begun,
        )

    def _questions(self, count: int) -> list[str]:
        openings = [self._opening or []] * count
        written, _, _ = self._sample(openings, [1.0] * count, QUESTION, QUESTION_TOP_P)
        return list(self._tokenizer.batch_decode(written, skip_special_tokens=True))

    @torch.inference_mode()
    def _sample(
        self, texts: Sequence[list[int]], heats: Sequence[float], most: int, top_p: float
    ) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
        """Continues each text; also the likeliest tokens before each token, ``[answered, 16]``, and
        logarithms of their probabilities, float16."""
        device = self._model.device
        width = max(map(len, texts))
        tokens = torch.zeros(len(texts), width, dtype=torch.long, device=device)
        mask = torch.zeros(len(texts), width + most, dtype=torch.long, device=device)
        for row, text in enumerate(texts):  # padded on the left: all go on at one column
            tokens[row, width - len(text) :] = torch.tensor(text, device=device)
            mask[row, width - len(text) : width] = 1
        heat = torch.tensor(heats, device=device)[:, None]
        ended = torch.zeros(len(texts), dtype=torch.bool, device=device)
        positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
        cache, columns = None, []
        for column in range(width, width + most):
            found = self._model(
                input_ids=tokens, attention_mask=mask[:, :column], position_ids=positions,
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            cache = found.past_key_values
            logs = found.logits[:, -1].float().log_softmax(-1)
            best = logs.topk(LIKELIEST)
            drawn = _draw(logs, heat, top_p)
            columns.append((drawn, ended, best.indices.int(), best.values.half()))
            ended = ended | torch.isin(drawn, self._ends)
            mask[:, column] = 1
            tokens, positions = drawn[:, None], positions[:, -1:] + 1
            if column % 16 == 0 and bool(ended.all()):
                break
        drawn, dead, likely, logs = (
            torch.stack(one, 1).cpu() for one in zip(*columns, strict=True)
        )
        alive = ~dead
        answers = [row[here].tolist() for row, here in zip(drawn, alive, strict=True)]
        return answers, likely[alive].numpy(), logs[alive].numpy()


def _draw(logs: torch.Tensor, heat: torch.Tensor, top_p: float) -> torch.Tensor:
    """A token of each row; the likeliest where its temperature is 0."""
    scaled = logs / heat.clamp(min=1e-3)
    if top_p < 1:
        scaled = TopPLogitsWarper(top_p)(None, scaled)
    noise = torch.empty_like(scaled).exponential_().log()
    return torch.where(heat[:, 0] > 0, (scaled - noise).argmax(-1), logs.argmax(-1))


def train_for(seconds: float, data: Path, out: Path, tokens: int, batch: int) -> dict[str, Any]:
    """Trains an EAGLE-3 head, with as many steps as fit into the time, by the time of some steps.

    Args:
        data: The folder that `write_answers` wrote.
        tokens: Number of tokens that the head drafts, the target's most frequent.
        batch: Answers in each step.

    Returns:
        What `train_head` returns of the last training.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    recipe = Recipe(tokens, 320, 1e-3, _TIMED_STEPS, 50, batch, _TIMED_STEPS, 0, device)

    def run(recipe: Recipe, out: Path) -> dict[str, Any]:
        print(f"training: {recipe.steps} steps", flush=True)
        return train_head(0, recipe, data, out, lambda what, done, total: None)

    run(replace(recipe, steps=3), out.with_name(f"{out.name}-trial"))
    begun = time.monotonic()
    record = run(recipe, out.with_name(f"{out.name}-timed"))
    # The record's hours are those of training and of one validation, without reading.
    each = 3600 * record["hours"] / _TIMED_STEPS
    left = seconds - (time.monotonic() - begun)
    steps = max(_TIMED_STEPS, int(left / each))
    print(f"training: {1e3 * each:.0f} ms a step, {steps} steps", flush=True)
    return run(replace(recipe, steps=steps, validate_every=-(-steps // _VALIDATIONS)), out)
