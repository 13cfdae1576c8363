"""Counts how many models of vLLM's recipes have a family that trees serve.

``python -m benchmarks.recipes CHECKOUT`` reads a checkout of github.com/vllm-project/recipes. It
leaves out models of vLLM-Omni and embedding models. A model's name tells its family.
"""

import re
import sys
from pathlib import Path

from sequoia_vllm.hardware.families import family_of


def count(checkout: Path) -> dict[str, list[str]]:
    """Names of models by what is said of them: accepted, refused, or in no row."""
    found: dict[str, list[str]] = {"accepted": [], "refused": [], "in no row": []}
    for file in sorted((checkout / "models").rglob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        tasks = re.findall(r"^  tasks:\n((?:    - .*\n)+)", text, flags=re.MULTILINE)
        if "text" not in "".join(tasks) and "multimodal" not in "".join(tasks):
            continue
        [name, *_] = re.findall(r"^  model_id: \"?([^\"\s]+)", text, flags=re.MULTILINE)
        row = family_of(name)
        said = "in no row" if row is None else "refused" if row.kinds else "accepted"
        found[said].append(name)
    return found


if __name__ == "__main__":
    for said, names in count(Path(sys.argv[1])).items():
        print(f"{len(names)} {said}: {', '.join(names)}")
