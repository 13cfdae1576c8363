"""The pair in ``examples/models``, and its prompts."""

from pathlib import Path

TARGET, DRAFT = "examples/models/target", "examples/models/draft"
PROMPTS = "examples/models/prompts.jsonl"


def encoded_prompts(count: int) -> list[list[int]]:
    """Token ids of its first prompts; 200 at most. A synthetic target's are the same."""
    from sequoia_vllm.prompts import encode_prompts, load_prompts, load_tokenizer

    return encode_prompts(load_prompts(Path(PROMPTS), count), load_tokenizer(TARGET))
