"""Device names as drivers give them, and nearest neighbours."""

import pytest

from sequoia_vllm.hardware.device import (
    DeviceError,
    current_cpu_name,
    identify,
    known_devices,
    nearest,
)
from sequoia_vllm.hardware.models import model_classes, parameters_from_name

NAMES = {
    "a100-40gb": ["NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"],
    "a100-80gb": ["NVIDIA A100-SXM4-80GB", "A100-SXM-80GB", "NVIDIA A800-SXM4-80GB"],
    "a100-80gb-pcie": ["NVIDIA A100 80GB PCIe", "NVIDIA A800 80GB PCIe"],
    "h100-sxm": ["NVIDIA H100 80GB HBM3", "NVIDIA H100", "NVIDIA H800"],
    "h100-pcie": ["NVIDIA H100 PCIe"],
    "h100-nvl": ["NVIDIA H100 NVL"],
    "h200": ["NVIDIA H200", "NVIDIA H200 SXM 141GB"],
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


def test_every_device_is_found_by_its_own_id():
    for id_ in (*known_devices(), "x86-cpu"):
        assert identify(id_).id == id_


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


@pytest.mark.parametrize("name", ["", "   "])
def test_empty_names(name):
    with pytest.raises(DeviceError, match="the device name is empty"):
        identify(name)


def test_the_table_says_where_its_values_are_from():
    for device in known_devices().values():
        assert device.source
        assert 10 < device.ridge < 1000
        assert device.spec().id == device.id
    library = [device.id for device in known_devices().values() if device.library]
    assert sorted(library) == [
        "a100-40gb", "a100-80gb", "b200", "h100-pcie", "h100-sxm", "h200", "l4", "l40", "l40s",
        "mi300x", "rtx-4090", "rtx-5090",
    ]  # fmt: skip


def test_this_machine_has_a_name(monkeypatch):
    import platform
    from pathlib import Path

    assert current_cpu_name().strip()
    text = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Gold 6430\nflags: x\n"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: text)
    assert current_cpu_name() == "Intel(R) Xeon(R) Gold 6430"
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: "")
    monkeypatch.setattr(platform, "processor", lambda: "")
    for machine, name in {"x86_64": "cpu", "AMD64": "cpu", "aarch64": "aarch64"}.items():
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert current_cpu_name() == name


class TestNearest:
    def specs(self):
        return {d.id: d.spec() for d in known_devices().values() if d.library}

    def test_a_known_device_is_nearest_to_itself(self):
        for id_, spec in self.specs().items():
            assert nearest(spec, self.specs())[0] == id_

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("NVIDIA A100 80GB PCIe", "a100-80gb"),
            ("NVIDIA H200 NVL", "h200"),
            ("NVIDIA GB200", "b200"),
            ("AMD Instinct MI325X", "mi300x"),
            ("NVIDIA RTX 6000 Ada Generation", "l40s"),
        ],
    )
    def test_relatives(self, name, expected):
        id_, reason = nearest(identify(name).spec, self.specs())
        assert id_ == expected
        assert "operations per byte" in reason
        assert "GB/s" in reason

    def test_with_nothing_known(self):
        cautious, reason = nearest(None, self.specs())
        assert cautious == "rtx-5090"
        assert "nothing but its name is known" in reason


class TestModels:
    @pytest.mark.parametrize(
        ("name", "parameters"),
        [
            ("meta-llama/Llama-2-7b-hf", 7e9),
            ("JackFram/llama-68m", 68e6),
            ("Qwen/Qwen3-0.6B", 0.6e9),
            ("meta-llama/Llama-3.2-1B-Instruct", 1e9),
            ("lmsys/vicuna-33b-v1.3", 33e9),
            ("/data/my_model_1.5b", 1.5e9),
            ("gpt2", None),
            ("examples/models/target", None),
            ("some-7B/target", None),
        ],
    )
    def test_sizes_in_names(self, name, parameters):
        assert parameters_from_name(name) == parameters

    def test_shapes_have_their_published_sizes(self):
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
