"""Counts steps of JSON answers whose drafts come from the grammar alone.

    python -m benchmarks.forced_tokens TOKENIZER

Drafts are what `StandIns` would choose: the longest of eight tokens or fewer that are allowed. They
are known for the step's own root (V1), or for the root of the step before (V2).
"""

import json
import sys
from typing import Any

import numpy as np
import xgrammar
from transformers import AutoTokenizer

from sequoia_vllm.engine.core.grammar import MOST_ALLOWED
from tests.support.thinking import SCHEMA

FIELDS = {
    "customer_name": "string", "street_address": "string", "delivery_date": "string",
    "express_delivery": "boolean", "total_price": "number",
}  # fmt: skip
CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["weather", "population", "price", "translate"]},
        "arguments": {
            "type": "object",
            "properties": {"value": {"type": "string", "maxLength": 24}},
            "required": ["value"],
        },
    },
    "required": ["name", "arguments"],
}
ORDER = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in FIELDS.items()},
    "required": list(FIELDS),
}
ANSWERS: dict[str, tuple[Any, list[Any]]] = {
    "a tool's call": (
        CALL,
        [
            {"name": name, "arguments": {"value": value}}
            for name, value in (
                ("weather", "Lisbon"), ("population", "Nairobi"), ("price", "bicycle"),
                ("translate", "river"),
            )
        ],
    ),
    "a name and numbers": (
        SCHEMA,
        [
            {"name": name, "sizes": sizes}
            for name, sizes in (("ash", [1, 2, 3]), ("return", [12, 40]), ("The river", []))
        ],
    ),
    "an order": (
        ORDER,
        [
            dict(zip(FIELDS, values, strict=True))
            for values in (
                ("Mary Hill", "4 Mill Lane, Ashford", "2026-11-29", False, 41.5),
                ("Joao Silva", "12 Old School Road", "1 December", True, 7),
            )
        ],
    ),
}  # fmt: skip


class Counter:
    """Steps of one tokenizer's answers."""

    def __init__(self, path: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._size = len(self._tokenizer)
        texts = self._tokenizer.convert_ids_to_tokens(list(range(self._size)))
        self._lengths = [len(text or "") for text in texts]
        info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._size)
        self._compiler = xgrammar.GrammarCompiler(info)
        self._mask = xgrammar.allocate_token_bitmask(1, self._size)

    def count(self, schema: Any, answers: list[Any], depth: int) -> dict[str, Any]:
        """Tokens per step, with drafts that are known at once, and a step late."""
        grammar = self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        encode, end = self._tokenizer.encode, self._tokenizer.eos_token_id
        tokens = [[*encode(json.dumps(answer)), end] for answer in answers]
        total = sum(map(len, tokens))
        steps = [
            sum(self._steps(grammar, each, depth, late) for each in tokens)
            for late in (False, True)
        ]
        return {"tokens": total, "per step": [round(total / count, 2) for count in steps]}

    def _steps(self, grammar: Any, tokens: list[int], depth: int, late: bool) -> int:
        matcher = xgrammar.GrammarMatcher(grammar, max_rollback_tokens=64)
        done = steps = 0
        before: tuple[list[int], list[int]] = [], [-1]  # drafts of the last root; emitted since
        while done < len(tokens):
            forced = self._forced(matcher, 2 * depth + 2)
            drafts = forced
            if late:
                known, emitted = before
                follows = known[: len(emitted)] == emitted
                drafts = known[len(emitted) :] if follows else []
            count = 0
            for draft, token in zip(drafts[:depth], tokens[done:-1], strict=False):
                if draft != token:
                    break
                count += 1
            emitted = tokens[done : done + count + 1]
            for token in emitted:
                if not matcher.accept_token(token):
                    raise ValueError(f"the schema forbids token {token}")
            before, done, steps = (forced, emitted), done + count + 1, steps + 1
        return steps

    def _forced(self, matcher: Any, longest: int) -> list[int]:
        found: list[int] = []
        while len(found) < longest and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(self._mask)
            bits = np.unpackbits(self._mask.numpy().view(np.uint8)[0], bitorder="little")
            allowed = np.flatnonzero(bits[: self._size]).tolist()
            if not 0 < len(allowed) <= MOST_ALLOWED:
                break
            found.append(max(allowed, key=lambda token: (self._lengths[token], -token)))
            if not matcher.accept_token(found[-1]):
                raise ValueError("the grammar allows what it does not accept")
        if found:
            matcher.rollback(len(found))
        return found


def main() -> None:
    """Prints a row for each kind of answer and depth."""
    counter = Counter(sys.argv[1])
    for name, (schema, answers) in ANSWERS.items():
        for depth in (4, 6, 8):
            print(name, depth, counter.count(schema, answers, depth))


if __name__ == "__main__":
    main()
