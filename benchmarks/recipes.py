"""Counts how many models of vLLM's recipes have a family that trees serve.

``python -m benchmarks.recipes`` counts the names in ``recipes.txt``, beside this file. With a
checkout of github.com/vllm-project/recipes (``python -m benchmarks.recipes CHECKOUT``) it first
writes this list anew. Models of vLLM-Omni and embedding models are left out. A model's name tells
its family, so the count says nothing of what was run.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sequoia_vllm.hardware.families import family_file, family_of

LIST = Path(__file__).with_name("recipes.txt")
REFUSED, NO_ROW = "refused", "in no row"


def names_of(checkout: Path) -> list[str]:
    """Names on the Hub of the language and multimodal models that a checkout has recipes for."""
    names = []
    for file in sorted((checkout / "models").rglob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        tasks = "".join(re.findall(r"^  tasks:\n((?:    - .*\n)+)", text, flags=re.MULTILINE))
        if "text" in tasks or "multimodal" in tasks:
            names += re.findall(r"^  model_id: \"?([^\"\s]+)", text, flags=re.MULTILINE)[:1]
    return names


def listed() -> list[str]:
    """The names in `LIST`."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def counted(names: Sequence[str]) -> Counter[str]:
    """How many of these models are `REFUSED` or `NO_ROW`; of the others, how their family was seen
    to run, like "H100" or "by class only"."""
    rows = [family_of(name) for name in names]
    return Counter(NO_ROW if row is None else REFUSED if row.kinds else row.shown for row in rows)


def main(checkout: Annotated[Path | None, typer.Argument()] = None) -> None:
    """Counts models of vLLM's recipes, and families of the table."""
    if checkout is not None:
        commit = subprocess.check_output(
            ["git", "-C", checkout, "log", "-1", "--format=%h of %cs"], text=True
        ).strip()
        head = f"# github.com/vllm-project/recipes, commit {commit}\n"
        LIST.write_text(head + "\n".join(names_of(checkout)) + "\n", encoding="utf-8")
    count = counted(listed())
    served = sum(count.values()) - count[REFUSED] - count[NO_ROW]
    print(f"{served} of {sum(count.values())} models have a family that runs")
    for said, number in count.most_common():
        print(f"{number:4} {said}")
    rows = [row for row in family_file().families if not row.kinds]
    by_class = sum(row.proved is None for row in rows)
    print(f"{by_class} of {len(rows)} families that run are by class only")


if __name__ == "__main__":
    typer.run(main)
