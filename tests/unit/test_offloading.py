"""What is said of offloaded weights; and the draft, which none are of."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader, set_offloader

from sequoia_vllm.engine.offload import offloaded_bytes, offloading_backend, report_offloading
from sequoia_vllm.engine.v2.drafting.drafter import nothing_offloaded

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


def test_views_of_host_memory_are_counted_by_their_mark():
    layers = model()
    assert offloaded_bytes(layers, NoopOffloader(), DEVICE) == (2048, 0, 0)
    layers[1].weight._vllm_is_uva_offloaded = True
    assert offloaded_bytes(layers, NoopOffloader(), DEVICE) == (2048, 1024, 0)


def test_parameters_that_stay_on_the_host_are_counted_by_their_device():
    """Where VLLM_WEIGHT_OFFLOADING_DISABLE_UVA is set."""
    layers = model()
    layers[0].weight = nn.Parameter(torch.zeros(16, 16))
    assert offloaded_bytes(layers, NoopOffloader(), DEVICE) == (2048, 1024, 0)


def test_what_is_prefetched_is_counted_by_its_copies():
    found = offloaded_bytes(model(), prefetching([1024], buffers=512), DEVICE)
    assert found == (2048, 1024, 512)


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
    class Offloader(NoopOffloader):
        pass

    before, ours = get_offloader(), Offloader()
    set_offloader(ours)
    yield ours
    set_offloader(before)


def test_the_draft_is_loaded_without_the_engines_offloader(engines_offloader):
    with nothing_offloaded():
        assert type(get_offloader()) is NoopOffloader
    assert get_offloader() is engines_offloader


def test_the_engines_offloader_is_back_where_loading_fails(engines_offloader):
    with pytest.raises(OSError, match="no weights"), nothing_offloaded():
        raise OSError("no weights")
    assert get_offloader() is engines_offloader
