"""Predicts a profile (times of a step) from datasheet values.

    python -m benchmarks.roofline h200 --class 70b-1b --tensor-parallel-size 2 --output h200.json

Commands that take a `--profile` read the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.options import ClassOption, ContextOption, DtypeOption, JsonOption
from benchmarks.predicted import (
    BackendOption,
    KindOption,
    LinkOption,
    LinkRateOption,
    OffloadOption,
    RateOption,
    class_of,
    device_of,
    memory_problem,
    offload_of,
    predict,
    times_json,
)
from sequoia_vllm.cli.common import console, friendly_errors, new_table, note, print_json
from sequoia_vllm.hardware.cost import CostModel
from sequoia_vllm.hardware.step_profile import Profile

_BATCHES = (1, 8, 64)


def roofline(
    device: Annotated[str, typer.Argument(help='Driver name or id: "NVIDIA H200", h200.')],
    model_class: ClassOption,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the profile to this file.")
    ] = None,
    dtype: DtypeOption = "bfloat16",
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Devices that target and draft are split over.")
    ] = 1,
    interconnect_gb_s: RateOption = None,
    interconnect_kind: KindOption = None,
    offload_gb: OffloadOption = None,
    link: LinkOption = None,
    link_gb_s: LinkRateOption = None,
    offload_backend: BackendOption = "prefetch",
    context_length: ContextOption = 1024,
    as_json: JsonOption = False,
) -> None:
    """Predict a profile from datasheet values."""
    with friendly_errors():
        spec = device_of(device, interconnect_gb_s, interconnect_kind, tensor_parallel_size)
        offload = offload_of(offload_gb, link, link_gb_s, offload_backend)
        pair = class_of(model_class)
        profile = predict(spec, pair, tensor_parallel_size, dtype, context_length, offload)
        if output is not None:
            profile.save(output)
        if problem := memory_problem(profile, context_length):
            note(problem)
        if as_json:
            print_json({**times_json(profile), "profile": profile.to_dict()})
        else:
            console().print(times_table(profile))


def times_table(profile: Profile) -> Table:
    """Returns times by tokens per request, for a few batch sizes."""
    cost = CostModel(profile)
    reads = profile.draft_reading is not None
    parts = "target / first draft pass / draft level" if reads else "target / draft level"
    table = new_table(
        "tokens", *(f"batch {batch}" for batch in _BATCHES),
        title=f"{profile.device}: {profile.target} with {profile.draft}, TP "
        f"{profile.tensor_parallel_size} ({profile.source}; {parts}, ms)",
    )  # fmt: skip
    wide = (256, 512, 768) if profile.streamed else ()
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, *wide):
        table.add_row(str(tokens), *(_times(cost, tokens, batch, reads) for batch in _BATCHES))
    return table


def _times(cost: CostModel, tokens: int, batch: int, reads: bool) -> str:
    """Formats times of passes over ``tokens`` tokens of each request."""
    # So many positions are those of a tree of one level less.
    first = cost.first_draft_seconds(tokens, tokens - 1, batch)
    level = cost.draft_seconds(tokens, batch)
    shown = (cost.target_seconds(tokens, batch), *((first,) if reads else ()), level)
    return " / ".join(f"{1e3 * float(seconds):.2f}" for seconds in shown)


if __name__ == "__main__":
    typer.run(roofline)
