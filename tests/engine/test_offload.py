"""Targets whose layers are read from a disk in every pass have the tokens of those in memory."""

import gc
import os

import pytest
from torch import nn
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm

from sequoia_vllm.adaptation.told_branches import DISK
from sequoia_vllm.config import ConfigError, OffloadSpec
from sequoia_vllm.engine.offload import weight_file
from sequoia_vllm.engine.offload.disk import DiskOffloader
from sequoia_vllm.engine.offload.disk import _large as large
from sequoia_vllm.engine.offload.weight_file import OffloadError
from tests.support.architectures import save_architecture
from tests.support.cores import needs_two_cores
from tests.support.engines import generated, metric, plain_outputs, runner_of, running, sequoia
from tests.support.models import DRAFT, TARGET, prompts
from tests.support.quantised import QUANTISED, save_quantised

pytestmark = [pytest.mark.engine, pytest.mark.sharded]

PROMPTS = prompts(4)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
PARAMS = [GREEDY, SEEDED, GREEDY, SEEDED]
NEED_WEIGHTS_IN_MEMORY = (
    "reload_weights", "reset_weights", "compute_weight_checksums", "save_sharded_state",
    "save_tensorized_model",
)  # fmt: skip


def offload(disk, **keys):
    return {"weights": "disk", "directory": str(disk), **keys}


def plain(disk, **keys):
    """What an engine without Sequoia takes."""
    return {"sequoia_offload": offload(disk, **keys)}


def offloader_of(llm) -> DiskOffloader:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker._offloader


def found(llm, params=PARAMS):
    return generated(llm, PROMPTS, params)


def test_trees(disk):
    buffers = 2
    expected = plain_outputs(PROMPTS, PARAMS)
    with running(sequoia(offload=offload(disk, buffers=buffers))) as llm:
        assert found(llm) == expected
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 20
        layers = runner_of(llm).model.model.layers
        places = {layer.mlp.down_proj.weight.data_ptr() for layer in layers}
        assert (len(layers), len(places)) == (4, buffers)
        drafts = runner_of(llm).drafter.model.model.layers
        assert all("streamed" not in layer.forward.__qualname__ for layer in drafts)
        assert runner_of(llm).drafter.foretold.branches.pass_time is DISK
        assert list(disk.iterdir()) == []
        for method in (*NEED_WEIGHTS_IN_MEMORY, "start_weight_update"):
            with pytest.raises(Exception, match=rf"^{method} reads or writes|not configured"):
                llm.collective_rpc(method)
        llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
        assert llm.reset_prefix_cache()
        assert found(llm, GREEDY) == plain_outputs(PROMPTS, GREEDY)


def test_plain_decoding_and_vllms_chain(disk):
    chain = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3}
    expected = plain_outputs(PROMPTS, GREEDY)
    for speculative_config in (None, chain):
        with running(speculative_config, additional_config=plain(disk)) as llm:
            assert found(llm, GREEDY) == expected
            ring = offloader_of(llm)._ring
            assert ring.bytes_read > 24 * offloader_of(llm).streamed_bytes / 4


def test_the_first_layers_stay_in_memory(disk):
    """Layers that fit stay: of four layers of the same size, two."""
    expected = plain_outputs(PROMPTS, GREEDY)
    with running(additional_config=plain(disk)) as llm:
        all_layers = offloader_of(llm).streamed_bytes
    keys = {"memory_gib": 0.6 * all_layers / 2**30}
    with running(sequoia(offload=offload(disk, **keys))) as llm:
        assert found(llm, GREEDY) == expected
        assert offloader_of(llm).streamed_bytes == all_layers / 2
        layers = runner_of(llm).model.model.layers
        assert [layer.forward.__qualname__.endswith("streamed") for layer in layers] == [
            False, False, True, True,
        ]  # fmt: skip
    # What could not be offloaded is said: nobody believes that it was.
    with (
        pytest.raises(OffloadError, match="all layers fit in memory_gib; leave offload out"),
        running(additional_config=plain(disk, memory_gib=10)),
    ):
        pass


def test_weights_really_come_from_the_disk(disk):
    """What is changed there ends the engine's next pass."""
    with running(additional_config=plain(disk)) as llm:
        offloader = offloader_of(llm)
        offloader._ring._unchecked.update((layer, 0) for layer in range(4))
        os.pwrite(offloader._file._file.fileno(), os.urandom(4096), 4096)
        with pytest.raises(Exception, match="what the disk gave is not what was written"):
            llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_architectures(name, tmp_path, disk):
    """Kernels of mixtures of experts want packed weights: these are on the disk."""
    model = save_architecture(tmp_path / "model", name)
    texts = [{"prompt_token_ids": list(range(3 + i, 40 + i))} for i in range(3)]
    expected = []
    for config in ({}, plain(disk)):
        with running(model=model, skip_tokenizer_init=True, additional_config=config) as llm:
            params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
            expected.append(generated(llm, texts, params))
            if config:
                assert offloader_of(llm).streamed_bytes > 4 * 64 * 128 * 4
    assert expected[0] == expected[1]


def test_quantised_targets(tmp_path, disk, monkeypatch):
    """Targets work whose kernels read weights where vLLM has them; others are refused."""
    # With AMX packed weights would be larger, and int8 would have another kernel.
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    monkeypatch.setattr(scaled_mm, "check_cpu_sgl_kernel", lambda *_: False)
    model, dtype = save_quantised(tmp_path / "int4", TARGET, "int4"), QUANTISED["int4"].dtype
    with running(model=model, dtype=dtype) as llm:
        expected = found(llm, GREEDY)
    with running(model=model, dtype=dtype, additional_config=plain(disk)) as llm:
        assert found(llm, GREEDY) == expected
        weights = sum(
            weight.nbytes
            for layer in runner_of(llm).model.model.layers
            for _, weight in large(layer)
        )
        # Packed weights lie where they were loaded to: packed all in memory, they would lie behind.
        assert 1e6 < weights <= offloader_of(llm)._file._end < weights + 4 * 4096
    model, dtype = save_quantised(tmp_path / "int8", TARGET, "int8"), QUANTISED["int8"].dtype
    with (
        pytest.raises(OffloadError, match="keep weights in memory of their own"),
        running(model=model, dtype=dtype, additional_config=plain(disk)),
    ):
        pass


@pytest.mark.parametrize("when", ["built", "loaded"])
def test_layers_that_share_weights_are_refused(when, disk):
    """One buffer holds a layer's weights: those of another would not be in it."""
    first, second = (nn.Sequential(nn.Linear(256, 256)) for _ in range(2))
    offloader = DiskOffloader(OffloadSpec(directory=disk))

    def share():
        second[0].weight = first[0].weight

    if when == "loaded":
        offloader.wrap_modules(iter([first, second]))
    share()
    with pytest.raises(OffloadError, match="decoder layers of this model share weights"):
        offloader.wrap_modules(iter([first, second])) if when == "built" else offloader.post_init()
    offloader.close()


@needs_two_cores
def test_two_ranks(disk, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = plain_outputs(PROMPTS, GREEDY)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running(sequoia(offload=offload(disk)), **options) as llm:
        assert found(llm, GREEDY) == expected
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("with_trees", "without", "options", "message"),
    [
        ({"directory": "/missing"}, None, {}, "/missing is no directory"),
        ({}, None, {}, "directory: Field required"),
        ({"directory": "/tmp", "memory_gb": 3}, None, {}, "did you mean 'memory_gib'"),
        ({"directory": "/tmp"}, {"directory": "/"}, {}, "differ: give one"),
        (None, {"directory": "/tmp", "weights": "ssd"}, {},
         "additional_config.sequoia_offload: weights: Input should be 'disk'"),
        (None, {"directory": "/tmp"}, {"enable_lora": True}, "drop --enable-lora"),
        (None, {"directory": "/tmp"}, {"weight_transfer_config": {"backend": "nccl"}},
         "drop --weight-transfer-config"),
        (None, {"directory": "/tmp"}, {"worker_cls": "tests.support.engines.Other"},
         "leave it at 'auto'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_models_load(with_trees, without, options, message):
    if with_trees is not None:
        options = {**options, "speculative_config": sequoia(offload=with_trees)}
    if without is not None:
        options = {**options, "additional_config": {"sequoia_offload": without}}
    with pytest.raises((ConfigError, OffloadError), match=message):
        EngineArgs(model=str(TARGET), **options).create_engine_config()


def test_a_full_disk_is_said_so(disk, monkeypatch):
    ordinary = os.posix_fallocate

    def allocate(file, offset, length):
        if offset > 4 << 20:
            raise OSError(28, "No space left on device")
        ordinary(file, offset, length)

    monkeypatch.setattr(weight_file.os, "posix_fallocate", allocate)
    with (
        pytest.raises(OffloadError, match=r"no room for another .* larger disk, or keep more in m"),
        running(additional_config=plain(disk)),
    ):
        pass
    gc.collect()
