"""Wishes for tools, and questions of few templates, as chats."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PER_KIND = 10  # questions of each kind of the example's files
_TOOLS = {
    "get_weather": {"city": "string", "day": "string"},
    "book_table": {"restaurant": "string", "guests": "integer", "time": "string"},
    "send_mail": {"to": "string", "subject": "string", "body": "string"},
    "find_flights": {"from": "string", "to": "string", "day": "string"},
}
_SCHEMAS = json.dumps([
    {"name": name, "parameters": {"type": "object", "properties": {
        key: {"type": kind} for key, kind in keys.items()}, "required": list(keys)}}
    for name, keys in _TOOLS.items()
])  # fmt: skip
_SYSTEM = (
    f"You call tools. The tools are: {_SCHEMAS}\n"
    "Answer with one JSON object alone. It has the keys name and arguments."
)
_CITIES = "Lisbon Nairobi Oslo Lima Kyoto Quito Turin Dakar Perth Leeds Porto Izmir Hanoi Graz Cork"
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
_PLACES = "Ash House, Blue Door, Mill Lane, Old Harbour, Red Lion, Green Table, Stone Oven, Luna"
_PEOPLE = "Anna Ben Carla David Emma Felix Grace Hugo Iris Jonas Kira Leo Mona Nils Olga"
_NEWS = (
    "the meeting moves to four o'clock, the report is ready, the train is late, the keys are at "
    "the front desk, the invoice is paid, lunch is at one"
)
_ASKED = ("", "Please help me. ", "Hello! ")  # before a wish


Wish = tuple[str, str]  # what the user says, and the right call


def _wishes() -> Iterator[Wish]:
    """The four tools in turn."""
    cities, days, people = _CITIES.split(), _DAYS.split(), _PEOPLE.split()
    places, news = _PLACES.split(", "), _NEWS.split(", ")
    for at in range(15):
        city, day, name, said = cities[at], days[at % 7], people[at], news[at % 6]
        to, place, guests, time = (
            cities[(at + 4) % 15],
            places[at % 8],
            2 + at % 6,
            f"{17 + at % 5}:30",
        )
        asked = _ASKED[at % 3]
        yield f"{asked}What is the weather in {city} on {day}?", _call(0, city, day)
        yield (
            f"{asked}Book a table for {guests} at {place} at {time}.",
            _call(1, place, guests, time),
        )
        yield (
            f"{asked}Write to {name} that {said}.",
            _call(2, name, said.capitalize(), f"Dear {name}, {said}."),
        )
        yield f"{asked}Find flights from {city} to {to} on {day}.", _call(3, city, to, day)


def _call(tool: int, *values: Any) -> str:
    name = list(_TOOLS)[tool]
    return json.dumps({"name": name, "arguments": dict(zip(_TOOLS[name], values, strict=True))})


def prompts() -> Iterator[tuple[str, str, list[dict[str, Any]], str | None]]:
    """The group, the kind and the messages of each; and the answer, unless the model gives it."""
    system, wishes = {"role": "system", "content": _SYSTEM}, list(_wishes())
    for at, (wish, call) in enumerate(wishes):
        last = {"role": "user", "content": wish}
        kind = list(_TOOLS)[at % 4]
        yield "wishes", kind, [system, last], None
        yield "first calls", kind, [system, last], call
        talk = [system]
        for one, made in (wishes[at - 7], wishes[at - 4]):  # of another tool, and of this one
            talk += [{"role": "user", "content": one}, {"role": "assistant", "content": made}]
        yield "later calls", kind, [*talk, last], None
    taken: dict[str, int] = {}
    for file in ("echoes", "questions"):
        for line in Path(f"examples/smollm2/{file}.jsonl").read_text("utf-8").splitlines():
            asked = json.loads(line)
            kind = asked["kind"]
            if kind in _KINDS and taken.get(kind, 0) < PER_KIND:
                taken[kind] = taken.get(kind, 0) + 1
                single = [{"role": "user", "content": asked.get("prompt")}]
                yield "questions", kind, asked.get("messages", single), None


_KINDS = ("quote", "edit", "JSON", "multi-turn", "chat", "arithmetic")  # of the round before
