"""Simulates requests that arrive at an H200: what adaptation loses of what is possible.

    python -m benchmarks.arrivals --out arrivals.json

Steps take what they took on an H200 (`tests.support.h200_arrivals`). The oracle knows the fastest
number of drafts at each batch size. Each error is that of the times measured at start.
"""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks import markdown_table
from sequoia_vllm.cli.measuring import numbers
from sequoia_vllm.measuring.provenance import provenance
from tests.support import h200_arrivals as h200

app = typer.Typer(add_completion=False)
_UNTIL = (2.0, 5.0, 30.0, 120.0)  # seconds


@app.command()
def arrivals(
    rates: Annotated[str, typer.Option(help="Comma-separated requests a second.")] = "16,48",
    seconds: Annotated[float, typer.Option(help="Length of a trace.")] = 30.0,
    seeds: Annotated[int, typer.Option(help="Traces of each rate.")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Serves traces with the controller; prints the lost share of the oracle's capacity."""
    rows = []
    for rate in numbers("--rates", rates):
        for error in (0.02, 0.1):
            rows.append(_row(rate, error, seconds, seeds))
            typer.echo(json.dumps(rows[-1]))
    shown = [[str(value) for value in row.values()] for row in rows]
    typer.echo(markdown_table(list(rows[0]), shown))
    if out is not None:
        out.write_text(json.dumps({"rows": rows, "provenance": provenance()}, indent=1) + "\n")


def _row(rate: int, error: float, seconds: float, seeds: int) -> dict[str, float]:
    oracle, lost, answers = h200.oracle(rate), [], []
    until = [end for end in _UNTIL if end <= seconds]
    for seed in range(seeds):
        controlled = h200.controller(h200.table(error, np.random.default_rng(seed + 99)))
        trace = h200.arrivals(rate, seconds, seed)
        steps = h200.serve(controlled.lookup, controlled.observe, trace, seed + 1)
        lost.append([oracle.lost(steps, end) for end in until])
        answers.append(np.mean([request.last - request.arrival for request in trace]))
    shares = np.mean(lost, axis=0).round(4).tolist()
    return {
        "arrivals a second": rate,
        "error of times": error,
        **{f"lost in {end:g} s": share for end, share in zip(until, shares, strict=True)},
        "answer, ms": round(1e3 * float(np.mean(answers)), 1),
    }


if __name__ == "__main__":
    app()
