"""Heads in the speculators' format are read as vLLM reads them."""

from copy import deepcopy

import pytest

pytest.importorskip("vllm")
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

from sequoia_vllm.drafters.fields import Fields
from sequoia_vllm.drafters.recognition import recognise, without_format
from sequoia_vllm.hardware.model_config import read_shape

LAYER = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("eagle3", {"draft_vocab_size": 32000}),
        ("eagle3", {"draft_vocab_size": 64000, "target_hidden_size": 4096,
                    "eagle_aux_hidden_state_layer_ids": [1, 2]}),
        ("dflash", {"aux_hidden_state_layer_ids": [2, 9, 17], "mask_token_id": 1}),
        ("dspark", {"aux_hidden_state_layer_ids": [2, 9], "mask_token_id": 1, "block_size": 7,
                    "draft_vocab_size": 32000}),
    ],
)  # fmt: skip
def test_shapes_are_what_vllm_makes_of_them(kind, own):
    config = {
        "architectures": ["Speculator"], "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind}, "transformer_layer_config": LAYER, **own,
    }  # fmt: skip
    ours = without_format(config)
    theirs = SpeculatorsConfig.extract_transformers_pre_trained_config(deepcopy(config))
    assert recognise(Fields(ours), lambda: None).kind == kind
    assert read_shape(ours, "a/head", kind=kind).head is not None
    assert read_shape(ours, "a/head", kind=kind) == read_shape(theirs, "a/head", kind=kind)


def test_parallel_heads_are_not_drafted_with():
    config = {"speculators_model_type": "peagle", "transformer_layer_config": LAYER}
    assert recognise(Fields(without_format(config)), lambda: None).kind is None


def test_other_formats_stay():
    assert without_format(LAYER) is LAYER
