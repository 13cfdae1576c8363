"""Compares a target's drafters on Model Runner V2, whose kernels are interpreted.

    python -m benchmarks.drafters --prompts 24 --tokens 64
    python -m benchmarks.drafters --model TARGET --drafters eagle3=HEAD dflash=HEAD

Tokens per step do not depend on how long a step takes: this needs no GPU. Nothing here
says anything about speed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.drafters.engine import HOW, METHODS, MODELS, TEMPERATURES, tokens_per_step
from benchmarks.markdown import markdown_table
from tests.support.on_v2 import call_on_v2


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODELS / "target"), help="folder of the target")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4, help="passes of the draft per step")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument(
        "--drafters", nargs="+", default=list(METHODS), metavar="KIND[=FOLDER]",
        help=f"of {', '.join(METHODS)}; default folders are those in examples/models",
    )  # fmt: skip
    parser.add_argument("--how", nargs="+", default=list(HOW), choices=HOW)
    parser.add_argument("--temperatures", nargs="+", type=float, default=list(TEMPERATURES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = {}
    for kind, equals, folder in (one.partition("=") for one in options.drafters):
        draft = folder if equals else str(MODELS / kind)
        for how in options.how:
            with tempfile.TemporaryDirectory() as directory:
                rows[f"{kind}, {how}"] = call_on_v2(
                    tokens_per_step, Path(directory), timeout=3600, target=options.model,
                    kind=METHODS[kind], draft=draft, how=how, depth=options.depth,
                    nodes=options.nodes, count=options.prompts, tokens=options.tokens,
                    temperatures=options.temperatures,
                )  # fmt: skip
            print(f"{kind}, {how}: {rows[f'{kind}, {how}']}", file=sys.stderr)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    names = [f"{temperature:g}" for temperature in options.temperatures]
    cells = [
        [row, *("{:.2f} ± {:.2f}".format(*values[n]) if n in values else "" for n in names)]
        for row, values in rows.items()
    ]
    print(markdown_table(["drafter", *(f"T = {name}" for name in names)], cells))


if __name__ == "__main__":
    main()
