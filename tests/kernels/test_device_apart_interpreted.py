"""Nothing between our kernels looks at the device's values or mixes host tensors in."""

import dataclasses

import numpy as np
import pytest
import torch

from sequoia_vllm.kernels import commit, target_statistics, traversal, verify
from sequoia_vllm.kernels.children import DrawWorkspace
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED
from tests.oracles.attention import commit_reference
from tests.support import attending, committing, drawing, verifying
from tests.support.device_apart import (
    DEVICE,
    DeviceApartError,
    device_apart,
    on_device,
)


def as_on_device(function, calls):
    """The function, whose tensors are device tensors with the memory that they had."""

    def call(*args, **kwargs):
        calls.append(function.__name__)
        with device_apart():
            moved, named = _moved((args, kwargs))
            return function(*moved, **named)

    return call


def _moved(arguments):
    """The arguments, with their tensors and those of records on the device."""

    def moved(value):
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value)]
            return dataclasses.replace(value, **{f: _moved(getattr(value, f)) for f in fields})
        return on_device(value) if isinstance(value, torch.Tensor) else value

    return torch.utils._pytree.tree_map(moved, arguments)


def test_children_are_drawn(monkeypatch):
    calls = []
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    for mode in (0, 1, 2, 3):
        expected = drawing.draw(logits, modes=mode, counts=[2, 1])
        with monkeypatch.context() as patch:
            patch.setattr(drawing, "draw_children", as_on_device(drawing.draw_children, calls))
            drawn = drawing.draw(logits, modes=mode, counts=[2, 1], workspace=DrawWorkspace())
        assert torch.equal(drawn.tokens, expected.tokens)
    assert len(calls) == 4


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("method", ["traversal", "sequoia"])
def test_trees_are_verified(few, method, monkeypatch):
    monkeypatch.setattr(target_statistics, "pays_off", lambda rows, device: few)
    calls = []
    rng = np.random.default_rng(0)
    tree = verifying.Tree([-1, 0, 0])
    requests = [
        verifying.Request(
            tokens=[0, 3, 4],
            logits=rng.normal(size=(3, 9)).astype(np.float32),
            draft_logits=rng.normal(size=(1, 9)).astype(np.float32),
            target_tokens=[3, 4, 5],
            mode=mode,
        )
        for mode in (GREEDY, SAMPLED)
    ]
    expected = verifying.run(tree, requests, method=method)
    module, name = {
        "sequoia": (verify, "verify_trees"),
        "traversal": (traversal, "traverse_trees"),
    }[method]
    monkeypatch.setattr(module, name, as_on_device(getattr(module, name), calls))
    assert verifying.run(tree, requests, method=method) == expected
    assert calls == [name]


def test_trees_are_attended_to(monkeypatch):
    calls = []
    batch = attending.Batch([20, 3], [5, 2], heads=(2, 1))
    expected = batch.run()
    workspace = attending.TreeAttentionWorkspace(64, "cpu", 1)
    monkeypatch.setattr(
        workspace, "_memory", on_device(workspace._memory)
    )  # as allocated on the device
    call = as_on_device(attending.tree_attention, calls)
    monkeypatch.setattr(
        attending,
        "tree_attention",
        lambda *args, **kwargs: call(*args, **{**kwargs, "workspace": workspace}),
    )
    assert torch.equal(batch.run(), expected)
    assert calls == ["tree_attention"]


def test_paths_are_moved():
    caches = [committing.random_cache(25, 2, 16, 8) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    table = committing.tables(6, 4, 25)
    commit_reference(expected, table, committing.CONTEXTS.tolist(), committing.PATHS)
    layers = commit.CacheLayers.of(caches)
    object.__setattr__(layers, "addresses", on_device(layers.addresses))
    as_on_device(commit.commit_accepted, [])(
        layers, block_table=table, context_lens=committing.CONTEXTS, accepted=committing.PATHS
    )
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(committing.bits(cache), committing.bits(wanted))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda d, h: d.tolist(), "tolist"),
        (lambda d, h: d.numpy(), "numpy"),
        (lambda d, h: np.asarray(d), "numpy"),
        (lambda d, h: d[0].item(), "_local_scalar_dense"),
        (lambda d, h: int(d.max()), "_local_scalar_dense"),
        (lambda d, h: bool((d > 1).any()), "waits"),
        (lambda d, h: d[d > 1], "boolean mask"),
        (lambda d, h: d.nonzero(), "nonzero"),
        (lambda d, h: torch.repeat_interleave(d.long()), "waits"),
        (lambda d, h: d + h, "host tensor"),
        (lambda d, h: d[h.long()], "host tensor"),
        (lambda d, h: torch.cat([d, h]), "host tensor"),
        (lambda d, h: d.cpu(), "waits"),
        (lambda d, h: d.copy_(h), "waits"),
        (lambda d, h: h.copy_(d), "waits"),
        (lambda d, h: h.to(DEVICE), "waits"),
        (lambda d, h: torch.tensor([1, 2], device=DEVICE), "waits"),
    ],
)
def test_steps_that_wait_or_mix_are_refused(step, message):
    with device_apart():
        device = torch.zeros(4, device=DEVICE)
        with pytest.raises(DeviceApartError, match=message):
            step(device, torch.zeros(4))


def test_a_kernel_given_a_host_tensor():
    with device_apart(), pytest.raises(DeviceApartError, match="_kernel is given a host tensor"):
        commit.commit_accepted(
            commit.CacheLayers.of([committing.random_cache(2, 1, 16, 8)]),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            context_lens=torch.zeros(1, dtype=torch.int32),
            accepted=torch.zeros(1, 2, dtype=torch.int32),
        )
