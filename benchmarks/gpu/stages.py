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
    """Checks and times every kernel; the report is ``kernels.json`` in the run's folder."""
    from benchmarks.gpu.check.command import run_check
    from benchmarks.gpu.check.table import lines_of

    report = run_check(run.folder / "kernels.json", run.tiny)
    stage = report.stages["kernels"]
    right = sum(check.passed for check in stage.checks)
    run.record("kernels", {
        "checks": len(stage.checks), "right": right, "failures": stage.failures,
        "lines": lines_of(report),
    })  # fmt: skip
    if not report.passed:
        with run.attempt("checks"):
            raise AssertionError(f"{len(stage.checks) - right} checks wrong, see kernels.json")


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
