"""The table of families: what it says is what engines ask of vLLM's classes, and what tests ran.

``python -m tests.unit.test_families`` writes the tables in docs/ that are made from it.
Models that trees do not serve are refused in one text: by the engine, `advise` and `doctor`.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import markdown_table, recipes
from sequoia_vllm.drafters.registry import DRAFTERS, known_for
from sequoia_vllm.hardware.families import Family, family_file, family_of, in_words, refusal_of
from sequoia_vllm.hardware.support import UNSUPPORTED, kinds_of, refusal, refused_kinds
from tests.support.commands import command
from tests.support.families import (
    CONFIGS,
    MIXTURES,
    NAMES,
    READ_IMAGES,
    RECURRENT,
    REFUSED,
    bases_in_vllm,
    in_vllm,
)
from tests.support.family_recipes import MULTIMODAL, RECIPES
from tests.support.models import DRAFT, TARGET, save_config

pytest.importorskip("vllm")
import vllm
from vllm.model_executor.models import registry

from sequoia_vllm.cli.doctor import _target
from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.frontend import engine_config, refusals
from sequoia_vllm.engine.frontend.refusals import kinds_in_vllm

ROOT, FILE = Path(__file__).parents[2], family_file()
KINDS = sorted((kind for kind in DRAFTERS.values() if kind.known), key=lambda one: one.is_head)


@pytest.mark.parametrize("row", FILE.families, ids=lambda row: row.family)
def test_engines_refuse_the_same_of_vllms_classes(row):
    for architecture in row.architectures:
        config = {**row.config, "architectures": [architecture]}
        kinds = kinds_in_vllm(in_vllm(config))
        assert kinds == kinds_of(config), architecture
        assert refused_kinds("target", kinds) == row.kinds, architecture


def test_names_tell_rows():
    assert vllm.__version__.startswith(FILE.vllm)
    assert all(family_of(name) == row for name, row in NAMES.items())
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
    served = {"MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"}
    assert known | served == found - by_fields
    assert known - served == known > {"InklingForCausalLM"}


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
        ("LATENT_KINDS", "latents"),
        ('"name", RECIPES', "family_recipes"),
    ):
        if table in text:
            text += (ROOT / "tests" / "support" / f"{name}.py").read_text(encoding="utf-8")
    words = text.replace("save_mixture_pair", "Mixtral").replace("SmolLM2", "Llama")
    stems = [name.partition("For")[0].replace("_", "").lower() for name in row.architectures]
    assert any(stem in words.replace("_", "").lower() for stem in stems)


def test_rows_say_which_classes_did_not_run_and_where_text_alone_did():
    rows = [
        row for row in FILE.families if row.proved and row.proved[1].endswith("families_run.py")
    ]
    for row in rows:
        ran = set(row.architectures) & set(RECIPES | MULTIMODAL)
        assert ran
        others = [name.partition("For")[0] for name in row.architectures if name not in ran]
        said = re.search(r"not (\w+(?: or \w+)*)$", row.note)
        assert (said[1].split(" or ") if said else []) == others, row.family
        assert ("text alone" in row.note) == bool(ran & set(MULTIMODAL)), row.family


ASKED = {
    "Gemma 3": "runs as a target (tiny model); known drafts: none",
    "Qwen2-VL": "runs as a target (rehearsed)",
    "Qwen3.5 to 3.8 (hybrid)": "runs as a target (interpreted; on GPUs alone; its",
    "DeepSeek V3.2": "runs as a target (rehearsed; on GPUs alone; its MTP layer drafts); known",
    "DeepSeek V4": "refused as a target, as it chooses the tokens that it attends to",
    "Llama 4": "runs as a target (rehearsed; text alone, on GPUs alone)",
    "no family in docs/supported.md": "runs by its configuration; known drafts: none",
}


@pytest.mark.parametrize("family", ASKED)
def test_advise_begins_with_the_row(family, tmp_path):
    config = CONFIGS.get(family, {"architectures": ["OtherForCausalLM"]})
    done = command("advise", save_config(tmp_path, config), "--device", "h100", code=2)
    assert done.stdout.startswith(f"{family} ({config['architectures'][0]}): {ASKED[family]}")
    see = rf"\({family}: (.*; )?see docs/supported\.md#refused-targets\)"
    assert bool(re.search(see, done.stderr)) == ("refused" in ASKED[family])


@pytest.mark.parametrize(("name", "family"), [
    ("zai-org/GLM-5.3-Flash", "GLM-5.3-Flash (hybrid)"), ("zai-org/GLM-5.3", "GLM-5"),
    ("Qwen/Qwen3.8-Flash-Next", "Qwen3.8-Flash-Next (hybrid)"),
    ("deepseek-ai/DeepSeek-V4-Flash", "DeepSeek V4"), ("tencent/Hy4-preview", "Hy4"),
])  # fmt: skip
def test_without_a_configuration_a_name_tells_whether_its_family_runs(name, family):
    row = family_of(name)
    assert row.family == family
    said = in_words(name, (), ())
    assert said.startswith(f"{family}: {'refused' if row.kinds else 'runs'} as a target")
    assert ("see docs/supported.md#refused-targets" in said) == bool(row.kinds)


def families(refused: bool) -> list[list[str]]:
    def row(family: Family) -> list[str]:
        classes = ", ".join(f"`{name}`" for name in family.architectures)
        known = ", ".join(kind.short_name for kind in family.known())
        why = "; ".join(UNSUPPORTED[kind] for kind in family.kinds)
        note = f" ({family.note})" if family.note else ""
        rest = [why + note] if refused else [known, family.shown + note]
        return [family.family, classes, *rest]

    return [row(family) for family in FILE.families if bool(family.kinds) == refused]


def known_drafts() -> list[list[str]]:
    def named(name: str) -> list[str]:
        pairs = [(kind, known.draft.removeprefix("{1}/")) for kind, known in known_for(name)]
        return [", ".join(f"`{draft}`" for of, draft in pairs if of is kind) for kind in KINDS]

    return [[name.partition("/")[2], *named(name)] for name in NAMES if any(named(name))]


SUPPORTED, DRAFTERS_PAGE, KNOWN_PAGE = (
    ROOT / "docs" / f"{name}.md" for name in ("supported", "drafters", "known-drafts")
)
TABLES = {
    "## Targets that run": (SUPPORTED, markdown_table(
        ["family", "vLLM's classes", "known drafts", "seen to run"], families(False)
    )),
    "## Refused targets": (SUPPORTED, markdown_table(
        ["family", "vLLM's classes", "why"], families(True)
    )),
    "# Known drafts": (KNOWN_PAGE, markdown_table(
        ["target", *(kind.short_name for kind in KINDS)], known_drafts()
    )),
}  # fmt: skip


@pytest.mark.parametrize("heading", TABLES)
def test_documents_have_the_tables(heading):
    path, wanted = TABLES[heading]
    text = path.read_text(encoding="utf-8")
    assert f"\n{wanted}\n\n" in text[text.index(heading) :], f"run: python -m {__name__}"


def test_pages_count_models_of_recipes_and_families_that_nobody_ran(capsys):
    """As ``python -m benchmarks.recipes`` counts them."""
    recipes.main()
    told = capsys.readouterr().out
    count = recipes.counted(recipes.listed())
    rows = [row for row in FILE.families if not row.kinds]
    by_class = sum(row.shown == "by class only" for row in rows)
    served = count.total() - count["refused"] - count["in no row"]
    assert f"{served} of {count.total()} models" in told
    assert f"{by_class} of {len(rows)} families that run are by class only" in told
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", SUPPORTED))
    readme, page = (" ".join(text.split()) for text in pages)
    assert f"[{served} of vLLM's {count.total()} recipes](docs/supported.md)" in readme
    assert f"Of {len(rows)} such families {by_class} are by class only" in readme
    assert f"had {count.total()} language and multimodal models" in page
    assert f"families of {served} run, {count['by class only']} of these by class only" in page
    assert f"table's {len(rows)} families that run, {by_class} are by class only" in page


def test_recipes_are_read_from_a_checkout(tmp_path):
    recipe = 'meta:\n  tasks:\n    - {}\nmodel:\n  model_id: "{}"\n'
    found = [("text", "meta-llama/Llama-3.1-8B"), ("omni", "a/b"), ("multimodal", "c/d")]
    for number, (task, name) in enumerate(found):
        file = tmp_path / "models" / str(number) / "a.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(recipe.format(task, name))
    names = recipes.names_of(tmp_path)
    assert names == ["meta-llama/Llama-3.1-8B", "c/d"]
    assert recipes.counted(names) == {"H100": 1, "in no row": 1}


def test_no_draft_is_known_for_refused_families_and_every_kind_has_a_row():
    assert not any(row.known() for row in FILE.families if row.kinds)
    kinds = DRAFTERS_PAGE.read_text(encoding="utf-8").partition("## Kinds")[2].partition("##")[0]
    assert set(re.findall(r"\| `\"(\w+)\"` \| [yn]", kinds)) == set(DRAFTERS)


def advise(*arguments: str) -> str:
    done = command("advise", *arguments, "--device", "h100", code=2)
    return done.stderr.strip().removeprefix("error: ")


@pytest.mark.parametrize("draft", [[], ["--draft-model", DRAFT]], ids=["no draft", "draft"])
@pytest.mark.parametrize("family", REFUSED)
def test_advise_and_engine_refuse_a_target_in_the_same_words(family, draft, tmp_path):
    """Before they ask for a draft, and without a prediction or a command."""
    target = save_config(tmp_path, REFUSED[family])
    model, kinds = in_vllm(REFUSED[family], target), kinds_of(REFUSED[family])
    assert refusals.kinds_in_vllm(model) == kinds
    with pytest.raises(ConfigError) as error:
        refusals.refuse_model(model, "target")
    said = advise(target, *draft)
    assert said == str(error.value)
    of_drafts = {"mla", "hybrid", "mrope", "multimodal"}
    assert all((UNSUPPORTED[kind] in said) == (kind not in of_drafts) for kind in kinds)
    assert "serve it without Sequoia, or choose another target model" in said


def test_an_engine_refuses_a_target_before_it_reads_its_own_configuration(monkeypatch):
    monkeypatch.setattr(engine_config, "sequoia_request", lambda arguments: {"tree": "nonsense"})
    target = in_vllm(REFUSED["DeepSeek V4"], "a/target")
    with pytest.raises(ConfigError, match="the target model a/target chooses the tokens"):
        engine_config.create_speculative_config(lambda *_: 1 / 0, SimpleNamespace(), target, None)


def test_a_hybrid_class_without_recurrent_layers_is_served():
    """Granite 4.0 Micro: its class has an inner state, and this checkpoint has none."""
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 64,
        "layer_types": ["attention"] * 2,
    }  # fmt: skip
    assert kinds_of(config) == set()
    assert refusals.kinds_in_vllm(in_vllm(config)) == set()
    config["layer_types"] = ["attention", "mamba"]
    assert refusals.kinds_in_vllm(in_vllm(config)) == {"hybrid"}


@pytest.mark.parametrize("family", [*REFUSED, *READ_IMAGES])
def test_drafts_are_refused_too(family, tmp_path):
    config = {**REFUSED, **READ_IMAGES}[family]
    draft = save_config(tmp_path, config)
    said = advise(TARGET, "--draft-model", draft)
    assert said == refusal(draft, "draft", kinds_of(config))
    assert "serve it without" not in said


def test_doctor_looks_at_a_target(tmp_path):
    target = save_config(tmp_path, REFUSED["DeepSeek V4"])
    check = _target(target)
    assert not check.ok
    assert check.found == f"the target model {target} {UNSUPPORTED['sparse']}"
    assert check.fix == (
        "serve it without Sequoia, or choose another target model "
        "(DeepSeek V4: caches of compressed tokens, 1,656 lines in vLLM; "
        "see docs/supported.md#refused-targets)"
    )
    assert _target(DRAFT).ok
    assert not _target("none").ok


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "alibi": False, "attention_chunk_size": None},
        {"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "kv_lora_rank": 256},
        {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention"]},
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["ChatGLMModel"]},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        {},
    ],
)
def test_what_looks_like_it_and_is_not(config):
    assert kinds_of(config) == set()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"position_encoding_type": "alibi"}, "alibi"),
        ({"position_embedding_type": "alibi"}, "alibi"),
        ({"layer_types": ["full_attention", "short_conv"]}, "recurrent"),
    ],
)
def test_a_kind_is_told_by_the_value_of_a_field(config, kind):
    assert kinds_of(config) == {kind}


def test_mixtures_of_experts_are_served():
    assert set().union(*(kinds_of(config) for config, *_ in MIXTURES.values())) <= {"hybrid", "mla"}


TEXT, IMAGES = registry._TEXT_GENERATION_MODELS, registry._MULTIMODAL_MODELS


def test_multimodal_models_of_vllm_are_known_by_their_architecture():
    assert {name for name in IMAGES if "multimodal" not in of(name)} == set()
    assert {name for name in TEXT if of(name) & {"multimodal", "pooling"}} == set()


def test_recurrent_models_of_vllm_are_known_by_their_architecture():
    models = {**TEXT, **IMAGES}
    recurrent = {name for name, (_, place) in models.items() if RECURRENT & bases_in_vllm(place)}
    assert {name for name in models if of(name) & {"hybrid", "recurrent"}} == recurrent
    served = {name for name in recurrent if "hybrid" in of(name)}
    assert served > {"Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"}
    # Of those that are served the layers are of classes that ours extend.
    files = {name: Path(registry.__file__).with_name(f"{models[name][0]}.py") for name in served}
    # Kimi's are in a package of models.
    of_kimi = Path(vllm.__file__).parent / "models/kimi_k3/nvidia/model.py"
    files |= dict.fromkeys(("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"), of_kimi)
    extended = (
        "QwenGatedDeltaNetAttention(", "KimiGatedDeltaNetAttention", "MambaMixer2(", "ShortConv(",
        "KimiK3DeltaAttention(", "BailingMoELinearAttention(", "BailingMoeV3KimiDeltaAttention(",
    )  # fmt: skip
    others = {
        name for name, file in files.items() if not any(x in file.read_text() for x in extended)
    }
    # With the layers of Nemotron-H, LFM2, Ling 3 and Qwen3.5.
    with_images = "NemotronH_", "Lfm2Vl", "BailingMoeV3VL", "MiniCPMV4_"
    of_images = {name for name in others if name.startswith(with_images)}
    assert others - of_images == {"InternS2PreviewForConditionalGeneration"}


@pytest.mark.parametrize("models", ["_REWARD_MODELS", "_TOKEN_CLASSIFICATION_MODELS"])
def test_pooling_models_of_vllm_are_known_by_their_architecture(models):
    names = [name for name in getattr(registry, models) if not of(name) - {"pooling"}]
    assert names
    assert [name for name in names if "pooling" not in of(name) and "Joint" not in name] == []


def of(architecture: str) -> set:
    return set(kinds_of({"architectures": [architecture]}))


if __name__ == "__main__":
    for heading, (path, wanted) in TABLES.items():
        text = path.read_text(encoding="utf-8")
        start = text.index("\n| ", text.index(heading)) + 1
        path.write_text(text[:start] + wanted + text[text.index("\n\n", start) :], encoding="utf-8")
