"""Prompts of several kinds, put together from words that were written here.

Every eighth word of each list is kept for validation, so that no held-out prompt has a
subject that was learnt from. Every second prompt can be left to the target: chat models
write questions as well as answers.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from errors import PairError
from pydantic import Field

from sequoia_vllm.prompts import Message, PromptError, numbered_prompts
from sequoia_vllm.prompts import Prompt as Given

HELD_OUT = 8  # every so many words, and every so many lines of a file
OWN = "own question"  # the kind of prompts that the target writes
WORDS = json.loads((Path(__file__).parent / "chat_words.json").read_text("utf-8"))


@dataclass(frozen=True)
class Prompt:
    """One question or conversation, and its kind.

    Attributes:
        messages: A conversation, instead of a question.
        line: Its line in the user's file, from 1; 0: there is none.
    """

    kind: str
    text: str
    messages: tuple[Message, ...] = ()
    line: int = 0


class _Line(Given):
    """A line of the user's file."""

    kind: str = Field(default="given", min_length=1)


def _chat(word: Callable[[str], str], number: Callable[[int], int]) -> str:
    return word("asking").format(word("topics"))


def _summary(word: Callable[[str], str], number: Callable[[int], int]) -> str:
    year, place = number(40) + 1980, word("places")
    passage = (
        f"In {year}, {word('people')} in {place} {word('events')}. {word('results')} "
        f"{word('results')} Meanwhile, {word('people')} {word('events')}. {word('results')}"
    )
    return word("summarizing").format(passage)


def _code(word: Callable[[str], str], number: Callable[[int], int]) -> str:
    return word("coding").format(word("tasks"))


def _translation(word: Callable[[str], str], number: Callable[[int], int]) -> str:
    return f"Translate to {word('tongues')}: {word('sentences')} {word('sentences')}"


def _arithmetic(word: Callable[[str], str], number: Callable[[int], int]) -> str:
    a, b, c = number(90) + 10, number(90) + 10, number(8) + 2
    person, thing = word("people"), word("things")
    return word("sums").format(person=person, thing=thing, a=a, b=b, c=c, sum=a + b, line=b + c * a)


KINDS = {
    "chat": _chat, "summary": _summary, "code": _code, "translation": _translation,
    "arithmetic": _arithmetic,
}  # fmt: skip


def prompts(held_out: bool, count: int, seed: int, own: bool = False) -> list[Prompt]:
    """Returns ``count`` prompts, the kinds in turn; the same for the same arguments.

    Args:
        own: Whether every second one is an empty prompt of kind `OWN`, for the target to write.
    """
    source = random.Random(f"{seed} {held_out}")

    def word(name: str) -> str:
        words = WORDS[name]
        # Templates are few: only what they are filled with is held out.
        if len(words) <= 2 * HELD_OUT:
            return source.choice(words)
        return source.choice(
            [one for place, one in enumerate(words) if (place % HELD_OUT == 0) == held_out]
        )

    kinds, every = list(KINDS.items()), 2 if own else 1
    written = (
        Prompt(name, write(word, source.randrange))
        for name, write in (kinds[turn % len(kinds)] for turn in range(count))
    )
    return [next(written) if place % every == 0 else Prompt(OWN, "") for place in range(count)]


def read_prompts(path: Path, held_out: bool, count: int, seed: int) -> list[Prompt]:
    """Prompts of the user's own, with their kinds if they have any.

    Args:
        path: Lines of ``{"prompt": …}`` or ``{"messages": …}``, perhaps with a ``"kind"``.
        held_out: Whether every eighth line is wanted, or the others.

    Raises:
        PairError: If a line is wrong, whether it is wanted or not; names it.
    """
    try:
        lines = numbered_prompts(path, _Line)
    except PromptError as error:
        raise PairError(str(error)) from error
    chosen = [one for place, one in enumerate(lines) if (place % HELD_OUT == 0) == held_out]
    if not chosen:
        raise PairError(f"{path} has {len(lines)} prompts: at least 2 are needed")
    random.Random(seed).shuffle(chosen)
    return [
        Prompt(one.kind, one.prompt or "", one.messages or (), number)
        for number, one in chosen[:count]
    ]
