"""What one step of an engine in this process costs: what it launches, copies, and calls of ours."""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import sequoia_vllm
from tests.v2.launches import DRAFT, counted_launches

_OURS = str(Path(sequoia_vllm.__file__).parent / "engine") + os.sep
# What these do goes by the clock: reports, and lines of the log.
_BY_THE_CLOCK = "frontend/", "hooks/"
_BEFORE = 3  # tokens that each request has when a step is counted: no prompt is left
CALLS = "calls of ours"


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Calls of the engine's functions of ours in this thread, by file and name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_OURS):
            inside = file.removeprefix(_OURS)
            calls[f"{inside}: {frame.f_code.co_name}"] += not inside.startswith(_BY_THE_CLOCK)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def decoding_step(llm: Any, prompts: Sequence[Any], params: Sequence[Any]) -> dict[str, Any]:
    """Counts one step in which these requests decode, and ends them.

    Returns:
        "launches": operators, kernels, and copies from the host, by name; those of a draft's pass
        together. "calls": see `counted_calls`. An operator stands for what a GPU would launch.
    """
    engine = llm.llm_engine
    names = [f"counted-{index}" for index in range(len(prompts))]
    for name, prompt, one in zip(names, prompts, params, strict=True):
        engine.add_request(name, prompt, one)
    tokens = dict.fromkeys(names, 0)
    while min(tokens.values()) < _BEFORE:
        for output in engine.step():
            assert not output.finished, "it ended before the step"
            tokens[output.request_id] = len(output.outputs[0].token_ids)
    with counted_calls() as calls, counted_launches() as launches:
        outputs = engine.step()
    assert {output.request_id for output in outputs} == set(names)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    found: Counter[str] = Counter()
    for (group, _place, name), count in launches.counts.items():
        found[DRAFT if group == DRAFT else name] += count
    return {"launches": dict(found), "calls": dict(calls)}


def surplus(ours: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, int]:
    """Launches that plain vLLM's step has not, by name, and how often the step calls us."""
    more = Counter(ours["launches"]) - Counter(plain["launches"])
    return {**dict(sorted(more.items())), CALLS: sum(ours["calls"].values())}
