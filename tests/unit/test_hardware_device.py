"""Device names as drivers give them, nearest neighbours, and several devices: times, memory."""

import math
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scaling import memory_problem, weights_bytes, with_interconnect
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.device import (
    DeviceError,
    current_cpu_name,
    identify,
    known_devices,
    nearest,
    this_device_name,
)
from sequoia_vllm.hardware.models import (
    Recurrent,
    model_classes,
    parameters_from_name,
    published_shape,
)
from sequoia_vllm.hardware.roofline import Assumptions, Interconnect, roofline_profile
from sequoia_vllm.tree import Acceptance
from tests.support.reference_trees import published

NAMES = {
    "a100-40gb": ["NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"],
    "a100-80gb": ["NVIDIA A100-SXM4-80GB", "A100-SXM-80GB", "NVIDIA A800-SXM4-80GB"],
    "a100-80gb-pcie": ["NVIDIA A100 80GB PCIe", "NVIDIA A800 80GB PCIe"],
    "h100-sxm": ["NVIDIA H100 80GB HBM3", "NVIDIA H100", "NVIDIA H800"],
    "h100-pcie": ["NVIDIA H100 PCIe"],
    "h100-nvl": ["NVIDIA H100 NVL"],
    "h200": ["NVIDIA H200", "NVIDIA H200 SXM 141GB", "NVIDIA(R) H200(TM)"],
    "h200-nvl": ["NVIDIA H200 NVL"],
    "b200": ["NVIDIA B200"],
    "gb200": ["NVIDIA GB200"],
    "gh200": ["NVIDIA GH200 480GB", "NVIDIA GH200 120GB"],
    "l40": ["NVIDIA L40"],
    "l40s": ["NVIDIA L40S"],
    "l4": ["NVIDIA L4"],
    "rtx-4090": ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D", "GeForce RTX 4090"],
    "rtx-5090": ["NVIDIA GeForce RTX 5090"],
    "mi300x": ["AMD Instinct MI300X", "AMD Instinct MI300X OAM", "AMD Instinct MI300X VF"],
    "mi325x": ["AMD Instinct MI325X"],
    "a10g": ["NVIDIA A10G"],
    "a10": ["NVIDIA A10"],
    "t4": ["Tesla T4", "NVIDIA T4"],
    "v100": ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-32GB", "NVIDIA V100-SXM2-32GB"],
    "rtx-6000-ada": ["NVIDIA RTX 6000 Ada Generation"],
    "rtx-a6000": ["NVIDIA RTX A6000"],
    "rtx-pro-6000": [
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    ],
    "x86-cpu": [
        "cpu", "Intel(R) Xeon(R) Processor", "Intel(R) Xeon(R) Platinum 8480+",
        "AMD EPYC 9654 96-Core Processor", "13th Gen Intel(R) Core(TM) i7-13700K",
        "AMD Ryzen 9 7950X 16-Core Processor", "QEMU Virtual CPU version 2.5+",
        "Common KVM processor", "Genuine Intel(R) CPU 0000%@",
    ],
    None: [
        "NVIDIA GeForce RTX 4090 Laptop GPU", "Intel(R) Data Center GPU Max 1550",
        "Intel(R) Arc(TM) A770 Graphics", "NVIDIA GB10", "Neoverse-N1", "Apple M4",
        "NVIDIA A1000", "TPU v5e",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"), [(name, id_) for id_, names in NAMES.items() for name in names]
)
def test_driver_names(name, expected):
    assert identify(name).id == expected
    assert identify(name.upper()).id == expected


def test_every_device_is_found_by_its_own_id_and_no_name_is_an_error():
    for id_ in (*known_devices(), "x86-cpu"):
        assert identify(id_).id == id_
    for name in ("", "   "):
        with pytest.raises(DeviceError, match="the device name is empty"):
            identify(name)


@pytest.mark.parametrize(
    ("name", "id_", "memory", "bandwidth", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-80gb", 40, 2039 / 2, 312 * 3 / 7),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-40gb", 5, 1555 / 8, 312 / 7),
        ("NVIDIA H100 80GB HBM3 MIG 7g.80gb", "h100-sxm", 80, 3350, 989.4),
        ("NVIDIA H200 MIG 1g.18gb", "h200", 18, 600, 989.4 / 7),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "h100-sxm", 10, 3350 / 8, 989.4 / 7),
    ],
)
def test_mig_slices(name, id_, memory, bandwidth, tflops):
    device = identify(name)
    assert device.id == id_
    assert device.mig in name
    assert device.spec.memory_gb == memory
    assert device.spec.bandwidth_gb_s == pytest.approx(bandwidth)
    assert device.spec.bf16_tflops == pytest.approx(tflops)
    assert re.fullmatch("./7 of the compute and ./8 of the memory slices", device.spec.note)


def test_the_table_says_where_its_values_are_from():
    for device in known_devices().values():
        assert device.source
        assert 10 < device.ridge < 1000
        assert device.spec().id == device.id


def test_this_machine_has_a_name(monkeypatch):
    assert current_cpu_name().strip()
    text = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Gold 6430\nflags: x\n"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: text)
    assert current_cpu_name() == "Intel(R) Xeon(R) Gold 6430"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: "")
    monkeypatch.setattr(platform, "processor", lambda: "")
    for machine, name in {"x86_64": "cpu", "AMD64": "cpu", "aarch64": "aarch64"}.items():
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert current_cpu_name() == name


@pytest.mark.parametrize(
    ("said", "name"), [("NVIDIA L4\\nNVIDIA L4\\n", "NVIDIA L4"), ("", "a CPU"), (None, "a CPU")]
)
def test_this_machine_is_named_by_its_first_gpu(said, name, monkeypatch, tmp_path):
    monkeypatch.setattr("sequoia_vllm.hardware.device.current_cpu_name", lambda: "a CPU")
    monkeypatch.setenv("PATH", str(tmp_path))
    if said is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nprintf '{said}'\n")
        tool.chmod(0o755)
    assert this_device_name() == name


LIBRARY = {d.id: d.spec() for d in known_devices().values() if d.library}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100 80GB PCIe", "a100-80gb"), ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA GB200", "b200"), ("AMD Instinct MI325X", "mi300x"),
    ],
)  # fmt: skip
def test_relatives_are_the_nearest(name, expected):
    id_, reason = nearest(identify(name).spec, LIBRARY)
    assert id_ == expected
    assert "operations per byte" in reason
    assert "GB/s" in reason


def test_a_known_device_is_nearest_to_itself_and_an_unknown_one_to_the_most_cautious():
    assert all(nearest(spec, LIBRARY)[0] == id_ for id_, spec in LIBRARY.items())
    cautious, reason = nearest(None, LIBRARY)
    assert cautious == "rtx-5090"
    assert "nothing but its name is known" in reason


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-2-7b-hf", 7e9), ("JackFram/llama-68m", 68e6),
        ("Qwen/Qwen3-0.6B", 0.6e9), ("meta-llama/Llama-3.2-1B-Instruct", 1e9),
        ("lmsys/vicuna-33b-v1.3", 33e9), ("/data/my_model_1.5b", 1.5e9),
        ("gpt2", None), ("examples/models/target", None), ("some-7B/target", None),
    ],
)  # fmt: skip
def test_sizes_in_names_of_models(name, parameters):
    assert parameters_from_name(name) == parameters


def test_shapes_have_their_published_sizes():
    sizes = {
        shape.name: shape.parameters / 1e9
        for c in model_classes().values()
        for shape in (c.target, c.draft)
    }
    for name, billions in {
        "meta-llama/Llama-2-7b-hf": 6.74, "meta-llama/Llama-2-13b-hf": 13.02,
        "lmsys/vicuna-33b-v1.3": 32.53, "meta-llama/Llama-3.1-8B": 8.03,
        "meta-llama/Llama-3.1-70B": 70.55, "Qwen/Qwen3-8B": 8.19, "Qwen/Qwen3-32B": 32.76,
        "JackFram/llama-68m": 0.068, "princeton-nlp/Sheared-LLaMA-1.3B": 1.345,
        "meta-llama/Llama-3.2-1B": 1.236, "Qwen/Qwen3-0.6B": 0.596,
    }.items():  # fmt: skip
        assert sizes[name] == pytest.approx(billions, rel=0.001)
    name = "meta-llama/Llama-3.1-8B"
    tuned = published_shape(f"{name}-Instruct")
    assert tuned == published_shape(name).model_copy(update={"name": f"{name}-Instruct"})
    assert published_shape("a/model") is None


SHIPPED = Acceptance.of(published()["shipped"])
MIB = 2**20
# Nothing but what a device moves and computes, on links that cost nothing but bytes.
BARE = Assumptions(
    layer_seconds=0, forward_seconds=0, logits_passes=0, small_kernel_seconds=0,
    one_shot_seconds=0, two_shot_seconds=0, ring_seconds=0, ring_step_seconds=0,
)  # fmt: skip

rates = st.floats(1, 2000)
kinds = st.sampled_from(["switch", "mesh", "bus", "host"])
groups = st.sampled_from([2, 4, 8])


def h100(gb_s=None, kind=None):
    return with_interconnect(identify("h100-sxm").spec, gb_s, kind)


def endless():
    """Links that carry any number of bytes in no time."""
    return h100().model_copy(update={"interconnect_gb_s": math.inf})


def links(devices, gb_s=450.0, kind="switch"):
    return Interconnect(h100(gb_s, kind), devices, Assumptions())


def predicted(device, name="70b-1b", **options):
    pair = model_classes()[name]
    return roofline_profile(device, pair.target, pair.draft, **options)


def cost(device, name="70b-1b", **options):
    return CostModel(predicted(device, name, assumptions=BARE, **options))


class TestReductions:
    def test_one_device_has_nothing_to_add_up_and_more_gather_logits_in_a_ring(self):
        assert links(1).all_reduce(MIB) == links(1).all_gather(MIB) == 0
        assert links(1, kind="mesh").all_reduce(MIB) == 0
        row = 128256 * 2
        assert links(4).all_gather(row) == pytest.approx(13e-6 + 0.75 * row / 360e9)

    @pytest.mark.parametrize(
        ("devices", "kind", "size", "seconds"),
        [
            # One-shot: 6 us, and 7 tensors at 0.8 * 450 GB/s.
            (8, "switch", 16384, 6e-6 + 7 * 16384 / 360e9),
            # Two-shot: 12 us, and 2 * 7/8 tensors.
            (8, "switch", 4 * MIB, 12e-6 + 1.75 * 4 * MIB / 360e9),
            # A ring: 10 us, 14 steps of 1 us, and the same bytes.
            (8, "bus", 16384, 24e-6 + 1.75 * 16384 / 360e9),
            (4, "bus", 16384, 16e-6 + 1.5 * 16384 / 360e9),
            # Two devices on PCIe read each other's memory, but not those of GeForce drivers.
            (2, "bus", 16384, 6e-6 + 16384 / 360e9),
            (2, "host", 16384, 12e-6 + 16384 / 360e9),
            # A mesh of eight gives 3/7 of its links to a group of four.
            (4, "mesh", 16384, 6e-6 + 3 * 16384 / (360e9 * 3 / 7)),
            (8, "mesh", 16384, 6e-6 + 7 * 16384 / 360e9),
        ],
    )
    def test_the_cheapest_way(self, devices, kind, size, seconds):
        assert links(devices, kind=kind).all_reduce(size) == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("devices", "mib", "microseconds"),
        [(2, 0.5, 7), (4, 0.5, 10), (4, 1, 14), (4, 2, 23), (6, 0.5, 13), (6, 1, 17), (6, 4, 37)],
    )
    def test_near_published_measurements(self, devices, mib, microseconds):
        """H100, bfloat16 rows of 8,192: the faster of vLLM's one-shot and two-shot kernels.

        From vllm-project/vllm#24111 (2 and 6 devices) and #24532 (4).
        """
        assert 1e6 * links(devices).all_reduce(mib * MIB) == pytest.approx(microseconds, rel=0.2)

    @given(groups, kinds, rates, st.floats(0, 1e9), st.floats(1, 10), st.floats(1, 10))
    def test_more_bytes_or_a_slower_link_are_never_faster(
        self, devices, kind, rate, size, more, faster
    ):
        one, quick = links(devices, rate, kind), links(devices, rate * faster, kind)
        for name in ("all_reduce", "all_gather"):
            seconds = getattr(one, name)(size)
            assert getattr(one, name)(size * more) >= seconds
            assert getattr(quick, name)(size) <= seconds
            assert seconds > 0


class TestForward:
    @pytest.mark.parametrize("name", ["70b-1b", "70b-8b", "8b-1b", "32b-0.6b"])
    @pytest.mark.parametrize("devices", [2, 4, 8])
    def test_links_that_cost_nothing_divide_everything(self, name, devices):
        one, many = (cost(endless(), name, tensor_parallel_size=n) for n in (1, devices))
        for tokens, batch in ((1, 1), (16, 1), (128, 4)):
            for part in ("target_seconds", "draft_seconds"):
                whole, split = (float(getattr(x, part)(tokens, batch)) for x in (one, many))
                assert split == pytest.approx(whole / devices, rel=1e-5)  # profiles: six digits

    def test_reductions_then_cost_their_latency_only(self):
        start = 1e-3
        latencies = ("one_shot_seconds", "two_shot_seconds", "ring_seconds")
        late = replace(BARE, **dict.fromkeys(latencies, start))
        quick, slow = (
            CostModel(predicted(endless(), tensor_parallel_size=8, assumptions=assumed))
            for assumed in (BARE, late)
        )
        # Two for each layer, one after the embedding, and the gathered logits.
        for part, layers in (("target_seconds", 80), ("draft_seconds", 16)):
            extra = float(getattr(slow, part)(1, 1) - getattr(quick, part)(1, 1))
            assert extra == pytest.approx((2 * layers + 2) * start, rel=1e-4)

    @pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("fp8", 2)])
    def test_what_is_reduced_is_never_quantized(self, dtype, width):
        slow, quick = (
            cost(link, tensor_parallel_size=2, dtype=dtype) for link in (h100(1, "host"), endless())
        )
        extra = float(slow.target_seconds(8, 1) - quick.target_seconds(8, 1))
        # Two devices: as many bytes each way as the sums have, and half of the logits.
        moved = 8 * width * (161 * 8192 + 128256 / 2)
        assert extra == pytest.approx(moved / 0.8e9, rel=1e-4)

    def test_a_pass_takes_the_operations_and_bytes_of_products_attention_and_states(self):
        """Half of the layers have states: a tree's pass moves them three times, a plain one twice.

        Devices that read in no time, or compute in no time, show each by itself.
        """
        pair, batch, context = model_classes()["8b-1b"], 2, 100
        states = Recurrent(layers=16, heads=16, value_heads=32, key=128, value=64)
        target = pair.target.model_copy(update={"recurrent": states})

        def seconds(endless):
            times = roofline_profile(
                h100().model_copy(update={endless: math.inf}), target, pair.draft,
                assumptions=BARE, context_length=context, tokens=(1, 256), batch_sizes=(batch,),
            )  # fmt: skip
            return times.target_forward[0].seconds

        for tokens, passes, *found in zip(
            (1, 256), (2, 3), seconds("bandwidth_gb_s"), seconds("bf16_tflops"), strict=True
        ):
            rows = batch * tokens
            operations = 2 * target.matmul_parameters * rows
            operations += 16 * 4 * 32 * 128 * (context + tokens) * rows
            operations += batch * 16 * 32 * 4 * tokens * 128 * (64 + tokens)
            moved = 2 * target.matmul_parameters + batch * context * 16 * 2 * 8 * 128 * 2
            moved += passes * batch * 16 * 32 * 64 * 128 * 4
            expected = operations / (0.65 * 989.4e12), moved / (0.85 * 3350e9)
            assert found == pytest.approx(expected, rel=1e-5)

    def test_key_heads_are_copied_where_there_are_too_few(self):
        # 8 key/value heads: 16 devices each read as many keys as 8 do.
        pair = model_classes()["70b-1b"]
        assert [pair.target.kv_copies(n) for n in (1, 2, 8, 16, 32)] == [1, 1, 1, 2, 4]

        def context_seconds(devices):
            long, short = (
                cost(endless(), tensor_parallel_size=devices, context_length=context)
                for context in (100_001, 1)
            )
            return float(long.target_seconds(1, 1) - short.target_seconds(1, 1))

        assert context_seconds(16) == pytest.approx(context_seconds(8), rel=1e-3)
        assert context_seconds(8) == pytest.approx(context_seconds(1) / 8, rel=1e-3)

    @pytest.mark.parametrize(
        ("name", "devices", "message"),
        [
            ("7b-68m", 8, "llama-68m cannot be split over 8 devices.*12 heads.*use 1, 2, 4"),
            ("70b-1b", 3, "Llama-3.1-70B cannot be split over 3 .*use 1, 2, 4, 8, 16"),
            ("33b-1.3b", 8, "vicuna-33b-v1.3 cannot be split over 8 .*use 1, 2, 4$"),
            ("70b-1b", 0, "tensor parallel size 0: at least 1 device"),
        ],
    )
    def test_what_vllm_cannot_split(self, name, devices, message):
        with pytest.raises(ValueError, match=message):
            predicted(h100(), name, tensor_parallel_size=devices)

    @pytest.mark.parametrize(("heads", "key_heads", "devices"), [(40, 8, 16), (48, 6, 4)])
    def test_query_heads_and_key_heads_must_both_split(self, heads, key_heads, devices):
        shape = model_classes()["8b-1b"].target
        heads = {"heads": heads, "kv_heads": key_heads}
        assert not shape.model_copy(update=heads).splits(devices)


class TestChoice:
    @given(kinds, groups, st.floats(8, 900), st.floats(1.1, 20), st.sampled_from([1, 4, 16]))
    @settings(deadline=None, max_examples=25)
    def test_a_slower_link_never_gives_more_tokens_per_second(
        self, kind, devices, rate, factor, batch
    ):
        def best(gb_s):
            times = predicted(h100(gb_s, kind), tensor_parallel_size=devices, batch_sizes=(batch,))
            tree = choose_tree(SHIPPED, times, batch, max_size=64, max_depth=12)
            return CostModel(times).estimate(tree, SHIPPED, batch).tokens_per_second

        assert best(rate) <= best(rate * factor) * (1 + 1e-6)


class TestMemory:
    def test_a_70b_pair_by_hand(self):
        pair, spec = model_classes()["70b-1b"], identify("h100-sxm").spec
        models = pair.target, pair.draft
        weights = weights_bytes(*models, devices=2)
        assert weights == pytest.approx(70_553_174_016 + 1_235_746_816, rel=1e-3)
        # 8 heads of 128 in 80 layers, and of 64 in 16, keys and values, two bytes, halved.
        per_token = 2 * 8 * (80 * 128 + 16 * 64)
        room = int((0.92 * 80 * 2**30 - 3 * 2**30 - weights) // per_token)
        assert memory_problem(spec, *models, room, 2) is None
        assert memory_problem(spec, *models, room + 1, 2) == f"KV cache for {room} tokens only"
        # 133.7 GiB of weights: more than 80, and all but 7 of 141, of which vLLM takes 92 %.
        assert memory_problem(spec, *models, 1, 1) == "does not fit"
        h200 = identify("h200").spec
        assert memory_problem(h200, *models, 1, 1) == "no room for a KV cache"
