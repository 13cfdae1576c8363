"""Compares drafters of the embedded target on Model Runner V2, whose kernels are interpreted.

    python -m benchmarks.drafters --prompts 24 --tokens 64

Tokens per step do not depend on how long a step takes: this needs no GPU. Nothing here
says anything about speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.drafters.engine import METHODS, TEMPERATURES, tokens_per_step
from tests.support.on_v2 import call_on_v2


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4, help="passes of the draft per step")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--drafters", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = {}
    for folder in options.drafters:
        for how in ("chain", "drawn chain", "tree"):
            with tempfile.TemporaryDirectory() as directory:
                rows[f"{folder}, {how}"] = call_on_v2(
                    tokens_per_step, Path(directory), timeout=3600, folder=folder, how=how,
                    depth=options.depth, nodes=options.nodes, count=options.prompts,
                    tokens=options.tokens,
                )  # fmt: skip
            print(f"{folder}, {how}: {rows[f'{folder}, {how}']}", file=sys.stderr)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    names = [f"{temperature:g}" for temperature in TEMPERATURES]
    print("| drafter | " + " | ".join(f"T = {name}" for name in names) + " |")
    print("|---|" + "---|" * len(names))
    for row, values in rows.items():
        cells = [f"{values[name]:.2f}" if name in values else "" for name in names]
        print(f"| {row} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
