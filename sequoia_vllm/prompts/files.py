"""Prompt files: one prompt per line, as JSON or as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_input import parse_json

BUILTIN = Path(__file__).with_name("builtin.jsonl")
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
    """A bare text or a conversation: exactly one of the two.

    Attributes:
        prompt: Text to continue or to answer.
        messages: Conversation whose next turn is generated.
    """

    prompt: str | None = Field(default=None, min_length=1)
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_of_both(self) -> Prompt:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError(f"a line holds {_LINE_HELP}")
        if self.messages is not None and self.messages[-1].role == "assistant":
            raise ValueError(
                "the last message is the assistant's, which is to be generated: cut it"
            )
        return self


def load_prompts(path: Path | None, count: int | None = None) -> list[Prompt]:
    """The prompts of a file, or those that come with the package.

    Args:
        path: ``.jsonl`` (a "prompt" or "messages" per line) or ``.txt`` (one
            prompt per line); blank lines are skipped. None: the built-in set,
            64 questions, instructions, dialogues and pieces of code.
        count: Take the first so many; None: all.

    Raises:
        PromptError: If the file is missing, has another format, is empty or
            holds fewer than ``count`` prompts; names the line that is wrong.
    """
    if count is not None and count < 1:
        raise PromptError(f"{count} prompts asked for: at least one is needed")
    file = BUILTIN if path is None else path
    parse = _parser(file)
    numbered = enumerate(_read(file).split("\n"), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()][:count]
    prompts = [parse(line, f"prompts {file}, line {number}") for number, line in lines]
    if not prompts or (count is not None and len(prompts) < count):
        raise PromptError(
            f"prompts {file} holds {len(prompts)} prompts, not {count or 'any'}: "
            "give a larger file with --prompts, or ask for fewer"
        )
    return prompts


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the prompts' content, whatever file they came from; hexadecimal."""
    content = [prompt.model_dump(exclude_none=True) for prompt in prompts]
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def source_name(path: Path | None) -> str:
    """How a measurement names its prompts: the file's name, without its directories."""
    return "built-in" if path is None else path.name


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(
            f"cannot read prompts {path}: {error.strerror or error}; name a file with --prompts"
        ) from error
    except UnicodeDecodeError as error:
        raise PromptError(f"prompts {path} is not UTF-8 text: {error}") from error


def _parser(path: Path) -> Callable[[str, str], Prompt]:
    parsers = {".jsonl": _parse_json, ".txt": _parse_text}
    if path.suffix.lower() not in parsers:
        raise PromptError(
            f"prompts {path}: give a .jsonl file with {_LINE_HELP} per line, or a .txt file with "
            "one prompt per line"
        )
    return parsers[path.suffix.lower()]


def _parse_text(line: str, where: str) -> Prompt:
    return Prompt(prompt=line.rstrip("\r"))


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
