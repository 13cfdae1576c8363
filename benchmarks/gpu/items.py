"""What is measured, the most valuable first. Standard library only."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import GpuRunError, Results


@dataclass(frozen=True)
class Item:
    """One measurement, which runs in a process of its own."""

    name: str
    what: str
    measure: str  # ``module:function``, called with an `ItemRun` and ``options``
    # What it takes on an H100; all but the first engine's are estimates. It is ended after twice
    # as long.
    minutes: float
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # that its process begins with
    needs_vllm: bool = True  # False: torch and Triton are enough
    needs_gpus: int = 1  # at once
    is_tiny: bool = True  # False: tiny runs leave it out, as another one runs the same code

    def reason_to_skip(self, tiny: bool) -> str:
        """Why it cannot run here; "" if it can."""
        if tiny and not self.is_tiny:
            return "not part of a tiny run"
        if self.needs_vllm and importlib.util.find_spec("vllm") is None:
            return "vLLM is not installed"
        if self.needs_gpus > 1 and (found := _gpus()) < self.needs_gpus:
            return f"needs {self.needs_gpus} GPUs, there are {found}"
        return ""


def _gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    from torch.cuda import device_count

    return device_count()


MACHINE = Item(
    "machine", "card, driver, versions, commit", "benchmarks.gpu.stages:describe_machine", 1,
    needs_vllm=False,
)  # fmt: skip
FLASHINFER = "VLLM_USE_FLASHINFER_SAMPLER"
KERNELS = "kernels"
TREES, PLAIN, CONTEXTS = (
    f"benchmarks.gpu.steps:{name}" for name in ("time_trees", "time_plain", "time_contexts")
)
RIVALS = "benchmarks.gpu.stages:compare_methods"
_ONCE = {"temperatures": "0,1", "rates": ""}


def _chains(*lengths: int) -> str:
    """vLLM's best sampling of each; greedy requests draft the same with any."""
    return ",".join(f"{length}:probabilistic:block" for length in lengths)


ITEMS = (
    MACHINE,
    Item(
        "rival", "a chat model at 8B's cost, an EAGLE-3 head trained here: plain, chain, trees",
        RIVALS, 10,
    ),
    Item(
        "rival-chains", "vLLM's chains of 1, 2 and 4 over the same head: which is the best?",
        RIVALS, 4, {"chains": _chains(1, 2, 4), "trees": "", **_ONCE}, is_tiny=False,
    ),
    Item(
        "rival-traversal", "trees over the same head, verified by Algorithm 2 and by traversal",
        RIVALS, 3,
        {"chains": "", "trees": "served,traversal", "temperatures": "0.6,1", "rates": ""},
        is_tiny=False,
    ),
    Item(
        "rival-dynamic", "trees over the same head, greedy: static and dynamic",
        RIVALS, 3, {"chains": "", "trees": "served,dynamic", "temperatures": "0", "rates": ""},
        is_tiny=False,
    ),
    Item(
        # The enlarged head drafts what the embedded one does: 1.8 tokens a step in chains of 4.
        # It has 2 layers, published ones have 5.
        "rival-dflash", "a DFlash head at 8B's cost: plain, vLLM's chain, trees",
        RIVALS, 5,
        {"kind": "dflash", "trees": "served", "cache_gib": 4.0, **_ONCE},
    ),
    Item(
        "trees-8b-eagle3", "8B with an EAGLE-3 head: steps, mixed steps, kernels' shares",
        TREES, 4, {"pair": "8b-eagle3"},
    ),
    Item(
        "plain-8b", "plain 8B: the same steps and arrivals", PLAIN, 3,
        {"pair": "8b-eagle3"},
    ),
    Item(
        "monitors-8b-eagle3", "waits for the device and late compilation, by vLLM's monitors",
        "benchmarks.gpu.serving:watch", 3, {"pair": "8b-eagle3"}, {"VLLM_GPU_SYNC_CHECK": "warn"},
    ),
    Item(
        "arrivals-8b-eagle3", "start with vLLM's defaults; adaptation while requests arrive",
        "benchmarks.gpu.serving:adapt", 4, {"pair": "8b-eagle3"},
    ),
    Item(
        "trees-8b-1b", "8B with a 1B draft: steps, mixed steps, kernels' shares",
        TREES, 4, {"pair": "8b-1b"}, is_tiny=False,
    ),
    Item(
        "trees-8b-1b-fp8", "the same with the draft's layers in FP8",
        TREES, 4, {"pair": "8b-1b", "quantization": "fp8_per_tensor"}, is_tiny=False,
    ),
    Item(
        "trees-8b-eagle3-tp2", "the first on two GPUs, with NCCL",
        TREES, 4, {"pair": "8b-eagle3", "ranks": "2"}, needs_gpus=2,
    ),
    Item(
        KERNELS, "every kernel against torch, and its time", "benchmarks.gpu.stages:check_kernels",
        5, needs_vllm=False,
    ),
    Item(
        "contexts-8b-eagle3", "steps at contexts up to 32k tokens", CONTEXTS, 2,
        {"pair": "8b-eagle3", "kernel": "tree"}, is_tiny=False,
    ),
    Item(
        "flash-8b-eagle3", "the same with FlashAttention over contexts", CONTEXTS, 2,
        {"pair": "8b-eagle3", "kernel": "flash"},
    ),
    Item(
        "trees-recurrent-9b", "Gated DeltaNet layers and an MTP layer: steps, mixed steps, kernels",
        TREES, 3, {"pair": "recurrent-9b", "drafter": "mtp"}, is_tiny=False,
    ),
    Item(
        "plain-recurrent-9b", "plain 9B of such layers: the same steps and arrivals",
        PLAIN, 3, {"pair": "recurrent-9b"}, is_tiny=False,
    ),
    Item(
        "rival-long-chains", "vLLM's chains of 5 and 6 beside the tree",
        RIVALS, 4, {"chains": _chains(5, 6), "trees": "served", **_ONCE}, is_tiny=False,
    ),
)  # fmt: skip


def chosen_items(names: str | None) -> list[Item]:
    """The items of these names, separated by commas, in the order of `ITEMS`; None: all."""
    if names is None:
        return list(ITEMS)
    wanted = {name for name in names.split(",") if name} | {MACHINE.name}
    known = [item.name for item in ITEMS]
    if unknown := wanted - set(known):
        raise GpuRunError(f"no item {sorted(unknown)[0]!r}; there are {', '.join(known)}")
    return [item for item in ITEMS if item.name in wanted]


def in_order(items: Sequence[Item], results: Results) -> list[Item]:
    """What is left to run: first what never ran, then what did not succeed."""
    left = [item for item in items if results.of(item.name).state != "done"]
    return sorted(left, key=lambda item: results.of(item.name).has_begun)


def environment_of(item: Item, folder: Path) -> dict[str, str]:
    """This process's environment, with the item's variables.

    Nothing is read from, or written to, the trees of whoever runs this. vLLM samples with
    FlashInfer, its default, where that is installed.
    """
    trees = {"SEQUOIA_VLLM_TREES": str(folder.absolute() / "trees")}
    sampler = {} if importlib.util.find_spec("flashinfer") else {FLASHINFER: "0"}
    return {**sampler, **os.environ, **trees, **item.environment}
