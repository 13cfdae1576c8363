"""Published drafters: which is chosen for a target, and that vLLM loads them; and MTP layers."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from transformers import PreTrainedConfig

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.known_heads import HUB
from sequoia_vllm.drafters.mtp import ARCHITECTURES, MODEL_TYPES
from sequoia_vllm.drafters.registry import DRAFTERS, Drafter, KnownDrafter, drafter
from sequoia_vllm.hardware.families import in_words

pytest.importorskip("vllm")
from vllm.config.speculative import MTPModelTypes
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS

from sequoia_vllm.cli.measuring import known_draft as named_draft
from sequoia_vllm.cli.measuring import own_layer
from sequoia_vllm.engine.frontend import drafts
from sequoia_vllm.engine.frontend.draft_choice import KnownDraft, find_draft
from sequoia_vllm.engine.frontend.draft_choice import known_drafts as drafts_of_kinds
from sequoia_vllm.engine.frontend.drafts import DraftReader, kinds_here, recognise
from tests.support.families import NAMES, bases_in_vllm

SMOLLM2_DRAFT = Path(__file__).parents[2] / "examples" / "models" / "smollm2-draft"
ALL = ("model", "eagle3", "dflash")


def known_drafts(target: str, kinds=("model",), asked: str | None = None) -> list[KnownDraft]:
    kind = None if asked is None else drafter(asked)
    found = drafts_of_kinds(target, [*map(drafter, kinds)], kind)
    if isinstance(found, str):
        raise ConfigError(found)
    return found


LLAMA_8B_EAGLE_3 = "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"


@pytest.mark.parametrize(
    ("target", "draft", "kinds"),
    [
        ("meta-llama/Llama-2-7b-hf", "JackFram/llama-68m", ("model",)),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", ("model",)),
        ("/models/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", ("model",)),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", ("model",)),
        ("google/gemma-3-27b-it", "google/gemma-3-270m-it", ("model",)),
        ("examples/models/target", "examples/models/draft", ("model",)),
        ("/srv/sequoia/examples/models/target/", "/srv/sequoia/examples/models/draft", ("model",)),
        # A head is for its own target.
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B-Instruct", ALL),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-0.6B", ALL),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-0.6B", ALL),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "Qwen/Qwen3-0.6B", ALL),
    ],
)
def test_draft_models_where_no_head_can_run(target, draft, kinds):
    found, *_ = known_drafts(target, kinds)
    assert (found.name, found.drafter.kind) == (draft, "model")


@pytest.mark.parametrize(
    ("target", "head"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", LLAMA_8B_EAGLE_3),
        ("/models/meta-llama-3.1-8b-instruct-FP8", LLAMA_8B_EAGLE_3),
        ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("Qwen/Qwen3-8B-FP8", "RedHatAI/Qwen3-8B-speculator.eagle3"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507",
         "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3"),
    ],
)  # fmt: skip
def test_heads_that_are_asked_for(target, head):
    found, *_ = known_drafts(target, ALL, "eagle3")
    assert (found.name, found.drafter.kind) == (head, "eagle3")
    assert "an EAGLE-3 head made for this target (" in found.why


def kinds_for(target: str, asked: str | None = None) -> list[str]:
    return [known.drafter.kind for known in known_drafts(target, ALL, asked)]


def test_heads_are_taken_where_one_has_run_on_a_gpu():
    """Then models: an engine takes the first that it can read."""
    assert kinds_for("Qwen/Qwen3-8B") == ["eagle3"] * 3 + ["model"]
    assert (
        "a DFlash head exists, too (RedHatAI/Qwen3-8B-speculator.dflash): ask for it with "
        '"drafter": "dflash" (none with trained weights ran on a GPU)'
    ) in known_drafts("Qwen/Qwen3-8B", ALL)[0].why
    assert kinds_for("Qwen/Qwen3-8B", "dflash") == ["dflash"] * 4


def test_commands_say_and_take_the_same(monkeypatch, capsys):
    target, head = "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3"
    said = in_words(target, (), ())
    assert f"{head} (EAGLE-3 head, the default on GPUs)" in said
    assert "Qwen3-8B-speculator.dflash (DFlash head, not run here)" in said
    assert in_words("none", ("One", "Two"), ()).startswith(
        "no family in docs/supported.md (One, Two)"
    )
    assert named_draft(target) == named_draft(target, heads=False) == "Qwen/Qwen3-0.6B"
    assert named_draft(target, heads=True) == "Qwen/Qwen3-0.6B"  # no head can be read here
    assert f"engines that can read {head} draft with it" in capsys.readouterr().err
    monkeypatch.setattr("sequoia_vllm.cli.measuring.read_config", lambda *_: {"a": 1})
    assert named_draft(target, heads=True) == head


def test_kinds_that_run_are_ordered_by_what_they_are_predicted_to_gain(monkeypatch):
    """By the notebook's predictions of 2026-11-25: so they are taken once they ran on GPUs."""
    monkeypatch.setattr(type(DRAFTERS["dflash"]), "ran_on", "a GPU")
    assert kinds_for("Qwen/Qwen3-8B") == ["dflash"] * 4 + ["eagle3"] * 3 + ["model"]
    assert kinds_for("Qwen/Qwen3-14B")[0] == "eagle3"
    assert kinds_for("meta-llama/Llama-2-7b-hf")[0] == "model"


@pytest.mark.parametrize(
    "target",
    ["HuggingFaceTB/SmolLM2-135M-Instruct", "/home/a/smollm2-135m-instruct", "renamed"],
)
def test_the_draft_in_this_repository_is_known(target, tmp_path, monkeypatch):
    """By the target's name, and by its weights in a folder of any name."""
    if target == "renamed":
        target = str(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        metrics = json.loads((SMOLLM2_DRAFT / "metrics.json").read_text("utf-8"))
        known = metrics["sha256"]["the target's weights"]
        with pytest.raises(ConfigError):
            known_drafts(target)
        monkeypatch.setattr("sequoia_vllm.drafters.registry.file_hash", lambda _: known)
    assert known_drafts(target)[0].name == named_draft(target) == str(SMOLLM2_DRAFT)
    monkeypatch.setattr("sequoia_vllm.drafters.registry.find_checkout", lambda: None)
    with pytest.raises(ConfigError, match="no draft model is known"):
        known_drafts(target)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt2", ALL), '{"method": "sequoia", "model": "DRAFT"}'),
        (("Qwen/Qwen3-0.6B", ALL), '{"method": "sequoia", "model": "DRAFT"}'),
        (("examples/models/other", ALL), '{"method": "sequoia", "model": "DRAFT"}'),
        (("openai/gpt-oss-20b",),
         "no draft model is known for the target 'openai/gpt-oss-20b', but a DFlash head "
         "(z-lab/gpt-oss-20b-DFlash), which needs vLLM's Model Runner V2"),
        (("meta-llama/Llama-2-7b-hf", ALL, "eagle3"),
         'but a draft model (JackFram/llama-68m): leave "drafter" out for it'),
    ],
)  # fmt: skip
def test_of_unknown_targets_it_is_said_what_to_write(arguments, said):
    with pytest.raises(ConfigError) as error:
        known_drafts(*arguments)
    assert said in str(error.value)
    assert arguments[0] in str(error.value)


@pytest.mark.parametrize(
    ("is_cuda", "chosen", "heads"),
    [(True, None, True), (True, False, False), (False, None, False), (False, True, True)],
)
def test_heads_run_on_model_runner_v2(monkeypatch, is_cuda, chosen, heads):
    platform = SimpleNamespace(is_cuda=lambda: is_cuda)
    monkeypatch.setattr(drafts, "current_platform", platform)
    monkeypatch.setattr(drafts, "envs", SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=chosen))
    assert [kind.kind for kind in kinds_here()] == (
        ["dspark", "dflash", "eagle3", "mtp", "model", "lookup"] if heads else ["model", "lookup"]
    )


def kind_by_name(draft: str) -> str:
    return next((kind for kind in ("eagle3", "dflash") if kind in draft), "model")


def found_draft(kinds, kind_of=kind_by_name, target="Qwen/Qwen3-8B", **keys):
    config = SequoiaConfig.parse({"method": "sequoia", **keys})
    kinds = [*map(drafter, kinds)]
    name, kind = find_draft(config, target, kinds, lambda name: drafter(kind_of(name)))
    return SimpleNamespace(name=name, kind=kind.kind)


def test_the_log_says_which_and_why(caplog):
    with caplog.at_level(logging.INFO, logger="vllm.sequoia"):
        assert found_draft(ALL, drafter="dflash").kind == "dflash"
    [line] = [m for m in caplog.messages if m.startswith("Sequoia: drafting with ")]
    assert line.startswith(
        "Sequoia: drafting with RedHatAI/Qwen3-8B-speculator.dflash: a DFlash head made for this "
        "target (vllm-project/speculators: README.md)"
    )
    assert "\n" not in line


def test_known_heads_that_trees_do_not_draft_with_are_passed_over(caplog):
    """Their configurations say it, and are not known before."""

    def not_of_red_hat(draft):
        if draft.startswith("RedHatAI/"):
            raise ConfigError(f"{draft!r} has layers with a sliding window")
        return "dflash"

    found = found_draft(ALL, not_of_red_hat, drafter="dflash")
    assert found.name == "z-lab/Qwen3-8B-DFlash-b16"
    assert sum("has layers with a sliding window" in line for line in caplog.messages) == 1


def test_a_head_that_cannot_be_read_is_passed_over(caplog):
    """An engine without a network still has the model that it had."""
    assert found_draft(ALL).kind == "eagle3"
    found = found_draft(ALL, lambda _: "model")  # as of all that cannot be read
    assert (found.name, found.kind) == ("Qwen/Qwen3-0.6B", "model")
    assert sum("cannot be read as a head's" in line for line in caplog.messages) == 3
    assert found_draft([*ALL, "lookup"], lambda _: "model", "openai/gpt-oss-20b").kind == "lookup"
    with pytest.raises(ConfigError, match="cannot be read as a head's"):
        found_draft(ALL, lambda _: "model", drafter="eagle3")
    # The user may name the kind alone.
    assert found_draft(ALL, drafter="model").name == "Qwen/Qwen3-0.6B"
    assert found_draft(ALL, drafter="eagle3").kind == "eagle3"
    with pytest.raises(ConfigError, match=r'an EAGLE-3 head needs .*: leave "drafter" out here'):
        found_draft(("model",), drafter="eagle3")


KNOWN = [(drafter.kind, known) for drafter in DRAFTERS.values() for known in drafter.known]
HEADS = [(kind, known) for kind, known in KNOWN if kind != "model"]


def test_the_document_says_which_kinds_were_measured_on_a_gpu():
    text = (SMOLLM2_DRAFT.parents[2] / "docs" / "drafters.md").read_text("utf-8")
    said = dict(re.findall(r'^\|[^|]*\| `"(\w+)"` \| (yes, on [^|]*|no) \|', text, re.M))
    ran = {name: kind.ran_on and f"yes, on {kind.ran_on}" for name, kind in DRAFTERS.items()}
    assert said == {name: shown or "no" for name, shown in ran.items()}


def test_every_pair_says_why_and_is_chosen_for_a_target():
    assert all(known.note for _, known in KNOWN)
    assert len({(known.target, known.draft) for _, known in KNOWN}) == len(KNOWN)
    others = {"{0}/draft"}  # of a folder's target
    assert all(targets_of(pair) or pair.draft in others for _, pair in KNOWN)


@pytest.mark.parametrize(("kind", "pair"), HEADS, ids=[known.draft for _, known in HEADS])
def test_vllm_loads_heads_of_this_kind(kind, pair):
    """Their architecture is one of vLLM's, and what we recognise it as is the entry's kind.

    Each is for one target, which gives vLLM its hidden states.
    """
    assert pair.architecture in _SPECULATIVE_DECODING_MODELS
    config = SimpleNamespace(architectures=[pair.architecture], model_type="llama")
    assert recognise(config).kind == kind
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", pair.draft)
    # Its own page, or a repository and a file in it.
    assert pair.note == HUB or re.fullmatch(r"[\w-]+/[\w-]+: [\w./-]+", pair.note)
    [target] = targets_of(pair)
    assert {"SupportsEagle3", "EagleModelMixin"} & bases_in_vllm(NAMES[target].architectures[0])


def targets_of(pair: KnownDrafter) -> list[str]:
    """Targets in the table of families that its pattern takes."""
    return [name for name in NAMES if re.fullmatch(pair.target, name, flags=re.IGNORECASE)]


def target(architecture: str = "MiMoForCausalLM", model_type: str = "mimo", **changes):
    fields = {"num_hidden_layers": 36, "num_nextn_predict_layers": 1, **changes}
    config = PreTrainedConfig(architectures=[architecture], **fields)
    config.model_type = model_type
    return SimpleNamespace(model="a/target", revision=None, hf_config=config)


def kind_of(given: SimpleNamespace) -> str:
    return DraftReader(given, SequoiaConfig(drafter="mtp")).kind(given.model).kind


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("MiMoForCausalLM", "mimo"), ("Glm4MoeForCausalLM", "glm4_moe"),
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"), ("HYV3ForCausalLM", "hy_v3"),
        ("ExaoneMoeForCausalLM", "exaone_moe"), ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("DeepseekV32ForCausalLM", "deepseek_v32"), ("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
        ("GlmOcrForConditionalGeneration", "glm_ocr"), ("HYV4ForCausalLM", "hy_v4"),
        ("NemotronHForCausalLM", "nemotron_h"),
        ("LongcatFlashForCausalLM", "longcat_flash"),
        ("BailingMoeV2_5ForCausalLM", "bailing_hybrid"),
        ("BailingMoeV3ForCausalLM", "bailing_hybrid"),
        ("KimiK3ForConditionalGeneration", "kimi_k3"),
        ("Glm4MoeLiteForCausalLM", "glm4_moe_lite"), ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
        ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
        ("Qwen3NextForCausalLM", "qwen3_next"),
    ],
)  # fmt: skip
def test_targets_that_draft_for_themselves(architecture, model_type):
    """Published ones of some families do not name their layer."""
    names_none = ("qwen3_next", "longcat_flash")
    unnamed = {"num_nextn_predict_layers": None} if model_type in names_none else {}
    here = target(architecture, model_type, **unnamed)
    assert kind_of(here) == "mtp"
    assert DRAFTERS["mtp"].lies_in(here.hf_config.to_dict())
    assert here.hf_config.num_hidden_layers == 36  # vLLM's reading of a draft changes its own


GPU = [*ALL, "mtp", "lookup"]
LAYER = "a multi-token prediction (MTP) layer"


@pytest.mark.parametrize(
    ("name", "architecture", "model_type", "kinds", "draft", "said"),
    [
        # A DFlash head is known for it, and none has run.
        ("Qwen/Qwen3.5-27B", "Qwen3_5ForConditionalGeneration", "qwen3_5", GPU, "mtp",
         f"with {LAYER} of the target's own checkpoint, as no draft model or EAGLE-3 head is known "
         "for the target 'Qwen/Qwen3.5-27B', but a DFlash head (z-lab/Qwen3.5-27B-DFlash)"),
        ("XiaomiMiMo/MiMo-7B-RL", "MiMoForCausalLM", "mimo", GPU, "mtp", f"with {LAYER} of"),
        ("XiaomiMiMo/MiMo-7B-RL", "MiMoForCausalLM", "mimo", ["model", "lookup"], "lookup",
         "with a lookup of what followed before, as no draft model is known"),
        ("Qwen/Qwen2-VL-7B", "Qwen2VLForConditionalGeneration", "qwen2_vl", GPU, "lookup",
         "with a lookup of what followed before, as no draft model or EAGLE-3 head is known"),
        # Known ones come first: their kinds were measured on GPUs.
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3NextForCausalLM", "qwen3_next", GPU, "eagle3",
         "with lmsys/SGLang-EAGLE3-Qwen3-Next"),
        ("baidu/ERNIE-4.5-21B-A3B-PT", "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", GPU, "model",
         "with baidu/ERNIE-4.5-0.3B-PT: "),
    ],
)  # fmt: skip
def test_the_targets_own_layer_drafts_where_no_draft_is_known(
    name, architecture, model_type, kinds, draft, said, caplog
):
    """Where it has none, lookup drafts, also for targets that read images. The log says which."""
    here = target(architecture, model_type)
    reader = DraftReader(here, SequoiaConfig())
    every = [*map(drafter, kinds)]
    with caplog.at_level(logging.INFO, logger="vllm.sequoia"):
        found, kind = find_draft(
            SequoiaConfig(), name, every, lambda draft: drafter(kind_by_name(draft.lower())),
            reader.own_layer,
        )  # fmt: skip
    assert kind.kind == draft
    assert found == {"mtp": name, "lookup": "lookup"}.get(draft, found)
    assert sum(said in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (target("LlamaForCausalLM", "llama"), "has no layer of multi-token prediction"),
        (target(num_nextn_predict_layers=2), "has 2 MTP layers"),
        (target(num_nextn_predict_layers=0), "has 0 MTP layers"),
        (target("Qwen3_5ForCausalLM", "qwen3_5_text", mtp_num_hidden_layers=0), "has 0 MTP layers"),
        (target("Step3p5ForCausalLM", "step3p5"), "draft with (Step3p5MTP)"),
    ],
)  # fmt: skip
def test_others_are_refused_with_the_reason(given, problem):
    with pytest.raises(ConfigError) as error:
        kind_of(given)
    assert problem in str(error.value)
    assert not DRAFTERS["mtp"].lies_in(given.hf_config.to_dict())
    assert 'give "model" an EAGLE-3 or DFlash head or a draft model' in str(error.value)


@pytest.mark.parametrize(
    ("own", "targets"),
    [
        ("model.mtp_layers.0.input_proj.weight", "model.layers.35.mlp.up_proj.weight"),  # MiMo
        ("model.layers.36.eh_proj.weight", "model.layers.3.self_attn.q_proj.weight"),  # GLM
        ("model.mtp_block.0.mlp.up_proj.weight", "model.norm.weight"),  # Ernie
        ("mtp.layers.0.mlp.up_proj.weight_packed", "model.language_model.layers.35.mlp.up_proj"),
        ("model.language_model.layers.36.enorm.weight", "vision.encoder.layers.40.norm.weight"),
    ],
)  # fmt: skip
def test_a_configuration_names_a_layer_whose_weights_are_missing(own, targets, tmp_path, caplog):
    """As in some quantised checkpoints: it drafts as without a layer, and the log says so."""
    here = target()
    here.model = str(tmp_path)

    def with_weights(*names: str) -> tuple[str, Drafter]:
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
        reader = DraftReader(here, SequoiaConfig())
        every = [*map(drafter, GPU)]
        with caplog.at_level(logging.INFO, logger="vllm.sequoia"):
            return find_draft(SequoiaConfig(), here.model, every, reader.kind, reader.own_layer)

    (tmp_path / "config.json").write_text(here.hf_config.to_json_string(), "utf-8")
    assert with_weights(targets, own) == (here.model, drafter("mtp"))
    assert own_layer(here.model) is drafter("mtp")
    assert kind_of(here) == "mtp"
    caplog.clear()
    assert with_weights(targets) == ("lookup", drafter("lookup"))
    said = f"{here.model} names {LAYER} in its configuration, and has no weights of it"
    assert sum(line.endswith(said) for line in caplog.messages) == 1
    assert own_layer(here.model) is None
    with pytest.raises(ConfigError, match='"drafter": "mtp": ') as error:
        kind_of(here)
    assert said in str(error.value)


def test_vllm_knows_the_layers():
    assert set(_SPECULATIVE_DECODING_MODELS) >= ARCHITECTURES
    assert all(re.fullmatch(MODEL_TYPES, known) for known in get_args(MTPModelTypes))


def test_no_model_is_given_with_them():
    def found(*kinds, **keys):
        config = SequoiaConfig(drafter="mtp", **keys)
        return find_draft(config, "a/target", [*map(drafter, kinds)], lambda _: drafter("mtp"))

    for keys in ({}, {"model": "a/target"}):
        assert found("model", "mtp", **keys) == ("a/target", drafter("mtp"))
    with pytest.raises(ConfigError, match='"model" is \'a/head\': leave "model" out'):
        found("model", "mtp", model="a/head")
    with pytest.raises(ConfigError, match="needs vLLM's Model Runner V2"):
        found("model")
