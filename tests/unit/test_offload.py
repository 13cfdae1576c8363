"""Weights on a disk or in host memory: what is read, in time; what is said of it; and the draft."""

import errno
import logging
import os
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("vllm")
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader, set_offloader

from sequoia_vllm.engine.offload import (
    offloaded_bytes,
    offloading_backend,
    report_offloading,
    weight_file,
)
from sequoia_vllm.engine.offload.layer_ring import LayerRing
from sequoia_vllm.engine.offload.weight_file import OffloadError, WeightFile
from sequoia_vllm.engine.v2.drafting.drafter import nothing_offloaded
from tests.support.commands import python
from tests.support.ending import wait_until


@pytest.fixture
def file(disk):
    file = WeightFile(disk)
    yield file
    file.close()


@contextmanager
def started(file: WeightFile, regions: list, buffers: int):
    """A ring that reads ahead."""
    ring = LayerRing(file, regions, buffers)
    ring.start()
    yield ring
    ring.close()


def sealed(file: WeightFile, lengths: list[int]) -> tuple[list, list[torch.Tensor]]:
    """Regions of random bytes, and what was written to them."""
    regions, contents = [], []
    for length in lengths:
        region, mapped = file.region(length)
        mapped.copy_(torch.randint(0, 256, mapped.shape, dtype=torch.uint8))
        contents.append(mapped.clone())
        file.seal(region, mapped)
        regions.append(region)
    return regions, contents


def test_regions_begin_and_end_at_pages(disk, file):
    first, _ = file.region(5000)
    second, _ = file.region(4096)
    assert (first.offset, first.length, second.offset, second.length) == (0, 8192, 8192, 4096)
    with pytest.raises(OffloadError, match=r"no room for another .* name one on a larger disk"):
        file.region(1 << 52)
    assert file._end == 12288
    sealed(file, [5000])
    assert list(disk.iterdir()) == []  # nothing is seen there


@given(
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=6),
    buffers=st.integers(2, 5),
    passes=st.lists(st.integers(0, 6), min_size=1, max_size=6),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_each_layer_has_its_weights_while_it_is_computed(disk, lengths, buffers, passes):
    """Also after passes that were broken off; ``passes``: layers computed of each, all if more."""
    file = WeightFile(disk)
    regions, contents = sealed(file, lengths)
    with started(file, regions, buffers) as ring:
        addresses = [ring.bytes_of(layer).data_ptr() for layer in range(len(lengths))]
        for computed in passes:
            for layer in range(min(computed or 1, len(lengths))):
                ring.wait(layer)
                assert torch.equal(ring.bytes_of(layer), contents[layer])
                time.sleep(0.0005)  # what reads ahead has time to do harm
                assert torch.equal(ring.bytes_of(layer), contents[layer])
                if computed:
                    ring.release(layer)
        assert addresses == [ring.bytes_of(layer).data_ptr() for layer in range(len(lengths))]
    assert len(set(addresses)) == min(buffers, len(lengths))
    file.close()


def test_reading_goes_on_while_a_layer_is_computed(file):
    regions, _ = sealed(file, [4096] * 5)
    with started(file, regions, 3) as ring:
        ring.wait(0)
        wait_until(lambda: ring.bytes_read >= 3 * 4096)
        time.sleep(0.01)
        assert ring.bytes_read == 3 * 4096  # as many as there are buffers, and no more


def compute(ring: LayerRing, layers: int) -> None:
    for layer in range(layers):
        ring.wait(layer)
        ring.release(layer)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda file, begin: os.pwrite(file, b"other", begin + 20_000),
         "at byte 49152: what the disk gave is not what was"),
        (lambda file, begin: os.ftruncate(file, begin + 4096), r"the disk gave \d+ of 8192 bytes"),
    ],
)  # fmt: skip
def test_changes_and_short_reads_are_noticed(file, monkeypatch, damage, error):
    monkeypatch.setattr(weight_file, "CHUNK", 8192)
    regions, _ = sealed(file, [30_000, 30_000])
    damage(file._file.fileno(), regions[1].offset)
    with started(file, regions, 2) as ring, pytest.raises(OffloadError, match=error):
        compute(ring, 2)


def test_an_unusable_directory(disk, monkeypatch):
    with pytest.raises(OffloadError, match="is no directory: make it"):
        WeightFile(disk / "missing")
    with monkeypatch.context() as patch:
        patch.setattr(weight_file, "filesystem_of", lambda directory: "tmpfs")
        with pytest.raises(OffloadError, match=r"is in memory \(tmpfs\): name one on a disk"):
            WeightFile(disk)

    def refuse(path, flags, *args):
        assert flags & os.O_DIRECT
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(weight_file.os, "open", refuse)
    opened = (disk / "file").open("w+b")
    monkeypatch.setattr(weight_file.tempfile, "TemporaryFile", lambda dir: opened)
    with pytest.raises(OffloadError, match=r"has no direct I/O .* ext4, xfs or btrfs"):
        WeightFile(disk)


def test_the_filesystem_of_a_directory(disk, monkeypatch):
    own, beside = disk / "with space", disk / "with space2"
    (own / "data").mkdir(parents=True)
    beside.mkdir()
    mounts = [
        SimpleNamespace(mountpoint=str(place), fstype=kind)
        for place, kind in (("/", "ext4"), (own, "xfs"), (own, "btrfs"))
    ]
    monkeypatch.setattr(weight_file, "disk_partitions", lambda all: mounts)
    assert weight_file.filesystem_of(own / "data") == "btrfs"
    assert weight_file.filesystem_of(beside) == "ext4"
    monkeypatch.undo()
    assert weight_file.filesystem_of(Path("/proc")) == "proc"


def test_nothing_is_read_after_the_end_and_there_are_two_buffers(file):
    regions, _ = sealed(file, [4096])
    with started(file, regions, 2) as ring:
        pass
    with pytest.raises(OffloadError, match="after the engine had ended"):
        ring.wait(0)
    with pytest.raises(ValueError, match="1 layers in 1 buffers"):
        LayerRing(file, regions, 1)
    with pytest.raises(ValueError, match="0 layers"):
        LayerRing(file, [])


FREED_AND_WANTED = """
from resource import RUSAGE_SELF, getrusage
from sequoia_vllm.engine.offload.layer_ring import keep_freed_memory

def faults():
    before = getrusage(RUSAGE_SELF).ru_minflt
    for _ in range(20):
        bytearray(64 << 20)
    return getrusage(RUSAGE_SELF).ru_minflt - before

print(faults(), keep_freed_memory() and faults())
"""


@pytest.mark.slow
def test_freed_memory_is_kept():
    """Each block of 64 MiB took new pages of the kernel."""
    before, after = map(int, python(FREED_AND_WANTED).stdout.split())
    assert 0 < after < before / 4


DEVICE = torch.device("meta")
PREFETCH = PrefetchOffloadConfig(offload_group_size=2)
UVA = UVAOffloadConfig(cpu_offload_gb=1)
CONFIGS = {None: {}, "prefetch": {"prefetch": PREFETCH}, "uva": {"uva": UVA}}


@pytest.mark.filterwarnings("ignore:.*(o|O)ffload")
@pytest.mark.parametrize(
    ("config", "backend"),
    [
        *((config, backend) for backend, config in CONFIGS.items()),
        ({"uva": UVA, "prefetch": PREFETCH}, "prefetch"),
        ({"offload_backend": "uva", "uva": UVA, "prefetch": PREFETCH}, "uva"),
        ({"offload_backend": "prefetch", "uva": UVA, "prefetch": PREFETCH}, "prefetch"),
        ({"offload_backend": "uva"}, None),
        ({"offload_backend": "uva", "prefetch": PREFETCH}, None),
    ],
)
def test_the_backend_is_the_one_that_vllm_chooses(config, backend):
    assert offloading_backend(OffloadConfig(**config)) == backend


def model() -> nn.Module:
    """A model of two layers of 1 KiB each."""
    return nn.Sequential(*(nn.Linear(16, 16, bias=False, device=DEVICE) for _ in range(2)))


def prefetching(copied: list[int], buffers: int) -> SimpleNamespace:
    """vLLM's prefetching offloader: bytes of each layer that is copied, and of its buffers."""
    modules = [
        SimpleNamespace(get_param_infos=lambda size=size: [SimpleNamespace(num_bytes=size)])
        for size in copied
    ]
    return SimpleNamespace(
        module_offloaders=modules, buffer_pool=SimpleNamespace(total_bytes=buffers)
    )


def test_what_is_offloaded_is_counted():
    """Views of host memory by their mark, what is prefetched by its copies."""
    layers = model()
    assert offloaded_bytes(layers, NoopOffloader(), DEVICE) == (2048, 0, 0)
    assert offloaded_bytes(layers, prefetching([1024], buffers=512), DEVICE) == (2048, 1024, 512)
    layers[1].weight._vllm_is_uva_offloaded = True
    assert offloaded_bytes(layers, NoopOffloader(), DEVICE) == (2048, 1024, 0)
    # By its device where VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set.
    layers = model()
    layers[0].weight = nn.Parameter(torch.zeros(16, 16))
    assert offloaded_bytes(layers, NoopOffloader(), DEVICE) == (2048, 1024, 0)


@pytest.mark.parametrize(
    ("backend", "offloader", "level", "words"),
    [
        ("prefetch", prefetching([1024], 512), "INFO", "offloaded (prefetch, through buffers of"),
        ("prefetch", prefetching([1024], 1024), "WARNING", "lower --offload-prefetch-step"),
        ("prefetch", prefetching([], 0), "WARNING", "at most the number of its layers"),
        ("uva", NoopOffloader(), "WARNING", "none of the target's weights (1.91e-06 GiB)"),
        (None, NoopOffloader(), None, None),
    ],
)
def test_the_log(backend, offloader, level, words, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.sequoia"):
        report_offloading(model(), offloader, DEVICE, OffloadConfig(**CONFIGS[backend]))
    if level is None:
        assert caplog.records == []
        return
    # The same one is handled twice where other tests have had vLLM's logger do so.
    [record] = set(caplog.records)
    assert record.levelname == level
    assert words in record.getMessage()


@pytest.fixture
def engines_offloader():
    before, engines = get_offloader(), prefetching([], 0)
    set_offloader(engines)
    yield engines
    set_offloader(before)


def test_the_draft_is_loaded_without_the_engines_offloader(engines_offloader):
    with nothing_offloaded():
        assert type(get_offloader()) is NoopOffloader
    assert get_offloader() is engines_offloader
    with pytest.raises(OSError, match="no weights"), nothing_offloaded():
        raise OSError("no weights")
    assert get_offloader() is engines_offloader
