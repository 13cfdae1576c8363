"""Predicts what more devices do for a pair: the fastest tree at each number of devices.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --interconnect-gb-s 64 --interconnect-kind bus

Nothing is measured: the roofline predicts every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from benchmarks.memory import memory_fit
from benchmarks.options import ClassOption, ContextOption, DtypeOption, JsonOption, markdown_table
from benchmarks.predicted import (
    BackendOption,
    KindOption,
    LinkOption,
    Offload,
    OffloadOption,
    RateOption,
    class_of,
    device_of,
    offload_of,
    predict,
)
from sequoia_vllm.cli.common import friendly_errors, print_json
from sequoia_vllm.cli.measuring import numbers
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel, check_batch_sizes
from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.models import ModelClass
from sequoia_vllm.hardware.roofline import largest_tree
from sequoia_vllm.hardware.streaming import StreamedWeights
from sequoia_vllm.library.tree_reference import find_vector
from sequoia_vllm.tree.acceptance import Acceptance

_COLUMNS = (
    "device", "TP", "batch", "plain, ms", "draft level, ms", "nodes", "depth", "tokens per step",
    "speedup",
)  # fmt: skip


@dataclass(frozen=True)
class TreePrediction:
    """The fastest tree at one batch size.

    Attributes:
        batch_size: Requests in a step.
        plain_seconds: Time of a plain step, which is the time per token of each request.
        draft_level_seconds: Time of a draft pass over one node of each request. For a head that
            drafts all levels in one pass: time to draw one level.
        size: Nodes of the tree, root included; 1: plain decoding is faster.
        depth: Its edges from the root to the deepest leaf.
        expected_tokens: Tokens per request and step.
        seconds_per_token: Time per token of each request, with this tree.
        speedup: Ratio to plain decoding on the same devices.
    """

    batch_size: int
    plain_seconds: float
    draft_level_seconds: float
    size: int
    depth: int
    expected_tokens: float
    seconds_per_token: float
    speedup: float

    @property
    def cells(self) -> tuple[str, ...]:
        """What a table shows of it."""
        return (
            str(self.batch_size), f"{1e3 * self.plain_seconds:.1f}",
            f"{1e3 * self.draft_level_seconds:.2f}", str(self.size), str(self.depth),
            f"{self.expected_tokens:.2f}", f"{self.speedup:.2f}x",
        )  # fmt: skip


@dataclass(frozen=True)
class ScalingRow:
    """One device type and tensor parallel size.

    Attributes:
        problem: Why it cannot be served so; None: it can.
        predictions: By batch size; none where there is a problem.
        streamed: Weights of the target that are not in the devices' memory; None: all are.
    """

    device: DeviceSpec
    tensor_parallel_size: int
    problem: str | None
    predictions: list[TreePrediction]
    streamed: StreamedWeights | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as a JSON object."""
        return {
            "device": self.device.id,
            "tensor_parallel_size": self.tensor_parallel_size,
            "problem": self.problem,
            "predictions": [asdict(prediction) for prediction in self.predictions],
        }


def scaling(
    model_class: ClassOption = "70b-1b",
    devices: Annotated[
        str, typer.Option(help="Comma-separated driver names or ids.")
    ] = "h100-sxm,h200",
    tensor_parallel_sizes: Annotated[str, typer.Option(help="Comma-separated.")] = "1,2,4,8",
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated requests in a step.")] = "1,16",
    acceptance: Annotated[
        str, typer.Option(help="Vector: a file, or the name of one of the library.")
    ] = "shipped",
    interconnect_gb_s: RateOption = None,
    interconnect_kind: KindOption = None,
    offload_gb: OffloadOption = None,
    link: LinkOption = None,
    offload_backend: BackendOption = "prefetch",
    dtype: DtypeOption = "bfloat16",
    context_length: ContextOption = 1024,
    as_json: JsonOption = False,
) -> None:
    """Predict what more devices do for a pair: a Markdown table, or JSON."""
    with friendly_errors():
        sizes = numbers("--tensor-parallel-sizes", tensor_parallel_sizes)
        batches = numbers("--batch-sizes", batch_sizes)
        pair, vector = class_of(model_class), find_vector(acceptance)
        specs = [
            device_of(name.strip(), interconnect_gb_s, interconnect_kind, max(sizes))
            for name in devices.split(",")
        ]
        offload = offload_of(offload_gb, link, offload_backend)
        rows = scaling_rows(specs, pair, vector, sizes, batches, dtype, context_length, offload)
        if not as_json:
            typer.echo(markdown_table(_COLUMNS, _cells(rows)))
            return
        print_json(
            {
                "source": "roofline",
                "model_class": pair.id,
                "target": pair.target.name,
                "draft": pair.draft.name,
                "acceptance": vector.to_list(),
                "dtype": dtype,
                "context_length": context_length,
                "rows": [row.to_dict() for row in rows],
            }
        )


def scaling_rows(
    devices: Sequence[DeviceSpec], pair: ModelClass, acceptance: Acceptance,
    tensor_parallel_sizes: Sequence[int] = (1, 2, 4, 8), batch_sizes: Sequence[int] = (1, 16),
    dtype: str = "bfloat16", context_length: int = 1024, offload: Offload | None = None,
) -> list[ScalingRow]:  # fmt: skip
    """Finds the fastest tree of each device type, tensor parallel size and batch size.

    Args:
        pair: Target and draft, both split over the devices.
        acceptance: p[k] or p[d][k] of the pair.
        batch_sizes: Requests in a step; all must fit the memory with their context and trees.
        dtype: Weight and KV cache type.
        context_length: Committed tokens of each request.
        offload: What of the target is not in the devices' memory; None: nothing.

    Returns:
        Rows by device, then by tensor parallel size, in the given order.
    """
    batches = check_batch_sizes(list(batch_sizes))
    rows = []
    for device in devices:
        for size in tensor_parallel_sizes:
            profile = predict(device, pair, size, dtype, context_length, offload)
            memory = memory_fit(device, pair.target, pair.draft, dtype, size, profile.streamed)
            most_nodes = largest_tree(profile)
            problem = memory.problem(batches[-1] * (context_length + most_nodes))
            cost = CostModel(profile)
            predictions = [
                _predict(cost, acceptance, batch, most_nodes) for batch in batches if not problem
            ]
            rows.append(ScalingRow(device, size, problem, predictions, profile.streamed))
    return rows


def _predict(
    cost: CostModel, acceptance: Acceptance, batch_size: int, most_nodes: int
) -> TreePrediction:
    tree = choose_tree(acceptance, cost.profile, batch_size, most_nodes)
    estimate = cost.estimate(tree, acceptance, batch_size)
    return TreePrediction(
        batch_size=batch_size,
        plain_seconds=cost.plain_seconds(batch_size),
        draft_level_seconds=float(cost.draft_seconds(1, batch_size)),
        size=tree.size,
        depth=tree.depth,
        expected_tokens=estimate.expected_tokens,
        seconds_per_token=estimate.seconds / estimate.expected_tokens,
        speedup=estimate.speedup,
    )


def _cells(rows: list[ScalingRow]) -> Iterator[tuple[str, ...]]:
    """Yields the lines of the table: one for each prediction, or one with the problem."""
    for row in rows:
        head = row.device.id, str(row.tensor_parallel_size)
        if row.problem is not None:
            yield (*head, "", row.problem, "", "", "", "", "")
        for entry in row.predictions:
            yield *head, *entry.cells


if __name__ == "__main__":
    typer.run(scaling)
