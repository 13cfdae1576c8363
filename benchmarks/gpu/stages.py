"""Items without made-up weights: the machine, the kernels, and methods side by side."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

from benchmarks.gpu.item_run import ItemRun
from benchmarks.gpu.items import FLASHINFER
from benchmarks.gpu.results import GpuRunError


def describe_machine(run: ItemRun) -> None:
    """Keeps what all results are of: card, driver, versions, commit."""
    from benchmarks.gpu.check.machine import Machine

    run.record("machine", {
        "flashinfer_sampler": os.environ.get(FLASHINFER) != "0",
        "weights": "dummy: logits are nearly flat, so nothing about acceptance follows",
        **Machine.find(run.tiny).provenance(),
    })  # fmt: skip


def check_kernels(run: ItemRun) -> None:
    """Checks every kernel against torch, and times it."""
    from benchmarks.gpu.check.attention_check import check_attention, time_attention
    from benchmarks.gpu.check.sampling_check import check_sampling
    from benchmarks.gpu.check.stage import KernelRun
    from benchmarks.gpu.check.verification_times import time_verification

    kernels = KernelRun(run)
    for check in (check_attention, check_sampling, time_verification, time_attention):
        check(kernels)


_TINY_GROWTH: dict[str, Any] = {"width": 832, "times": 2}
_TINY_TRAINING = {"texts": 8, "at_once": 4, "seconds": 2, "tokens": 512, "batch": 4, "answer": 16}
_TINY_COMPARISON = {
    "trees": "6x2", "batches": "2", "temperatures": "0,0.6", "prompts": 2, "tokens": 16,
    "rounds": 1, "rates": "20", "arriving": 0.1, "arriving_rounds": 1, "cache_gib": 0.05,
    "dtype": "float32",
}  # fmt: skip


def compare_methods(run: ItemRun, kind: str = "eagle3", **options: Any) -> None:
    """Plain vLLM, its chains and trees over one head.

    Args:
        kind: See `make_rivals`.
        options: More arguments of `rival.__main__.compare`.
    """
    from benchmarks.gpu.rival import __main__ as rival

    if run.tiny:
        options |= {name: x for name, x in _TINY_COMPARISON.items() if options.get(name) != ""}
    folder = make_rivals(run.folder, kind, run.tiny)
    found = folder / "found" / run.name
    rmtree(found, ignore_errors=True)
    try:
        rival.compare(folder, found, kind=kind, **options)
    finally:  # also where its time is over
        for file in sorted(found.glob("*.jsonl")):
            lines = file.read_text("utf-8").splitlines()
            run.record(file.stem, {"lines": [json.loads(line) for line in lines]})


def make_rivals(out: Path, kind: str, tiny: bool) -> Path:
    """The folder of the target and the head; those of earlier items are used again.

    Args:
        kind: "eagle3": a head for SmolLM2 that is trained here; "dflash": the embedded one.
    """
    from benchmarks.gpu.rival import __main__ as rival
    from examples.smollm2 import cached_folder, is_cached

    trains = kind == "eagle3"
    # vLLM takes drafters for heads by their names: no target's path may have a head's.
    folder = out / ("rival" if trains else "rival-embedded")
    of_target, of_head = {} if trains else rival.EMBEDDED, dict[str, Any]()
    if tiny:
        of_target, of_head = {**rival.EMBEDDED, **_TINY_GROWTH, "layers": 5}, _TINY_GROWTH
        if trains:
            of_head = {**_TINY_GROWTH, **_TINY_TRAINING, "source": rival.EMBEDDED["source"]}
    elif trains and not is_cached(chat := cached_folder()):
        raise GpuRunError(f"{chat} is not there: run python -m examples.smollm2 first")
    write_head: Callable[..., None] = rival.head if trains else rival.dflash
    for name, write, how in (("target", rival.target, of_target), (kind, write_head, of_head)):
        if not (folder / name / "config.json").exists():  # the last file that is written
            rmtree(folder / name, ignore_errors=True)
            write(folder, **how)
    return folder
