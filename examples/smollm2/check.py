"""Whether a folder holds the model that was measured: its weights, and what it answers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.smollm2.convert import weights_hash
from examples.smollm2.errors import ModelError

RECORDED = Path(__file__).parent / "recorded.json"


@dataclass(frozen=True)
class Recorded:
    """What the measured model is.

    Attributes:
        weights: `weights_hash` of its weights.
        answers: The first greedy tokens of its answer to each question, in float32. They end
            before any token whose lead over the next likely one is below 0.2 (logits), so
            that rounding elsewhere cannot change them.
    """

    weights: str
    answers: dict[str, list[int]]


def recorded(path: Path = RECORDED) -> Recorded:
    """Reads the record."""
    return Recorded(**json.loads(path.read_text("utf-8")))


def check_weights(folder: Path, expected: str) -> None:
    """Compares the weights with those that were measured."""
    found = weights_hash(folder)
    if found != expected:
        raise ModelError(
            f"wrong hash: the weights in {folder} have {found}, and those that were measured have "
            f"{expected}; run again with --force"
        )


def greedy_answers(
    folder: Path, answers: dict[str, list[int]], on_answer: Callable[[], None]
) -> dict[str, list[int]]:
    """Greedy tokens to the same questions, as many as are recorded; float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for question, tokens in answers.items():
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        text = model.generate(**asked, max_new_tokens=len(tokens), do_sample=False)
        found[question] = text[0, asked["input_ids"].shape[1] :].tolist()
        on_answer()
    return found


def agreement(found: dict[str, list[int]], answers: dict[str, list[int]]) -> int:
    """In how many answers all recorded tokens are the model's."""
    return sum(found[question] == tokens for question, tokens in answers.items())
