"""docs/configuration.md has every key of the configuration, made from its model.

``python -m tests.unit.test_configuration_document`` writes its tables anew.
"""

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from sequoia_vllm.config import OffloadSpec, SequoiaConfig, TreeSpec

PATH = Path(__file__).parents[2] / "docs" / "configuration.md"
DOCUMENT = PATH.read_text(encoding="utf-8")
VLLMS = (
    "quantization", "revision", "code_revision", "draft_tensor_parallel_size", "max_model_len",
    "draft_load_config",
)  # fmt: skip


def table(model: type[BaseModel], keys: list[str]) -> str:
    """The keys with their defaults and descriptions, as Markdown."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key in keys:
        field = model.model_fields[key]
        default = "required" if field.is_required() else ""
        if not field.is_required() and field.default is not None:
            default = f"`{json.dumps(field.default)}`"
        lines.append(f"| `{key}` | {default} | {' '.join(field.description.split())} |")
    return "\n".join(lines)


TABLES = {
    "## Keys": table(
        SequoiaConfig, [key for key in SequoiaConfig.model_fields if key not in VLLMS]
    ),
    "## Keys of vLLM, for the draft": table(SequoiaConfig, list(VLLMS)),
    "## A tree by its size": table(TreeSpec, list(TreeSpec.model_fields)),
    "## Weights on a disk": table(OffloadSpec, list(OffloadSpec.model_fields)),
}


@pytest.mark.parametrize("heading", TABLES)
def test_tables_are_the_models(heading):
    wanted = f"\n{heading}\n\n{TABLES[heading]}\n\n"
    assert wanted in DOCUMENT, "run: python -m tests.unit.test_configuration_document"


def test_examples_are_valid():
    found = re.findall(r'^\{"method".*\}$', DOCUMENT, flags=re.MULTILINE)
    assert len(found) > 3
    for example in found:
        SequoiaConfig.parse(json.loads(example))


if __name__ == "__main__":
    text = DOCUMENT
    for heading, wanted in TABLES.items():
        before, _, after = text.partition(f"\n{heading}\n\n")
        text = f"{before}\n{heading}\n\n{wanted}\n\n" + after.partition("\n\n")[2]
    PATH.write_text(text, encoding="utf-8")
