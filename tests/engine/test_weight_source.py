"""What vLLM's offloading options come to: bytes of a pass, the name they are kept under, trees."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend import engine_config
from sequoia_vllm.engine.offload import offloaded_layers, weight_source, with_streamed
from sequoia_vllm.hardware.models import every_class
from sequoia_vllm.library.pair_key import PairKey, PairShapes
from tests.support.engines import configured
from tests.support.models import DRAFT, TARGET

LLAMA = every_class()["70b-8b"].target
LAYER = 2.0 * LLAMA.layer_parameters / LLAMA.layers
GIB = 2**30
PAIR = PairKey("NVIDIA L40", LLAMA.name, LLAMA.name, "bfloat16")


def arguments(**options) -> EngineArgs:
    return EngineArgs(model=TARGET, **options)


def streamed(device="NVIDIA L40", devices=1, **options):
    return offloaded_layers(arguments(**options)).streamed(LLAMA, "bfloat16", device, devices)


def test_nothing_is_offloaded_unless_asked_for():
    assert offloaded_layers(arguments()) is None
    assert offloaded_layers(arguments(offload_backend="uva")) is None
    assert offloaded_layers(arguments(offload_backend="prefetch")) is None


def test_on_cpus_vllms_offloaders_do_nothing():
    assert weight_source(arguments(cpu_offload_gb=60)) is None


def test_layers_on_a_disk(disk):
    """They are kept apart by how many of them stay in memory."""

    def name(**keys) -> str:
        offload = {"weights": "disk", "directory": str(disk), **keys}
        return weight_source(arguments(additional_config={"sequoia_offload": offload})).name

    assert (name(), name(memory_gib=1.5)) == ("disk-0gib", "disk-1.5gib")


def test_uva_is_per_device():
    for devices in (1, 2):
        found = streamed(devices=devices, cpu_offload_gb=20)
        assert found.bytes_per_pass == 20 * GIB
        assert found.tile_rows == 128
        assert not found.overlaps
    assert streamed(cpu_offload_gb=1000).bytes_per_pass == 80 * LAYER
    assert streamed(devices=4, cpu_offload_gb=1000).bytes_per_pass == 20 * LAYER


@pytest.mark.parametrize(
    ("group", "of_group", "layers"), [(80, 72, 72), (8, 2, 20), (7, 3, 33), (3, 1, 26), (1, 1, 80)]
)
def test_prefetching_offloads_the_last_layers_of_each_group(group, of_group, layers):
    """By vLLM's rule, layer by layer, in `PrefetchOffloader.wrap_modules`."""
    offloaded = [layer for layer in range(80) if layer % group >= group - of_group]
    assert len(offloaded) == layers
    found = streamed(offload_group_size=group, offload_num_in_group=of_group)
    assert found.bytes_per_pass == pytest.approx(layers * LAYER)
    assert not found.overlaps  # one buffer
    assert found.tile_rows is None
    ahead = streamed(
        offload_group_size=group, offload_num_in_group=of_group, offload_prefetch_step=2
    )
    assert ahead.overlaps
    assert ahead.buffer_bytes == pytest.approx(2 * LAYER)


def test_links_are_the_devices():
    rates = {
        device: streamed(device=device, cpu_offload_gb=60).bytes_per_second
        for device in ("NVIDIA L40", "NVIDIA H200", "NVIDIA GH200 480GB")
    }
    assert sorted(rates, key=rates.get) == ["NVIDIA L40", "NVIDIA H200", "NVIDIA GH200 480GB"]
    assert "(assumed)" in streamed(device="abacus", cpu_offload_gb=60).source


def test_names_tell_what_changes_times():
    options = [
        {"cpu_offload_gb": 60},
        {"cpu_offload_gb": 60.5},
        {"cpu_offload_gb": 60, "cpu_offload_params": {"experts"}},
        {"offload_group_size": 8},
        {"offload_group_size": 8, "offload_num_in_group": 2},
        {"offload_group_size": 8, "offload_prefetch_step": 2},
    ]
    names = [offloaded_layers(arguments(**given)).name for given in options]
    assert len(set(names)) == len(options)
    assert names[0] == "uva-60gib"
    assert names[-1] == "prefetch-1-of-8-2-ahead"


def test_some_parameters_of_layers_are_no_known_number_of_bytes():
    source = offloaded_layers(arguments(cpu_offload_gb=60, cpu_offload_params={"mlp"}))
    shapes = with_streamed(PairShapes(LLAMA, LLAMA), source, PAIR)
    assert shapes.streamed is None
    assert "uva-60gib-mlp offloads is not known" in shapes.problem
    unread = PairShapes(None, LLAMA, "no configuration")
    assert with_streamed(unread, source, PAIR) == unread


def test_types_without_a_size_are_said():
    source = offloaded_layers(arguments(cpu_offload_gb=60))
    found = with_streamed(PairShapes(LLAMA, LLAMA), source, replace(PAIR, dtype="int3"))
    assert "dtype 'int3'" in found.problem


def test_auto_chooses_for_what_is_offloaded(monkeypatch, tmp_path):
    """Stands for an L40 that reads all of this small target over its link; vLLM runs on a CPU."""
    monkeypatch.setattr(engine_config, "current_device_name", lambda: "NVIDIA L40")
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path))

    def settings() -> SequoiaSettings:
        asked = {"method": "sequoia", "model": DRAFT}
        return SequoiaSettings.of(configured(asked, max_model_len=512))

    before = settings()
    # What a GPU's front end would read; offloading itself is not for CPUs.
    source = offloaded_layers(arguments(cpu_offload_gb=1))
    monkeypatch.setattr(engine_config, "weight_source", lambda arguments: source)
    after = settings()
    assert "-offloaded/" in after.tree_source
    assert "of weights read in each pass: PCIe 4.0 x16, uva" in after.tree_source
    assert "-offloaded/" not in before.tree_source
    assert after.adapts_as != before.adapts_as


def test_all_that_is_read_of_the_arguments_is_there():
    """`SimpleNamespace` has nothing by default: what is read is what the ledger lists."""
    given = SimpleNamespace(
        offload_backend="auto", cpu_offload_gb=1, cpu_offload_params=set(), offload_group_size=0,
        offload_num_in_group=1, offload_prefetch_step=1, offload_params=set(),
    )  # fmt: skip
    assert offloaded_layers(given).name == "uva-1gib"
