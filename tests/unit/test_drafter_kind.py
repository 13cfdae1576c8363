"""What a checkpoint is: a draft model, a head, or something that trees do not draft with."""

from copy import deepcopy
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.recognition import recognise as recognise_fields
from sequoia_vllm.drafters.recognition import without_format
from sequoia_vllm.drafters.registry import Fields, HeadShape, drafter
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend.drafts import (
    DraftReader,
    check_method,
    drafted_levels,
    head_shape,
    recognise,
)
from sequoia_vllm.engine.frontend.refusals import _drafter_reasons
from sequoia_vllm.hardware.model_config import read_shape
from sequoia_vllm.tree import TokenTree
from tests.support.models import save_config

TARGET = SimpleNamespace(
    model="meta-llama/Llama-3.1-8B-Instruct", quantization=None, trust_remote_code=False,
    config_format="auto", hf_overrides=None,
    hf_text_config=SimpleNamespace(hidden_size=4096, num_hidden_layers=32, vocab_size=128256),
)  # fmt: skip
LAYER = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
EAGLE_3 = {**LAYER, "draft_vocab_size": 32000}
DFLASH = {
    **LAYER, "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5,
    "block_size": 16, "num_target_layers": 32,
    "dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
}  # fmt: skip
DSPARK = {
    **LAYER, "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 5,
    "block_size": 7, "markov_rank": 256, "target_layer_ids": [1, 8, 15, 22, 29],
    "mask_token_id": 128002,
}  # fmt: skip
TRANSFORMER = {key: value for key, value in LAYER.items() if key != "architectures"}


def speculators(kind: str, **changes) -> dict:
    """A head's configuration as the library ``speculators`` writes it."""
    return {
        "architectures": ["SomeSpeculator"], "speculators_model_type": kind,
        "transformer_layer_config": dict(TRANSFORMER), "draft_vocab_size": 32000,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        },
        **changes,
    }  # fmt: skip


BLOCK = {"mask_token_id": 128002, "aux_hidden_state_layer_ids": [2, 9, 30]}


def reader(**keys) -> DraftReader:
    return DraftReader(TARGET, SequoiaConfig(**keys))


@pytest.fixture
def kind_of(tmp_path):
    """The kind of a checkpoint with this configuration."""

    def kind(config: dict, name: str = "draft", **keys):
        return reader(**keys).kind(save_config(tmp_path / name, config)).kind

    return kind


def refused(kind_of, config: dict, **keys) -> str:
    with pytest.raises(ConfigError) as error:
        kind_of(config, **keys)
    return str(error.value)


def with_dflash(**changes) -> dict:
    return {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], **changes}}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LAYER, "model"),
        (EAGLE_3, "eagle3"),
        ({**LAYER, "architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({**LAYER, "architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({**LAYER, "eagle_config": {"use_aux_hidden_state": False}}, "eagle3"),
        # A head's own width may be another than that of what it reads.
        ({**EAGLE_3, "hidden_size": 2048, "target_hidden_size": 4096}, "eagle3"),
        ({**EAGLE_3, "eagle_aux_hidden_state_layer_ids": [2, 16, 32]}, "eagle3"),
        (speculators("eagle3"), "eagle3"),
        (DFLASH, "dflash"),
        (speculators("dflash", **BLOCK), "dflash"),
        (speculators("dflash2", **BLOCK, selector_rank=64), "dflash"),
        ({**DFLASH, "architectures": ["LiLiCorrDraftModel"]}, "dflash"),
        (DSPARK, "dspark"),
        ({**DSPARK, "architectures": ["DSparkDraftModel"]}, "dspark"),
        (speculators("dspark", **BLOCK), "dspark"),
    ],
)
def test_kinds(kind_of, config, kind):
    """The path says nothing."""
    assert kind_of(config, name="EAGLE3-dflash/eagle-draft") == kind_of(config) == kind
    assert kind_of(config, drafter=kind) == kind


@pytest.mark.parametrize(
    ("config", "name", "method"),
    [
        ({**LAYER, "architectures": ["EagleLlamaForCausalLM"]}, "an EAGLE-1 head", "eagle"),
        ({"model_type": "eagle", "model": LAYER}, "an EAGLE-1 head", "eagle"),
        ({**EAGLE_3, "ptd_token_id": 128002}, "a P-EAGLE head", "eagle3"),
        (speculators("peagle", mask_token_id=128002), "a P-EAGLE head", "eagle3"),
        ({**LAYER, "markov_rank": 256}, "a DSpark head of another architecture", "dspark"),
        ({**LAYER, "architectures": ["DSparkDraftModel"]}, "a DSpark head of another", "dspark"),
        (with_dflash(selector_rank=64), "a DFlash2 head under the name", None),
        (with_dflash(projector_type="domino"), "a Domino drafter", None),
        ({"model_type": "medusa", "hidden_size": 4096}, "a set of Medusa heads", None),
        (
            {**LAYER, "model_type": "qwen2", "architectures": ["MiMoForCausalLM"],
             "num_nextn_predict_layers": 1},
            "a model with multi-token prediction (MTP) layers", "mtp",
        ),
    ],
)  # fmt: skip
def test_what_trees_do_not_draft_with(kind_of, config, name, method):
    said = refused(kind_of, config)
    assert f"is {name}" in said
    chains = f", or use vLLM's own method {method!r} for chains"
    assert said.endswith(chains if method else "or a draft model")
    assert 'give "model" an EAGLE-3 head or a draft model' in said


# Neither a drafter that is loaded, nor one that users name.
NO_DRAFTER = {"ExtractHiddenStatesModel"}


@pytest.mark.parametrize("architecture", sorted(set(_SPECULATIVE_DECODING_MODELS) - NO_DRAFTER))
def test_every_drafter_that_vllm_knows_is_recognised(architecture):
    """Its kind is what vLLM runs it with, which the name of the module tells."""
    found = recognise(SimpleNamespace(architectures=[architecture], model_type="llama"))
    implementation, _ = _SPECULATIVE_DECODING_MODELS[architecture]
    assert found.sign == f"its architecture is {architecture}"
    kinds = {
        "eagle3": "eagle3" in implementation and not architecture.lower().startswith("peagle"),
        "dflash": implementation in ("qwen3_dflash", "qwen3_dflash2", "lilicorr"),
        "dspark": implementation == "qwen3_dspark" and "Omni" not in architecture,
    }
    assert {kind: found.kind == kind for kind in kinds} == kinds


@pytest.mark.parametrize(
    "architecture",
    ["DFlash2BeamDraftModel", "Qwen3XPressModel", "DFlashQwen3XPressModel", "MuseSparkDSparkModel",
     "ParseAuxMTPModel", "Step5MTP"],
)  # fmt: skip
def test_what_vllm_0_33_added_is_none_of_ours(architecture):
    config = SimpleNamespace(architectures=[architecture], model_type="qwen3")
    assert recognise(config).kind is None


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        (EAGLE_3, "model", "is an EAGLE-3 head (it has draft_vocab_size)"),
        (DFLASH, "eagle3", "is a DFlash head (its architecture is DFlashDraftModel)"),
        (LAYER, "dflash", "is a model by its configuration: leave"),
    ],
)
def test_the_key_must_not_contradict_the_checkpoint(kind_of, config, given, said):
    """It may name a head that looks like a model."""
    found = refused(kind_of, config, drafter=given)
    assert found.startswith(f'"drafter" is "{given}", but ')
    assert said in found
    assert kind_of(LAYER, drafter="eagle3") == "eagle3"
    narrow = refused(kind_of, {**LAYER, "hidden_size": 2048}, drafter="eagle3")
    assert "made for another target" in narrow


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        ({**EAGLE_3, "hidden_size": 2880},
         "its target's hidden size is 2,880, and this one's 4,096"),
        ({**EAGLE_3, "target_hidden_size": 8192},
         "its target's hidden size is 8,192, and this one's 4,096"),
        ({**EAGLE_3, "vocab_size": 151936},
         "its target's vocabulary is 151,936 tokens, and this one's 128,256 tokens"),
        ({**DFLASH, "num_target_layers": 36},
         "its target's number of layers is 36, and this one's 32"),
        ({**EAGLE_3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}},
         "it reads the hidden states of layer 33, and the target has 32 layers"),
        (speculators("dflash", **{**BLOCK, "aux_hidden_state_layer_ids": [2, 40]}),
         "it reads the hidden states of layer 40, and the target has 32 layers"),
    ],
)  # fmt: skip
def test_heads_of_other_targets(kind_of, config, difference):
    named = "another target than 'meta-llama/Llama-3.1-8B-Instruct'"
    assert f"{named}: {difference}. Give" in refused(kind_of, config)


@pytest.mark.parametrize(
    ("config", "kind", "reads", "output_vocab", "levels"),
    [
        (EAGLE_3, "eagle3", 12288, 32000, None),
        (speculators("eagle3", eagle_aux_hidden_state_layer_ids=[2, 9, 16, 23, 30]),
         "eagle3", 20480, 32000, None),
        (DFLASH, "dflash", 20480, None, 15),
        ({key: DFLASH[key] for key in DFLASH if key != "block_size"}, "dflash", 20480, None, None),
        (speculators("dflash", **BLOCK), "dflash", 12288, 32000, None),
        (speculators("dflash", **BLOCK, block_size=8), "dflash", 12288, 32000, 7),
        (DSPARK, "dspark", 20480, None, 7),
        (DSPARK | {"sample_from_anchor": False}, "dspark", 20480, None, 6),
        (speculators("dspark", **BLOCK, block_size=8), "dspark", 12288, 32000, 7),
        (speculators("dspark", **BLOCK, block_size=8, sample_from_anchor=True),
         "dspark", 12288, 32000, 8),
    ],
)  # fmt: skip
def test_shapes_of_heads_in_each_format(tmp_path, config, kind, reads, output_vocab, levels):
    """And the levels that a block has."""
    draft = save_config(tmp_path, config)
    found = reader().shapes(draft, drafter(kind))
    assert found.head == kind
    head = HeadShape(kind=kind, reads=reads, output_vocab=output_vocab, levels=levels)
    assert found.draft.head == head
    assert found.draft.name == draft
    assert (found.draft.hidden, found.draft.kv_heads, found.draft.vocab) == (4096, 8, 128256)
    assert reader().levels(draft, drafter(kind)) == drafted_levels(reader().read(draft)) == levels
    assert reader().levels(draft, drafter("eagle3")) is None


@pytest.mark.slow
def test_drafts_that_cannot_be_read_are_vllms_to_refuse(tmp_path):
    missing = str(tmp_path / "nothing")
    assert reader().kind(missing).kind == "model"
    assert reader(drafter="eagle3").kind(missing).kind == "eagle3"


def test_a_dflash_head_whose_root_predicts(kind_of):
    """vLLM refuses it, too: DSpark heads draft so."""
    said = refused(kind_of, with_dflash(sample_from_anchor=True))
    assert "drafts its first token at the root's own position" in said
    assert 'give "model" another head or a draft model' in said


@pytest.mark.parametrize("own", [{}, {"causal": False}])
def test_a_jetspec_head_is_a_dflash_head_with_causal_blocks(kind_of, own):
    """Its key is ``causal_head``; vLLM's own goes before it."""
    config = with_dflash(causal_head=True, **own)
    kind, loaded = drafter(kind_of(config)), SimpleNamespace(**config)
    kind.complete(loaded)
    assert kind.kind == "dflash"
    assert loaded.dflash_config["causal"] == own.get("causal", True)


def test_a_configuration_is_read_once(tmp_path):
    draft, shared = save_config(tmp_path, DFLASH), reader()
    kind = shared.kind(draft)
    (tmp_path / "config.json").unlink()
    assert shared.levels(draft, kind) == 15
    assert shared.shapes(draft, kind).draft.head.levels == 15


@pytest.mark.parametrize(
    ("kind", "method"), [("model", "draft_model"), ("eagle3", "eagle3"), ("mtp", "mtp")]
)
def test_what_vllm_takes_by_its_name(kind, method):
    check_method(drafter(kind), "a/model", method)
    with pytest.raises(ConfigError, match="put it into a folder without"):
        check_method(drafter(kind), "/models/eagle-3/model", "eagle")


def engine(kind: str, use_v2: bool = True, **config) -> SimpleNamespace:
    speculative_config = SimpleNamespace()
    settings = SequoiaSettings(TokenTree.chain(2), "a test", None, {}, drafter=kind)
    settings.store(speculative_config)
    return SimpleNamespace(
        speculative_config=speculative_config, use_v2_model_runner=use_v2,
        **{"lora_config": None, **config},
    )  # fmt: skip


def test_heads_need_model_runner_v2():
    adapters = {"lora_config": SimpleNamespace()}
    for fits in (engine("model", use_v2=False), engine("eagle3"), engine("eagle3", **adapters)):
        assert _drafter_reasons(fits) == []
    [reason] = _drafter_reasons(engine("eagle3", use_v2=False))
    assert "Model Runner V2, which GPUs use" in reason
    assert "the draft is an EAGLE-3 head" in reason
    assert 'give "model" a draft model' in reason


def test_the_shape_of_an_engines_head():
    config = engine("eagle3")
    config.speculative_config.draft_model_config = SimpleNamespace(
        hf_text_config=SimpleNamespace(**EAGLE_3), model="a/head", quantization=None
    )
    assert head_shape(config).parameters == 374_341_632 + 50_331_648
    assert head_shape(engine("model")) is None


def test_the_key_is_ours_and_strict():
    assert SequoiaConfig(drafter="eagle3").draft_keys() == {}
    kinds = "'dspark', 'dflash', 'eagle3', 'mtp', 'model' or 'lookup'"
    with pytest.raises(ConfigError, match=f"drafter: Input should be {kinds}"):
        SequoiaConfig.parse({"method": "sequoia", "drafter": "eagle"})


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("eagle3", {}),
        ("eagle3", {"draft_vocab_size": 64000, "target_hidden_size": 4096,
                    "eagle_aux_hidden_state_layer_ids": [1, 2]}),
        ("dflash", {"aux_hidden_state_layer_ids": [2, 9, 17], "mask_token_id": 1}),
        ("dspark", {"aux_hidden_state_layer_ids": [2, 9], "mask_token_id": 1, "block_size": 7}),
    ],
)  # fmt: skip
def test_shapes_are_what_vllm_makes_of_what_speculators_writes(kind, own):
    config = speculators(kind, **own)
    ours = without_format(config)
    theirs = SpeculatorsConfig.extract_transformers_pre_trained_config(deepcopy(config))
    assert recognise_fields(Fields(ours), lambda: None).kind == kind
    assert read_shape(ours, "a/head", kind=kind).head is not None
    assert read_shape(ours, "a/head", kind=kind) == read_shape(theirs, "a/head", kind=kind)


def test_parallel_heads_are_not_drafted_with_and_other_formats_stay():
    config = speculators("peagle")
    assert recognise_fields(Fields(without_format(config)), lambda: None).kind is None
    assert without_format(LAYER) is LAYER
