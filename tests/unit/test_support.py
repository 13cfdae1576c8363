"""One check of models that trees do not serve, with one text: of the engine, `advise`, `doctor`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from sequoia_vllm.cli import app
from sequoia_vllm.hardware.support import UNSUPPORTED, kinds_of, refusal
from tests.support.families import MIXTURES, READ_IMAGES, RECURRENT, REFUSED, bases_in_vllm, in_vllm

pytest.importorskip("vllm")
from vllm.model_executor.models import registry

from sequoia_vllm.cli.doctor import _target
from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.frontend import engine_config, refusals

DRAFT = str(Path(__file__).parents[2] / "examples" / "models" / "draft")


def save(path: Path, config: dict) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def advise(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["advise", *arguments, "--device", "h100"])
    assert done.exit_code == 2, done.output
    return done.stderr.strip().removeprefix("error: ")


@pytest.mark.parametrize("draft", [[], ["--draft-model", DRAFT]], ids=["no draft", "draft"])
@pytest.mark.parametrize("family", REFUSED)
def test_advise_and_engine_refuse_a_target_in_the_same_words(family, draft, tmp_path):
    """Before they ask for a draft, and without a prediction or a command."""
    target = save(tmp_path, REFUSED[family])
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
    target = in_vllm(REFUSED["DeepSeek V3.2"], "a/target")
    with pytest.raises(ConfigError, match="the target model a/target chooses the tokens"):
        engine_config.create_speculative_config(lambda *_: 1 / 0, SimpleNamespace(), target, None)


@pytest.mark.parametrize("family", READ_IMAGES)
def test_targets_that_read_images_are_served(family, tmp_path):
    """Drafts read text: the same model is no draft (`test_drafts_are_refused_too`)."""
    model = in_vllm(READ_IMAGES[family])
    assert refusals.kinds_in_vllm(model) == kinds_of(READ_IMAGES[family])
    refusals.refuse_model(model, "target")
    assert _target(save(tmp_path, READ_IMAGES[family])).ok


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
    target = str(Path(DRAFT).with_name("target"))
    config = {**REFUSED, **READ_IMAGES}[family]
    draft = save(tmp_path, config)
    said = advise(target, "--draft-model", draft)
    assert said == refusal(draft, "draft", kinds_of(config))
    assert "serve it without" not in said


def test_doctor_looks_at_a_target(tmp_path):
    target = save(tmp_path, REFUSED["DeepSeek V3.2"])
    check = _target(target)
    assert (check.ok, check.found) == (
        False, f"the target model {target} {UNSUPPORTED['sparse']}"
    )  # fmt: skip
    assert check.fix == (
        "serve it without Sequoia, or choose another target model "
        "(DeepSeek V3.2: see docs/supported.md#refused-targets)"
    )
    assert _target(DRAFT).ok
    assert not _target("none").ok


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts_are_served(name):
    assert kinds_of(MIXTURES[name][0]) <= {"hybrid", "mla"}


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


# -- vLLM's own models ---------------------------------------------------------------


def test_multimodal_models_of_vllm_are_known_by_their_architecture():
    found = {name for name in registry._MULTIMODAL_MODELS if "multimodal" in of(name)}
    assert set(registry._MULTIMODAL_MODELS) - found == set()
    text = set(registry._TEXT_GENERATION_MODELS)
    assert {name for name in text if of(name) & {"multimodal", "pooling"}} == set()


def test_recurrent_models_of_vllm_are_known_by_their_architecture():
    models = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}
    recurrent = {name for name, (_, place) in models.items() if RECURRENT & bases_in_vllm(place)}
    assert {name for name in models if of(name) & {"hybrid", "recurrent"}} == recurrent
    served = {name for name in recurrent if "hybrid" in of(name)}
    assert served > {"Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"}


def test_models_are_served_whose_recurrent_layers_are_of_classes_that_ours_extend():
    models = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}
    folder = Path(registry.__file__).parent
    texts = {
        name: (folder / f"{module}.py").read_text(encoding="utf-8")
        for name, (module, _) in models.items()
        if "hybrid" in of(name)
    }
    extended = ("QwenGatedDeltaNetAttention(", "MambaMixer2(", "ShortConv(")
    others = {name for name, text in texts.items() if not any(one in text for one in extended)}
    # With the layers of Nemotron-H, LFM2 and Qwen3.5.
    of_images = {name for name in others if name.startswith(("NemotronH_", "Lfm2Vl", "MiniCPMV4_"))}
    assert others - of_images == {"InternS2PreviewForConditionalGeneration"}


@pytest.mark.parametrize("models", ["_REWARD_MODELS", "_TOKEN_CLASSIFICATION_MODELS"])
def test_pooling_models_of_vllm_are_known_by_their_architecture(models):
    names = [name for name in getattr(registry, models) if not of(name) - {"pooling"}]
    assert names
    assert [name for name in names if "pooling" not in of(name) and "Joint" not in name] == []


def of(architecture: str) -> set:
    return set(kinds_of({"architectures": [architecture]}))
