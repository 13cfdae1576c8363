"""Prompts for measuring: files, the built-in set, and their token ids.

A file has one prompt per line, as JSON or as text. Only `load_tokenizer` imports transformers.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_input import parse_json
from sequoia_vllm.model_source import hub_problem

BUILTIN = Path(__file__).with_name("builtin_prompts.jsonl")
_LINE_HELP = '{"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'


class PromptError(SequoiaError, ValueError):
    """Prompts that cannot be used; the message names the fix."""


class _Line(BaseModel):
    """Unknown keys are allowed: data sets carry ids, sources and answers beside their prompts."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Message(_Line):
    """One turn of a conversation."""

    role: str = Field(min_length=1)
    content: str


class Prompt(_Line):
    """A bare text or a conversation: exactly one of the two."""

    prompt: str | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError(f"a line holds {_LINE_HELP}")
        if self.messages is not None and self.messages[-1].role == "assistant":
            raise ValueError(
                "the last message is the assistant's, which is to be generated: cut it"
            )
        return self


def load_prompts(path: Path | None, count: int | None = None) -> list[Prompt]:
    """Reads the prompts of a file, or those that come with the package.

    Args:
        path: ``.jsonl`` (a "prompt" or "messages" per line) or ``.txt`` (one prompt per line).
            None: the built-in set, 64 questions, instructions, dialogues and pieces of code.
        count: Take the first so many; None: all.

    Raises:
        PromptError: The file cannot be used, or has too few; the message names a wrong line.
    """
    if count is not None and count < 1:
        raise PromptError(f"{count} prompts asked for: at least one is needed")
    file = BUILTIN if path is None else path
    prompts = [prompt for _, prompt in numbered_prompts(file, count)]
    if not prompts or (count is not None and len(prompts) < count):
        raise PromptError(
            f"prompts {file} holds {len(prompts)} prompts, not {count or 'any'}: "
            "give a larger file with --prompts, or ask for fewer"
        )
    return prompts


def numbered_prompts(file: Path, count: int | None = None) -> list[tuple[int, Prompt]]:
    """Reads the first ``count`` prompts of a file (None: all), with the numbers of their lines.
    It refuses a file that is missing or has another format, and names the line."""
    if file.suffix.lower() not in (".jsonl", ".txt"):
        raise PromptError(
            f"prompts {file}: give a .jsonl file with {_LINE_HELP} per line, or a .txt file with "
            "one prompt per line"
        )
    is_text = file.suffix.lower() == ".txt"
    numbered = enumerate(_read(file).split("\n"), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()][:count]
    if is_text:
        return [(number, Prompt(prompt=line.rstrip("\r"))) for number, line in lines]
    return [(number, _parse_json(line, f"prompts {file}, line {number}")) for number, line in lines]


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts' content, whatever file they came from; hexadecimal."""
    content = [prompt.model_dump(exclude_none=True) for prompt in prompts]
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def describe_prompts(path: Path | None, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Name and hash of a measurement's prompts: the file's name, without its directories."""
    name = "built-in" if path is None else path.name
    return {"prompts": name, "prompts_sha256": prompts_sha256(prompts)}


def _read(path: Path) -> str:
    data = b""
    try:
        data = path.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise PromptError(
            f"cannot read prompts {path}: {error.strerror or error}; name a file with --prompts"
        ) from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise PromptError(f"prompts {path}, line {line} is not UTF-8 text: {error}") from error


def _parse_json(line: str, where: str) -> Prompt:
    try:
        return Prompt.model_validate(parse_json(line))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        raise PromptError(f"{where}: {field + ': ' if field else ''}{message}") from error
    except ValueError as error:
        raise PromptError(f"{where} is not JSON ({error}): every line is {_LINE_HELP}") from error


def load_tokenizer(model: str) -> Any:
    """Loads the tokenizer of a model, by name or path.

    Raises:
        PromptError: There is none; the message says why.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (ValueError, OSError) as error:
        is_here = Path(model).exists()
        why = f" {model!r}: {error}" if is_here else f": {hub_problem(model, error)}"
        raise PromptError(f"no tokenizer for the target{why}") from error


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, *, raw: bool = False
) -> list[list[int]]:
    """Encodes prompts, as a server would that gets them in requests.
    A bare prompt is the user's turn of a conversation where the tokenizer has a chat template,
    unless ``raw``.

    Raises:
        PromptError: A conversation has no template or it refuses one, or a prompt has no tokens.
    """
    encoded = [_encode(prompt, tokenizer, raw) for prompt in prompts]
    for number, tokens in enumerate(encoded, start=1):
        if not tokens:
            raise PromptError(f"prompt {number} has no tokens in the target's vocabulary")
    return encoded


def _encode(prompt: Prompt, tokenizer: Any, raw: bool) -> list[int]:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if prompt.prompt is not None and (raw or not has_template):
        return list(tokenizer.encode(prompt.prompt))
    if not has_template:
        raise PromptError(
            "the prompts are conversations, but the target's tokenizer has no chat template: "
            'give bare texts ({"prompt": "text"})'
        )
    messages = [{"role": "user", "content": prompt.prompt or ""}]
    if prompt.messages is not None:
        messages = [message.model_dump() for message in prompt.messages]
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # jinja2's, raised by what the template itself checks
        raise PromptError(f"the target's chat template refuses a prompt: {error}") from error
    return list(ids)
