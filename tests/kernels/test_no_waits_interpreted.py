"""Nothing between our kernels makes a GPU's host wait, or makes tensors on the host."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels import commit, target_statistics, traversal, verify
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED
from sequoia_vllm.kernels.write_cache import write_cache
from sequoia_vllm.tree import TokenTree
from tests.support import attending, committing, drawing, verifying

WAITS = {
    "item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "equal", "unique", "tensor",
    "as_tensor", "from_numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
}  # fmt: skip
FACTORIES = {"empty", "zeros", "ones", "full", "arange", "rand", "randn", "empty_strided"}


class NoWaits(TorchFunctionMode):
    """Refuses what waits for the device that all tensors are taken to lie on, but in kernels."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.__name__, kwargs or {}
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        indices = index if isinstance(index, tuple) else (index,)
        masked = any(getattr(one, "dtype", None) == torch.bool for one in indices)
        waits = name in WAITS or masked
        waits |= name == "repeat_interleave" and kwargs.get("output_size") is None
        waits |= name == "to" and "cpu" in map(str, (*args[1:], *kwargs.values()))
        assert not waits, f"{name} waits for the device"
        assert name not in FACTORIES or kwargs.get("device") is not None, f"{name} on the host"
        return function(*args, **kwargs)


@pytest.fixture
def without_waits(monkeypatch):
    """A function, called so that it may not wait."""
    launch = GridExecutor.__call__

    @functools.wraps(launch)
    def launch_as_it_is(self, *args, **kwargs):
        with torch._C.DisableTorchFunction():
            launch(self, *args, **kwargs)

    def wrapped(function):
        def call(*args, **kwargs):
            with NoWaits():
                return function(*args, **kwargs)

        return call

    monkeypatch.setattr(GridExecutor, "__call__", launch_as_it_is)
    return wrapped


def test_trees_are_begun_and_drawn(without_waits, monkeypatch):
    device = torch.device("cpu")
    levels = TreeTables(TokenTree([-1, 0, 0, 1]), device).levels
    batch = DraftBatch(2, device)
    batch.counts.fill_(3)
    drafted = DraftedTrees.empty(2, 4, 2, 4, 9, torch.float32, device)
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    without_waits(drafted.draw)(batch, 2, levels, levels.levels[0], logits)
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(DraftedTrees, "draw", without_waits(DraftedTrees.draw))
    for mode in (0, 1, 2, 3):
        drawing.draw(logits, modes=mode, counts=[2, 1])


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("method", ["traversal", "sequoia"])
def test_trees_are_verified(few, method, monkeypatch, without_waits):
    monkeypatch.setattr(target_statistics, "pays_off", lambda rows, device: few)
    rng, tree = np.random.default_rng(0), TokenTree((-1, 0, 0))
    logits = {"logits": (3, 9), "draft_logits": (1, 9)}
    requests = [
        verifying.Request(
            tokens=[0, 3, 4], target_tokens=[3, 4, 5], mode=mode,
            **{name: rng.normal(size=size).astype(np.float32) for name, size in logits.items()},
        )
        for mode in (GREEDY, SAMPLED)
    ]  # fmt: skip
    for module, name in ((verify, "verify_trees"), (traversal, "traverse_trees")):
        monkeypatch.setattr(module, name, without_waits(getattr(module, name)))
    verifying.run(tree, requests, method=method)


def test_trees_are_attended_to(monkeypatch, without_waits):
    batch = attending.Batch([20, 3], [5, 2], heads=(2, 1))
    monkeypatch.setattr(attending, "tree_attention", without_waits(attending.tree_attention))
    batch.run()
    batch.run(processors=16, uneven=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])  # fp8 caches are bytes to vLLM
def test_keys_and_values_are_written(dtype, without_waits):
    keys, values = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0))
    cache = torch.zeros(4, 16, 3, 32, dtype=dtype)
    slots, scale = torch.tensor([5, 63, -1, 16]), torch.ones(1)
    without_waits(write_cache)(
        keys, values, *cache.split(16, dim=3), slots, scale, scale, divides_exactly=True
    )
    assert cache.any(dim=3).nonzero()[::3, :2].tolist() == [[0, 5], [1, 0], [3, 15]]


def test_layers_write_their_keys_and_values(without_waits):
    pytest.importorskip("vllm")
    from sequoia_vllm.engine.v2.attention.attention_gpu_writes import WritingForward

    keys, values = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0))
    layer = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    cache, slots = torch.zeros(4, 3, 16, 32), torch.tensor([5, 63, -1, 16])
    without_waits(WritingForward.do_kv_cache_update)(
        SimpleNamespace(head_size=16), layer, keys, values, cache, slots
    )
    assert cache[0, :, 5].equal(torch.cat([keys[0], values[0]], dim=1))


def test_paths_are_moved(without_waits):
    layers = commit.CacheLayers.of([committing.random_cache(25, 2, 16, 8) for _ in range(2)])
    without_waits(commit.commit_accepted)(
        layers, block_table=committing.tables(6, 4, 25), context_lens=committing.CONTEXTS,
        accepted=committing.PATHS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda d: d.tolist(), "tolist"),
        (lambda d: np.asarray(d), "__array__|numpy"),
        (lambda d: d[0].item(), "item"),
        (lambda d: int(d.max()), "__int__"),
        (lambda d: bool((d > 1).any()), "__bool__"),
        (lambda d: d[d > 1], "__getitem__"),
        (lambda d: d.nonzero(), "nonzero"),
        (lambda d: torch.repeat_interleave(d.long()), "repeat_interleave"),
        (lambda d: d.to("cpu"), "to waits"),
        (lambda d: torch.tensor([1, 2], device=d.device), "tensor waits"),
        (lambda d: d + torch.zeros(4), "zeros on the host"),
    ],
)
def test_steps_that_wait_are_refused(step, message, without_waits):
    with pytest.raises(AssertionError, match=message):
        without_waits(step)(torch.zeros(4))
