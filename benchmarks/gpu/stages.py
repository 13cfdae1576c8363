"""Items without made-up weights: the machine, the kernels, and methods side by side."""

import json
import os
from shutil import rmtree
from typing import Any

from benchmarks.gpu.item_run import ItemRun
from benchmarks.gpu.items import FLASHINFER
from benchmarks.gpu.results import GpuRunError


def describe_machine(run: ItemRun) -> None:
    """Keeps what all results are of: card, driver, versions, commit."""
    from benchmarks.gpu.check.machine import Machine

    machine = Machine.find(run.tiny)
    found = machine.provenance()
    run.record("machine", {
        "device": machine.name,
        "interpreted": machine.interpreted,
        "flashinfer_sampler": os.environ.get(FLASHINFER) != "0",
        "weights": "dummy: logits are nearly flat, so nothing about acceptance follows",
        **{name: value for name, value in found.items() if name != "device"},
        "properties": found["device"],
    })  # fmt: skip


def check_kernels(run: ItemRun) -> None:
    """Checks every kernel against torch, and times it."""
    from benchmarks.gpu.check.attention_check import check_attention, time_attention
    from benchmarks.gpu.check.sampling_check import check_sampling
    from benchmarks.gpu.check.stage import KernelRun
    from benchmarks.gpu.check.verification_times import time_verification

    kernels = KernelRun(run)
    check_attention(kernels)
    check_sampling(kernels)
    time_verification(kernels)
    time_attention(kernels)


def compare_methods(run: ItemRun, **options: Any) -> None:
    """Plain vLLM, its chains and trees over one head that is trained here.

    The target, the answers and the head of earlier items are used again. ``options`` are more
    arguments of `rival.__main__.compare`.
    """
    from benchmarks.gpu.rival.__main__ import compare, head, target
    from examples.smollm2 import cached_folder, is_cached

    if not is_cached(chat := cached_folder()):
        raise GpuRunError(f"{chat} is not there: run python -m examples.smollm2 first")
    folder = run.folder / "rival"
    for name, make in (("target", target), ("eagle3", head)):
        if not (folder / name / "config.json").exists():  # the last file that is written
            rmtree(folder / name, ignore_errors=True)
            make(folder)
    found = folder / "found" / run.name
    rmtree(found, ignore_errors=True)
    try:
        compare(folder, found, **options)
    finally:  # also where its time is over
        for file in sorted(found.glob("*.jsonl")):
            lines = file.read_text("utf-8").splitlines()
            run.record(file.stem, {"lines": [json.loads(line) for line in lines]})
