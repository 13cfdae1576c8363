"""Prompts for measuring: files, the built-in set, and their token ids.

Pure: the tokenizer is an argument (`encode_prompts`); only `load_tokenizer`
imports transformers.
"""

from sequoia_vllm.prompts.encoding import encode_prompts, load_tokenizer
from sequoia_vllm.prompts.files import (
    Message,
    Prompt,
    PromptError,
    load_prompts,
    prompts_sha256,
    source_name,
)

__all__ = [
    "Message",
    "Prompt",
    "PromptError",
    "encode_prompts",
    "load_prompts",
    "load_tokenizer",
    "prompts_sha256",
    "source_name",
]
