"""What random requests ask a model: chats in its own template, or the embedded pair's prompts."""

from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.embedded_pair import PROMPTS
from sequoia_vllm.prompts import load_prompts
from tests.support.train_drafter import script_modules


def prompts_for(model: str, chats: int = 100, pieces: int = 32) -> list[str]:
    """Held-out prompts: ``chats`` of the trainer if it chats, else ``pieces`` of the pair."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        loaded = load_prompts(Path(PROMPTS), pieces)
        return [prompt.prompt for prompt in loaded if prompt.prompt is not None]
    with script_modules("chat_prompts") as scripts:
        asked = scripts.chat_prompts.prompts(True, chats, seed=3)
    return [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": one.text}], add_generation_prompt=True, tokenize=False
            )
        )
        for one in asked
    ]
