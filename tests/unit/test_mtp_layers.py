"""Targets whose own multi-token prediction (MTP) layers draft trees; others are refused."""

import re
from types import SimpleNamespace
from typing import get_args

import pytest

pytest.importorskip("vllm")
from transformers import PreTrainedConfig
from vllm.config.speculative import MTPModelTypes
from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS

from sequoia_vllm.config import ConfigError, SequoiaConfig
from sequoia_vllm.drafters.mtp import ARCHITECTURES, MODEL_TYPES
from sequoia_vllm.drafters.registry import DRAFTERS, drafter
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend.draft_choice import find_draft
from sequoia_vllm.engine.frontend.drafts import DraftReader
from sequoia_vllm.engine.frontend.refusals import _drafter_reasons
from tests.support.families import in_vllm


def target(architecture: str = "MiMoForCausalLM", model_type: str = "mimo", **changes):
    fields = {"num_hidden_layers": 36, "num_nextn_predict_layers": 1, **changes}
    config = PreTrainedConfig(architectures=[architecture], **fields)
    config.model_type = model_type
    return SimpleNamespace(model="a/target", hf_config=config)


def kind_of(given: SimpleNamespace) -> str:
    return DraftReader(given, SequoiaConfig(drafter="mtp")).kind(given.model).kind


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("MiMoForCausalLM", "mimo"),
        ("Glm4MoeForCausalLM", "glm4_moe"),
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
        ("HYV3ForCausalLM", "hy_v3"),
        ("ExaoneMoeForCausalLM", "exaone_moe"),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
        ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    ],
)
def test_targets_that_draft_for_themselves(architecture, model_type):
    here = target(architecture, model_type)
    assert kind_of(here) == "mtp"
    assert DRAFTERS["mtp"].lies_in(here.hf_config.to_dict())
    assert here.hf_config.num_hidden_layers == 36  # vLLM's reading of a draft changes its own


def test_published_configurations_of_qwen3_next_do_not_name_their_layer():
    given = target("Qwen3NextForCausalLM", "qwen3_next", num_nextn_predict_layers=None)
    assert kind_of(given) == "mtp"
    assert DRAFTERS["mtp"].lies_in({"architectures": ["Qwen3NextForCausalLM"]})


def test_targets_that_read_images_hear_of_their_layer(monkeypatch):
    """Where no draft is known for them, as the default reads text alone."""
    monkeypatch.setattr(SequoiaSettings, "of", lambda _: SimpleNamespace(drafter="lookup"))
    text = {"text_config": {"mtp_num_hidden_layers": 1}}
    model = in_vllm({"architectures": ["Qwen3_5ForConditionalGeneration"], **text})
    found = _drafter_reasons(SimpleNamespace(model_config=model, lora_config=None))
    assert 'instead of "drafter": "lookup", or give "drafter": "mtp"' in " ".join(found)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (target("LlamaForCausalLM", "llama"), "has no layer of multi-token prediction"),
        (target(num_nextn_predict_layers=2), "has 2 MTP layers"),
        (target(num_nextn_predict_layers=0), "has 0 MTP layers"),
        (target("Qwen3_5ForCausalLM", "qwen3_5_text", mtp_num_hidden_layers=0), "has 0 MTP layers"),
        (target("DeepseekV3ForCausalLM", "deepseek_v3"), "do not draft with (DeepSeekMTPModel)"),
    ],
)  # fmt: skip
def test_others_are_refused_with_the_reason(given, problem):
    with pytest.raises(ConfigError) as error:
        kind_of(given)
    assert problem in str(error.value)
    assert not DRAFTERS["mtp"].lies_in(given.hf_config.to_dict())
    assert 'give "model" an EAGLE-3 or DFlash head or a draft model' in str(error.value)


def test_vllm_knows_the_layers():
    assert set(_SPECULATIVE_DECODING_MODELS) >= ARCHITECTURES
    assert all(re.fullmatch(MODEL_TYPES, known) for known in get_args(MTPModelTypes))


def found(kinds, **keys):
    config = SequoiaConfig.parse({"method": "sequoia", "drafter": "mtp", **keys})
    return find_draft(config, "a/target", [*map(drafter, kinds)], lambda _: drafter("mtp"))


def test_no_model_is_given_with_them():
    for keys in ({}, {"model": "a/target"}):
        assert found(("model", "mtp"), **keys) == ("a/target", drafter("mtp"))
    with pytest.raises(ConfigError, match='"model" is \'a/head\': leave "model" out'):
        found(("model", "mtp"), model="a/head")
    with pytest.raises(ConfigError, match="needs vLLM's Model Runner V2"):
        found(("model",))
