"""The table of families: what it says is what engines ask of vLLM's classes, and what tests ran.

``python -m tests.unit.test_families`` writes the tables in docs/ that are made from it.
"""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import markdown_table
from sequoia_vllm.cli import app
from sequoia_vllm.drafters.registry import DRAFTERS, known_for
from sequoia_vllm.hardware.families import Family, family_file, family_of, refusal_of
from sequoia_vllm.hardware.support import UNSUPPORTED, kinds_of, refused_kinds
from tests.support.families import CONFIGS, NAMES, in_vllm

pytest.importorskip("vllm")
import vllm
from vllm.model_executor.models import registry

from sequoia_vllm.engine.frontend.refusals import kinds_in_vllm

ROOT, FILE = Path(__file__).parents[2], family_file()
KINDS = sorted((kind for kind in DRAFTERS.values() if kind.known), key=lambda one: one.is_head)


# -- as engines find it ------------------------------------------------------------


@pytest.mark.parametrize("row", FILE.families, ids=lambda row: row.family)
def test_engines_refuse_the_same_of_vllms_classes(row):
    for architecture in row.architectures:
        kinds = kinds_in_vllm(in_vllm({**row.config, "architectures": [architecture]}))
        assert refused_kinds("target", kinds) == row.kinds, architecture


def test_names_tell_rows():
    assert vllm.__version__.startswith(FILE.vllm)
    assert all(family_of(name) is row for name, row in NAMES.items())
    assert "see docs" not in refusal_of("a/b", "target", ["MistralForCausalLM"], {"sparse"})


def test_classes_with_attention_of_their_own_are_known():
    """An engine finds it when it makes their layers. A new one in vLLM shows here."""
    own = re.compile(r"^class .*\bAttentionLayerBase\b|_DIFFKV|PrefillPrefixLMAttention\(", re.M)
    models = Path(vllm.__file__).parent / "model_executor" / "models"
    found = set()
    for name, (module, _) in registry._TEXT_GENERATION_MODELS.items():
        package = models.parents[2] / module.replace(".", "/")
        files = package.rglob("*.py") if "." in module else [models / f"{module}.py"]
        if any(own.search(file.read_text()) for file in files):
            found.add(name)
    by_fields = {name for name in found if re.match("Deepseek|GlmMoeDsa|MistralLarge3", name)}
    known = {name for name in found if kinds_of({"architectures": [name]})}
    assert found - by_fields == known > {"InklingForCausalLM", "MiMoV2ForCausalLM"}


# -- what shows it -----------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in FILE.families if row.proved], ids=str)
def test_the_file_that_shows_it_has_the_architecture(row):
    how, file = row.proved
    text = (ROOT / file).read_text(encoding="utf-8")
    folders = {"H100": "docs/notebook/", "rehearsed": "tests/gpu_rehearsal/"}
    assert file.startswith(folders.get(how, "tests/"))
    if how == "interpreted":
        assert file.startswith("tests/v2/") or " on V2" in text
    for table, name in (
        ("(*IMAGE", "multimodal"),
        ('"name", CONFIGS', "architectures"),
        ("*KINDS]", "expert_layers"),
    ):
        if table in text:
            text += (ROOT / "tests" / "support" / f"{name}.py").read_text(encoding="utf-8")
    words = text.replace("save_mixture_pair", "Mixtral").replace("SmolLM2", "Llama")
    stems = [name.partition("For")[0].replace("_", "").lower() for name in row.architectures]
    assert any(stem in words.replace("_", "").lower() for stem in stems)


# -- what users read ---------------------------------------------------------------

ASKED = {
    "Gemma 3": "runs as a target (tiny model); known drafts: none",
    "Qwen2-VL": "runs as a target (rehearsed)",
    "gpt-oss": "runs as a target (interpreted)",
    "Qwen3.5 to 3.8 (hybrid)": "runs as a target (interpreted; on GPUs alone; its",
    "Granite 4 (hybrid)": "runs as a target (rehearsed; on GPUs alone)",
    "Mamba, Jamba": "refused as a target, as it has recurrent",
    "DeepSeek V2, V3, R1": "runs as a target (rehearsed); known drafts: none",
    "DeepSeek V3.2": "refused as a target, as it chooses the tokens that it attends to",
    "Llama 4": "refused as a target, as it uses chunked local attention",
    "no family in docs/supported.md": "runs by its configuration; known drafts: none",
}


@pytest.mark.parametrize("family", ASKED)
def test_advise_begins_with_the_row(family, tmp_path):
    config = CONFIGS.get(family, {"architectures": ["OtherForCausalLM"]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, ["advise", str(tmp_path), "--device", "h100"])
    assert done.stdout.startswith(f"{family} ({config['architectures'][0]}): {ASKED[family]}")
    see = rf"\({family}: (.*; )?see docs/supported\.md#refused-targets\)"
    assert bool(re.search(see, done.stderr)) == ("refused" in ASKED[family])


def families(refused: bool) -> list[list[str]]:
    def row(family: Family) -> list[str]:
        classes = ", ".join(f"`{name}`" for name in family.architectures)
        known = ", ".join(kind.short_name for kind in family.known())
        why = "; ".join(UNSUPPORTED[kind] for kind in family.kinds)
        note = f" ({family.note})" if family.note else ""
        return [
            family.family,
            classes,
            *([why + note] if refused else [known, family.shown + note]),
        ]

    return [row(family) for family in FILE.families if bool(family.kinds) == refused]


def known_drafts() -> list[list[str]]:
    def named(name: str) -> list[str]:
        pairs = [(kind, known.draft.removeprefix("{1}/")) for kind, known in known_for(name)]
        return [", ".join(f"`{draft}`" for of, draft in pairs if of is kind) for kind in KINDS]

    return [[name.partition("/")[2], *named(name)] for name in NAMES if any(named(name))]


SUPPORTED, DRAFTERS_PAGE = ROOT / "docs" / "supported.md", ROOT / "docs" / "drafters.md"
TABLES = {
    "## Targets that run": (SUPPORTED, markdown_table(
        ["family", "vLLM's classes", "known drafts", "seen to run"], families(False)
    )),
    "## Refused targets": (SUPPORTED, markdown_table(
        ["family", "vLLM's classes", "why"], families(True)
    )),
    "## Known drafts": (DRAFTERS_PAGE, markdown_table(
        ["target", *(kind.short_name for kind in KINDS)], known_drafts()
    )),
}  # fmt: skip


@pytest.mark.parametrize("heading", TABLES)
def test_documents_have_the_tables(heading):
    path, wanted = TABLES[heading]
    text = path.read_text(encoding="utf-8")
    assert f"\n{wanted}\n\n" in text[text.index(heading) :], f"run: python -m {__name__}"


def test_no_draft_is_known_for_refused_families_and_every_kind_has_a_row():
    assert not any(row.known() for row in FILE.families if row.kinds)
    kinds = DRAFTERS_PAGE.read_text(encoding="utf-8").partition("## Kinds")[2].partition("##")[0]
    assert set(re.findall(r"\| `\"(\w+)\"` \| [yn]", kinds)) == set(DRAFTERS)


if __name__ == "__main__":
    for heading, (path, wanted) in TABLES.items():
        text = path.read_text(encoding="utf-8")
        start = text.index("\n| ", text.index(heading)) + 1
        path.write_text(text[:start] + wanted + text[text.index("\n\n", start) :], encoding="utf-8")
