"""Simulates requests that arrive at an H200: what adaptation loses of what is possible.

    python -m benchmarks.arrivals --out arrivals.json

Steps take what they took on an H200 (`tests.support.h200_arrivals`). An oracle knows the fastest
number of drafts at each batch size. There are two: they count steps that read prompts differently.
One table has 3 drafts for 20 requests or more: the two oracles do not agree on what that loses. The
learning oracle knows all times, and must count acceptance like the controller. Each error is that
of the times measured at start; "none": nothing was measured.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import markdown_table
from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.cli.measuring import numbers
from sequoia_vllm.measuring.provenance import provenance
from tests.support import h200_arrivals as h200

app = typer.Typer(add_completion=False)
_UNTIL = (2.0, 5.0, 30.0, 120.0)  # seconds
_ERRORS = (0.02, 0.1, None)
_LEARNING, _FEWER = "learning oracle", "oracle, 3 drafts from 20 requests on"


@app.command()
def arrivals(
    rates: Annotated[str, typer.Option(help="Comma-separated requests a second.")] = "16,48",
    seconds: Annotated[float, typer.Option(help="Length of a trace.")] = 30.0,
    seeds: Annotated[int, typer.Option(help="Traces of each rate.")] = 5,
    first: Annotated[int, typer.Option(help="The first seed; tests take those from 0.")] = 1000,
    oracles: Annotated[bool, typer.Option(help="Without the controller.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Serves traces with the controller; prints the lost share of the oracle's capacity."""
    rows = []
    for rate in numbers("--rates", rates):
        learners = () if oracles else _ERRORS
        for policy in ("oracle", "oracle, fixed share", _FEWER, _LEARNING, *learners):
            rows.append(_row(rate, policy, seconds, range(first, first + seeds)))
            typer.echo(json.dumps(rows[-1]))
    shown = [[str(value) for value in row.values()] for row in rows]
    typer.echo(markdown_table(list(rows[0]), shown))
    if out is not None:
        out.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")


def _row(rate: int, policy: str | float | None, seconds: float, seeds: range) -> dict[str, object]:
    """Serves by a table, or by what learns."""
    oracles = {"": h200.oracle(rate), ", fixed share": h200.oracle(rate, fixed_share=True)}
    lookups = {f"oracle{name}": oracle.lookup for name, oracle in oracles.items()}
    lookups[_FEWER] = lookups["oracle"][:20] + [3] * (h200.MOST_RUNNING - 19)
    until = [end for end in _UNTIL if end <= seconds]
    lost: dict[str, list[float]] = {}
    answers = []
    for seed in seeds:
        trace = h200.arrivals(rate, seconds, seed)
        if policy in lookups:
            steps = h200.serve(lookups[policy], None, trace, seed + 1)
        else:
            served = _learner(oracles[""], policy, np.random.default_rng(seed + 99))
            steps = h200.serve(served.lookup, served.observe, trace, seed + 1)
        for name, oracle in oracles.items():
            for end in until:
                lost.setdefault(f"lost in {end:g} s{name}", []).append(oracle.lost(steps, end))
        answers.append(np.mean([request.last - request.arrival for request in trace]))
    return {
        "arrivals a second": rate,
        "table, or error of times": "none" if policy is None else policy,
        **{name: round(float(np.mean(shares)), 4) for name, shares in lost.items()},
        "answer, ms": round(1e3 * float(np.mean(answers)), 1),
    }


def _learner(
    oracle: h200.Oracle, policy: str | float | None, rng: np.random.Generator
) -> h200.LearningOracle | DraftController:
    """The learning oracle, or a controller with this error of its times."""
    if isinstance(policy, str):
        return h200.LearningOracle(oracle)
    return h200.controller(None if policy is None else h200.table(policy, rng))


if __name__ == "__main__":
    app()
