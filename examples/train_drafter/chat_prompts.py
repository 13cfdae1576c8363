"""Prompts of several kinds, put together from words that were written here.

Every eighth word of each list is kept for validation, so that no held-out prompt has a
subject that was learnt from. Every second prompt can be left to the target: chat models
write questions as well as answers.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.prompts import Prompt, numbered_prompts

HELD_OUT = 8  # every so many words, and every so many lines of a file
WORDS = json.loads((Path(__file__).parent / "chat_words.json").read_text("utf-8"))


def _summary(word: Callable[[str], str], number: Callable[[int], int]) -> str:
    year, place = number(40) + 1980, word("places")
    passage = (
        f"In {year}, {word('people')} in {place} {word('events')}. {word('results')} "
        f"{word('results')} Meanwhile, {word('people')} {word('events')}. {word('results')}"
    )
    return word("summarizing").format(passage)


def _arithmetic(word: Callable[[str], str], number: Callable[[int], int]) -> str:
    a, b, c = number(90) + 10, number(90) + 10, number(8) + 2
    person, thing = word("people"), word("things")
    return word("sums").format(person=person, thing=thing, a=a, b=b, c=c, sum=a + b, line=b + c * a)


KINDS = (
    lambda word, number: word("asking").format(word("topics")),
    _summary,
    lambda word, number: word("coding").format(word("tasks")),
    lambda word, number: f"Translate to {word('tongues')}: {word('sentences')} {word('sentences')}",
    _arithmetic,
)


def prompts(held_out: bool, count: int, seed: int, own: bool = False) -> list[Prompt | None]:
    """``count`` prompts, the kinds in turn; the same for the same arguments. If ``own``, every
    second one is None, for the target to write."""
    source = random.Random(f"{seed} {held_out}")

    def word(name: str) -> str:
        words = WORDS[name]
        # Templates are few: only what they are filled with is held out.
        if len(words) <= 2 * HELD_OUT:
            return source.choice(words)
        return source.choice(
            [one for place, one in enumerate(words) if (place % HELD_OUT == 0) == held_out]
        )

    every = 2 if own else 1
    written = (
        Prompt(prompt=KINDS[turn % len(KINDS)](word, source.randrange)) for turn in range(count)
    )
    return [next(written) if place % every == 0 else None for place in range(count)]


def read_prompts(path: Path, held_out: bool, count: int, seed: int) -> list[Prompt]:
    """Prompts of the user's own, lines of ``{"prompt": …}`` or ``{"messages": …}``: every eighth
    line if ``held_out``, or else the others."""
    lines = [one for _, one in numbered_prompts(path)]
    chosen = [one for place, one in enumerate(lines) if (place % HELD_OUT == 0) == held_out]
    if not chosen:
        raise SequoiaError(f"{path} has {len(lines)} prompts: at least 2 are needed")
    random.Random(seed).shuffle(chosen)
    return chosen[:count]
