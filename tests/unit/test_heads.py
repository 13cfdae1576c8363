"""Shapes and times of heads, and the trees that they call for."""

import json
import math
from dataclasses import replace

import pytest

from sequoia_vllm.drafters.registry import drafts_in_one_pass
from sequoia_vllm.hardware.choose import choose_schedule, choose_tree
from sequoia_vllm.hardware.cost import CostModel, Prefixes
from sequoia_vllm.hardware.device import identify
from sequoia_vllm.hardware.model_config import read_shape
from sequoia_vllm.hardware.models import model_classes
from sequoia_vllm.hardware.roofline import Assumptions, roofline_profile
from sequoia_vllm.hardware.step_curves import draft_curves
from sequoia_vllm.hardware.step_profile import Curve, Overhead, Profile, ProfileError
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from sequoia_vllm.library.selection import parameters_of
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.tree import Acceptance, TokenTree
from tests.support.reference_trees import published
from tests.unit.test_model_config import LLAMA_3

SHIPPED = Acceptance.of(published()["shipped"])
EAGLE_3 = {**LLAMA_3, "num_hidden_layers": 1, "draft_vocab_size": 32000}
DFLASH = {
    "model_type": "qwen3", "num_hidden_layers": 5, "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip

KINDS = {"eagle3": EAGLE_3, "dflash": DFLASH}

# Of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, by hand.
QKV = (2 * 4096) * (32 + 2 * 8) * 128
OUTPUT = 32 * 128 * 4096
MLP = 3 * 4096 * 14336
LM_HEAD = 4096 * 32000
FC = 3 * 4096 * 4096


def test_an_mtp_layer_of_a_target():
    """One layer and a matrix before it, whatever the target has; the rest is the target's."""
    config = {**EAGLE_3, "num_hidden_layers": 36, "num_nextn_predict_layers": 1}
    del config["draft_vocab_size"]
    shape = read_shape(config, "a/target", kind="mtp")
    assert (shape.layers, shape.output_vocab) == (1, 128256)
    assert shape.reading_parameters == 0
    assert shape.layer_parameters == (QKV // 2 + OUTPUT + MLP) + 2 * 4096 * 4096
    assert shape.parameters == shape.layer_parameters


def test_an_mtp_layer_of_a_mixture_has_experts():
    """It follows the target's last layer, and not its first, which is often dense."""
    config = {
        **EAGLE_3, "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 512, "first_k_dense_replace": 1,
    }  # fmt: skip
    assert read_shape(config, "a/target", kind="mtp").experts.layers == 1
    assert read_shape(config, "a/target").experts.layers == 2


def head(config: dict, kind: str, **changes):
    return read_shape({**config, **changes}, "a/head", kind=kind)


def test_an_eagle_3_head_by_hand():
    shape = head(EAGLE_3, "eagle3")
    name = model_classes("heads")["8b-eagle3"].draft.name
    assert read_shape(EAGLE_3, name, kind="eagle3") == model_classes("heads")["8b-eagle3"].draft
    assert shape.layer_parameters == QKV + OUTPUT + MLP == 243_269_632
    assert shape.matmul_parameters == 243_269_632 + LM_HEAD == 374_341_632
    assert shape.reading_parameters == FC == 50_331_648
    assert shape.parameters == 374_341_632 + 50_331_648  # the embedding is the target's
    assert shape.weights_bytes(2) == 2 * shape.parameters
    assert shape.matmul_bytes(2) == 748_683_264
    assert not drafts_in_one_pass(shape.head)
    quantized = head(EAGLE_3, "eagle3", quantization_config={"quant_method": "fp8"})
    assert quantized.weights_bytes(2) == QKV + OUTPUT + MLP + FC + 2 * LM_HEAD


def test_a_dflash_head_by_hand():
    """Its output matrix is the target's: read in every pass, and no memory of its own."""
    shape = head(DFLASH, "dflash")
    of_class = model_classes("heads")["8b-dflash"].draft
    assert read_shape(DFLASH, of_class.name, kind="dflash") == of_class
    layers = 5 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 12288)
    assert shape.matmul_parameters == layers + 4096 * 151936
    assert shape.reading_parameters == 5 * 4096 * 4096
    assert shape.parameters == layers + 5 * 4096 * 4096
    assert shape.head.levels == 15  # of a block of 16, the first is not drafted
    assert drafts_in_one_pass(shape.head)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("eagle3", {"target_hidden_size": 8192}, {"reads": 3 * 8192}),
        ("eagle3", {"num_aux_hidden_states": 4}, {"reads": 4 * 4096}),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}},
         {"reads": 5 * 4096}),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, {"reads": 0}),
        ("eagle3", {"draft_vocab_size": None}, {"output_vocab": 128256}),
        ("dflash", {"block_size": None}, {"levels": None}),
        ("dflash",
         {"dflash_config": {"sample_from_anchor": True, "target_layer_ids": [1, 2, 3, 4, 5]}},
         {"levels": 16}),
        ("dflash", {"draft_vocab_size": 32000}, {"output_vocab": 32000}),
        ("dflash", {"draft_vocab_size": 151936}, {"output_vocab": None}),
        ("dflash", {"dflash_config": {}, "eagle_aux_hidden_state_layer_ids": [2, 9]},
         {"reads": 8192}),
    ],
)  # fmt: skip
def test_what_configurations_say(kind, changes, expected):
    changed = head(KINDS[kind], kind, **changes).head
    assert changed == head(KINDS[kind], kind).head.model_copy(update=expected)


# Nothing but bytes: times are those of reading weights, and a token's keys.
BYTES_ONLY = Assumptions(
    bandwidth_efficiency=1, layer_seconds=0, forward_seconds=0, logits_passes=0,
    small_kernel_seconds=0, one_shot_seconds=0, two_shot_seconds=0, ring_seconds=0,
    ring_step_seconds=0,
)  # fmt: skip
KEY_BYTES = 2 * 2 * 8 * 128
COMPUTES_AT_ONCE = identify("h100-sxm").spec.model_copy(update={"bf16_tflops": math.inf})


def predicted(name: str, spec=identify("h100-sxm").spec, **options) -> Profile:
    pair = model_classes("heads")[name]
    return roofline_profile(spec, pair.target, pair.draft, **options)


@pytest.mark.parametrize("devices", [1, 2])
def test_passes_of_an_eagle_3_head_take_what_its_bytes_take(devices):
    """Its fc is on each device as a whole."""
    endless = COMPUTES_AT_ONCE.model_copy(update={"interconnect_gb_s": math.inf})
    cost = CostModel(
        predicted(
            "8b-eagle3", endless, assumptions=BYTES_ONLY, context_length=1,
            tensor_parallel_size=devices,
        )
    )  # fmt: skip
    per_second = COMPUTES_AT_ONCE.bandwidth_gb_s * 1e9
    level = (748_683_264 + KEY_BYTES) / devices / per_second
    assert float(cost.draft_seconds(1, 1)) == pytest.approx(level, rel=1e-5)
    first = level + 2 * 50_331_648 / per_second
    assert float(cost.first_draft_seconds(1, 4, 1)) == pytest.approx(first, rel=1e-5)


def test_a_dflash_head_takes_one_pass_whatever_the_depth():
    bytes_only = replace(BYTES_ONLY, small_kernel_seconds=1e-12)
    options = {"assumptions": bytes_only, "context_length": 1}
    cost = CostModel(predicted("8b-dflash", COMPUTES_AT_ONCE, **options))
    shape = head(DFLASH, "dflash")
    passing = 2 * (shape.matmul_parameters + shape.reading_parameters) + 5 * KEY_BYTES
    passing /= COMPUTES_AT_ONCE.bandwidth_gb_s * 1e9
    for depth in (1, 4, 15):
        found = float(cost.first_draft_seconds(2.5, depth, 1))
        assert found == pytest.approx(passing, rel=1e-5)
    assert float(cost.draft_seconds(8, 1)) < 1e-9


def test_drawing_is_what_levels_of_a_dflash_head_cost():
    cost = CostModel(predicted("8b-dflash"))
    assumed = Assumptions()
    per_second = identify("h100-sxm").spec.bandwidth_gb_s * 1e9 * assumed.bandwidth_efficiency
    kernels = assumed.level_kernels * assumed.small_kernel_seconds
    expected = kernels + 8 * 151936 * 4 * assumed.logits_passes / per_second
    assert float(cost.draft_seconds(8, 1)) == pytest.approx(expected, rel=1e-4)
    assert float(cost.draft_seconds(1, 1)) < 0.02 * float(cost.first_draft_seconds(1, 1, 1))


def test_a_step_is_the_sum_of_its_parts():
    tree = TokenTree((-1, 0, 0, 1, 1, 2, 3))  # depth 3; levels of 2 and 1 nodes with children
    for name, in_one_pass in (("8b-eagle3", False), ("8b-dflash", True)):
        cost = CostModel(predicted(name))
        prefixes = Prefixes.of(tree, SHIPPED)
        rows = 1 + 3 if in_one_pass else float(prefixes.expected_tokens[-1])
        [reading] = [c for c in cost.profile.draft_reading if c.batch_size == 1]
        table = dict(zip(reading.tokens, reading.seconds, strict=True))
        first = table[4] if in_one_pass else float(cost.first_draft_seconds(rows, 3, 1))
        expected = float(
            cost.target_seconds(7, 1) + first + cost.draft_seconds(2, 1)
            + cost.draft_seconds(1, 1) + cost.tree_overhead(1)
        )  # fmt: skip
        assert cost.tree_seconds(prefixes, 1) == pytest.approx(expected)


def test_a_tree_has_no_more_levels_than_the_head_drafts(tmp_path):
    profile = predicted("8b-dflash")
    assert choose_tree(SHIPPED, profile).depth > 6
    short = profile.model_copy(update={"head": profile.head.model_copy(update={"levels": 6})})
    assert choose_tree(SHIPPED, short).depth == 6
    assert choose_schedule(SHIPPED, short, [1, 4]).tree.depth <= 6
    data = profile.to_dict()
    del data["draft_reading"]  # its one pass needs its time
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match="draft_reading"):
        Profile.load(path)


def test_measured_passes_of_each_kind():
    def curve(tokens: list[int], seconds: list[float]) -> Curve:
        return Curve(batch_size=1, context_length=128, tokens=tokens, seconds=seconds)

    passes = curve([1, 8], [0.001, 0.002])
    eagle_3, dflash = (model_classes("heads")[f"8b-{kind}"].draft.head for kind in KINDS)
    assert draft_curves([passes], None) == draft_curves([passes], eagle_3) == ([passes], None)
    levels, reading = draft_curves([passes], dflash)
    profile = Profile(
        source="measured", date="2026-01-01", device="made up", target="t", draft="d",
        target_parameters=2, draft_parameters=1, target_forward=[curve([1, 16], [0.01, 0.01])],
        draft_level=levels, draft_reading=reading, head=dflash,
        overhead=[Overhead(batch_size=1, plain_seconds=0, tree_seconds=0)],
    )  # fmt: skip
    found = CostModel(profile).estimate(TokenTree.chain(7), SHIPPED, 1).seconds
    assert found == pytest.approx(0.01 + 0.002, abs=1e-6)


H100 = "NVIDIA H100 80GB HBM3"


def pair_of(name: str) -> tuple[PairKey, PairShapes]:
    found = model_classes("heads")[name]
    key = PairKey(H100, found.target.name, found.draft.name, "bfloat16")
    return key, PairShapes(found.target, found.draft, head=found.draft.head.kind)


@pytest.mark.parametrize(
    ("name", "words"),
    [("8b-eagle3", "an EAGLE-3 head of 425m"), ("8b-dflash", "a DFlash head of 1.05b")],
)
def test_trees_of_heads_are_computed(tmp_path, name, words):
    key, shapes = pair_of(name)
    found = TreeLibrary(user=tmp_path).select(key, shapes=shapes)
    assert found.entry.name.startswith(f"computed/h100-sxm/{found.entry.model_class}/")
    assert found.entry.model_class.endswith(f"b-{shapes.head}")
    assert words in found.reason
    vector = Acceptance.of(found.entry.acceptance)
    assert found.entry.tree == choose_schedule(vector, predicted(name)).tree


def test_the_name_of_a_head_has_its_targets_size():
    key, shapes = pair_of("8b-eagle3")
    assert parameters_of(key, PairShapes(None, None)) == (8e9, 8e9)
    assert parameters_of(key, PairShapes(None, None, head="eagle3")) == (8e9, None)
    sizes = parameters_of(key, PairShapes(None, shapes.draft, head="eagle3"))
    assert sizes == (8e9, 374_341_632 + FC)
