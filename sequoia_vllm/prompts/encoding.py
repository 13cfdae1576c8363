"""Token ids of prompts, as a server that gets them in requests would make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sequoia_vllm.prompts.files import Prompt, PromptError


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model, by name or path.

    Raises:
        PromptError: If there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise PromptError(f"no tokenizer for the target {model!r}: {error}") from error


def has_chat_template(tokenizer: Any) -> bool:
    """Whether prompts of this tokenizer's model are conversations."""
    return bool(getattr(tokenizer, "chat_template", None))


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, *, raw: bool = False
) -> list[list[int]]:
    """Token ids of each prompt.

    A bare prompt is the user's turn of a conversation where the tokenizer has a
    chat template, since that is what its model was trained to answer.

    Args:
        prompts: Texts and conversations.
        tokenizer: The target's, as `transformers` gives it.
        raw: Encode bare prompts as they are, also where there is a template.

    Raises:
        PromptError: If a conversation is given and there is no template, the
            template refuses it, or a prompt has no tokens.
    """
    encoded = [_encode(prompt, tokenizer, raw) for prompt in prompts]
    for number, tokens in enumerate(encoded, start=1):
        if not tokens:
            raise PromptError(f"prompt {number} has no tokens in the target's vocabulary")
    return encoded


def _encode(prompt: Prompt, tokenizer: Any, raw: bool) -> list[int]:
    template = has_chat_template(tokenizer)
    if prompt.prompt is not None and (raw or not template):
        return list(tokenizer.encode(prompt.prompt))
    if not template:
        raise PromptError(
            "the prompts are conversations, but the target's tokenizer has no chat template: "
            'give bare texts ({"prompt": "text"})'
        )
    return list(_apply_template(_messages(prompt), tokenizer))


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    if prompt.messages is None:
        return [{"role": "user", "content": prompt.prompt or ""}]
    return [message.model_dump() for message in prompt.messages]


def _apply_template(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # jinja2's, raised by what the template itself checks
        raise PromptError(f"the target's chat template refuses a prompt: {error}") from error
    return ids
