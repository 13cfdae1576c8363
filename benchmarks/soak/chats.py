"""What random requests ask a model: chats in its own template, or the embedded pair's prompts."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from sequoia_vllm.prompts import load_prompts
from tests.support.train_drafter import script_modules


def prompts_for(model: str, count: int = 100) -> list[str]:
    """Held-out prompts of `examples/train_drafter` for models that chat, else those of the pair."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        loaded = load_prompts(Path("examples/models/prompts.jsonl"), 32)
        return [prompt.prompt for prompt in loaded if prompt.prompt is not None]
    with script_modules("chat_prompts") as scripts:
        asked = scripts.chat_prompts.prompts(True, count, seed=3)
    chats = [[{"role": "user", "content": one.text}] for one in asked]
    return [
        str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        for chat in chats
    ]
