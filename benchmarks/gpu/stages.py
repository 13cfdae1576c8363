"""Items without made-up weights: the machine, the kernels, and methods side by side."""

import json

from benchmarks.gpu.item_run import ItemRun
from benchmarks.gpu.results import GpuRunError


def describe_machine(run: ItemRun) -> None:
    """Keeps what all results are of: card, driver, versions, commit."""
    from benchmarks.gpu.check.machine import Machine

    machine = Machine.find(run.tiny)
    found = machine.provenance()
    run.record("machine", {
        "device": machine.name,
        "interpreted": machine.interpreted,
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


def compare_methods(run: ItemRun) -> None:
    """Plain vLLM, its chains and trees over one head that is trained here."""
    from benchmarks.gpu.rival.__main__ import compare, head, target
    from examples.smollm2.cache import cached_folder, is_cached

    if not is_cached(chat := cached_folder()):
        raise GpuRunError(f"{chat} is not there: run python -m examples.smollm2 first")
    folder = run.folder / "rival"
    target(folder)
    head(folder)
    compare(folder, folder / "found")
    for file in sorted((folder / "found").glob("*.jsonl")):
        lines = file.read_text("utf-8").splitlines()
        run.record(file.stem, {"lines": [json.loads(line) for line in lines]})
