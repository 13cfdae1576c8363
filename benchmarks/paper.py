"""Compares the paper's own figures with what our optimizer and cost model predict of its set-ups.

    python -m benchmarks.paper

We ran none of these set-ups. Two things are predicted of each, because the paper's figures rest
on both and only one of them is in our hands:

- *tokens per step*, by the optimizer, from an acceptance vector. The vectors of the paper's
  pairs were not published, so this tells how alike the vectors are, and little of us;
- *the time of a step* in plain steps, by the roofline. It hardly depends on the vector: the
  speedup that it makes of the paper's own tokens is the fair comparison of cost models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import typer

from benchmarks.options import JsonOption, markdown_table
from sequoia_vllm.cli.common import print_json
from sequoia_vllm.hardware.choose import choose_tree
from sequoia_vllm.hardware.cost import CostModel, Estimate
from sequoia_vllm.hardware.device import known_devices
from sequoia_vllm.hardware.models import ModelShape, every_class
from sequoia_vllm.hardware.offloading import host_link, streamed_layers
from sequoia_vllm.hardware.roofline import largest_tree, roofline_profile
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.hardware.streaming import LINKS, StreamedWeights
from sequoia_vllm.library.tree_reference import find_vector
from sequoia_vllm.tree.optimize import optimize_tree

_COLUMNS = (
    "set-up", "T", "paper: tree", "tokens", "speedup", "s/token",
    "vector", "predicted: tokens", "speedup", "with its tokens",
    "our tree", "tokens", "speedup", "s/token",
)  # fmt: skip
VECTORS = ("shipped", "appendix-e")
_DTYPE_BYTES = 2.0
# Prompts of the paper have 128 tokens, and completions 128: about this in the middle.
_CONTEXT = 192
Offloading = Literal["overlapping", "in turns"]


@dataclass(frozen=True)
class PublishedRow:
    """One set-up of the paper, with the figures it states.

    Attributes:
        device: Our id of the device; boards are not told apart.
        target, draft: As the paper calls them.
        model_class: Our class with models of these shapes.
        temperature: None: not stated where the figure is.
        speedup: Ratio to ``baseline``.
        baseline: What the paper compares with.
        tokens: Tokens per step; None: not stated with this speedup.
        size: Nodes of the tree, root included; None: not stated.
        levels: Levels of the tree, the root's included, as the paper counts depth.
        plain_seconds: Time of a token of the baseline; None: not stated.
        offloaded: Whether the whole target is streamed over the device's link.
        source: Where the figures stand.
    """

    device: str
    target: str
    draft: str
    model_class: str
    temperature: float | None
    speedup: float
    baseline: str
    tokens: float | None = None
    size: int | None = None
    levels: int | None = None
    plain_seconds: float | None = None
    offloaded: bool = False
    source: str = "arXiv 2402.12374v3"

    @property
    def seconds_per_token(self) -> float | None:
        """Time per token in the paper; None: not stated."""
        return None if self.plain_seconds is None else self.plain_seconds / self.speedup

    @property
    def depth(self) -> int | None:
        """Depth of the tree, in edges; None: not stated."""
        return None if self.levels is None else self.levels - 1


_A100, _HF = "a100-80gb", "Hugging Face"
_7B = _A100, "Llama-2-7B", "JF68M", "7b-68m"
_13B = _A100, "Llama-2-13B", "JF68M", "13b-68m"
_33B = _A100, "Vicuna-33B", "SL1.3B", "33b-1.3b"
_L40 = "l40", "Llama-2-70B", "Llama-2-7B", "70b-7b"
# Depths at temperature 0.6 are those of the trees published with the code, for the same data.
PUBLISHED = (
    PublishedRow(*_7B, 0.0, 4.04, _HF, 5.08, 128, 10, plain_seconds=24.2e-3),
    PublishedRow(*_7B, 0.6, 3.18, _HF, 3.92, 128, 7, plain_seconds=24.2e-3),
    PublishedRow(*_13B, 0.0, 3.73, _HF, 4.20, 64, 9),
    PublishedRow(*_13B, 0.6, 3.19, _HF, 3.57, 64, 7),
    PublishedRow(*_33B, 0.0, 2.27, _HF, 4.28, 64, 6),
    PublishedRow(*_33B, 0.6, 2.19, _HF, 4.16, 64, 6),
    PublishedRow(
        *_L40, None, 8.6, "DeepSpeed", 10.3, 768, 18, plain_seconds=5.7, offloaded=True
    ),
    PublishedRow(
        *_L40, None, 9.96, "its own offloading", plain_seconds=0.56 * 9.96, offloaded=True,
        source="arXiv 2402.12374v2, abstract",
    ),
    PublishedRow(
        "l40", "Llama-3-70B", "Llama-3-8B", "70b-8b", None, 9.5, "DeepSpeed",
        plain_seconds=0.60 * 9.5, offloaded=True, source="NeurIPS 2024, abstract",
    ),
)  # fmt: skip
"""Published figures, none of them ours."""


@dataclass(frozen=True)
class Predicted:
    """One tree under one vector, predicted.

    Attributes:
        size: Nodes, root included.
        depth: Edges.
        tokens: Expected tokens per step.
        step: Time of a step in plain steps.
        speedup: Ratio to plain decoding.
        seconds_per_token: Time per token with this tree.
    """

    size: int
    depth: int
    tokens: float
    step: float
    speedup: float
    seconds_per_token: float


@dataclass(frozen=True)
class PaperComparison:
    """A set-up of the paper under one published vector. All but ``published`` is predicted.

    Attributes:
        published: The paper's figures.
        acceptance: Name of the vector, which was measured on another pair or other data.
        offloading: Whether weights are read while others compute; None: nothing is offloaded.
        plain_seconds: Time of a plain step.
        same_size: The best tree of the paper's size and depth; None: it states neither.
        chosen: The tree that we would choose.
    """

    published: PublishedRow
    acceptance: str
    offloading: Offloading | None
    plain_seconds: float
    same_size: Predicted | None
    chosen: Predicted

    @property
    def compared(self) -> Predicted:
        """The tree to compare with the paper's: of the same size, if the paper states one."""
        return self.same_size or self.chosen

    @property
    def tokens_deviation(self) -> float | None:
        """Predicted over published tokens per step, less 1; None: not stated."""
        return (
            None
            if self.published.tokens is None
            else (self.compared.tokens / self.published.tokens - 1)
        )

    @property
    def speedup_deviation(self) -> float:
        """Predicted over published speedup, less 1."""
        return self.compared.speedup / self.published.speedup - 1

    @property
    def speedup_at_its_tokens(self) -> float | None:
        """Speedup that the cost model predicts with the paper's own tokens per step."""
        tokens = self.published.tokens
        return None if tokens is None else tokens / self.compared.step

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as a JSON object."""
        published = asdict(self.published)
        published["seconds_per_token"] = self.published.seconds_per_token
        published["depth"] = self.published.depth
        predicted = {
            "source": "predicted by the roofline, not measured",
            "acceptance": self.acceptance,
            "offloading": self.offloading,
            "plain_seconds": self.plain_seconds,
            "same_size": asdict(self.same_size) if self.same_size else None,
            "chosen": asdict(self.chosen),
            "tokens_deviation": self.tokens_deviation,
            "speedup_deviation": self.speedup_deviation,
            "speedup_at_its_tokens": self.speedup_at_its_tokens,
        }
        return {"published": published, "predicted": predicted}


def paper(as_json: JsonOption = False) -> None:
    """Compare the paper's published figures with predictions: a Markdown table, or JSON."""
    comparisons = compare_with_paper()
    if as_json:
        print_json({"comparisons": [entry.to_dict() for entry in comparisons]})
    else:
        typer.echo(markdown_table(_COLUMNS, [_cells(entry) for entry in comparisons]))


def compare_with_paper() -> list[PaperComparison]:
    """Compares every set-up of `PUBLISHED` under each published vector, in this order."""
    return [
        _compare(row, name, offloading)
        for row in PUBLISHED
        for offloading in _ways(row)
        for name in VECTORS
    ]


def _ways(row: PublishedRow) -> tuple[Offloading | None, ...]:
    """Returns both ways if the paper states tokens per step, which tell the two apart."""
    if not row.offloaded:
        return (None,)
    return ("overlapping",) if row.tokens is None else ("overlapping", "in turns")


def _compare(row: PublishedRow, name: str, offloading: Offloading | None) -> PaperComparison:
    vector = find_vector(name)
    profile = _profile(row, offloading)
    cost = CostModel(profile)
    same_size = None
    if row.size is not None:
        tree = optimize_tree(vector, row.size, row.depth)
        same_size = _predicted(tree.size, tree.depth, cost.estimate(tree, vector, 1))
    chosen = choose_tree(vector, profile, max_size=largest_tree(profile))
    return PaperComparison(
        published=row,
        acceptance=name,
        offloading=offloading,
        plain_seconds=cost.plain_seconds(1),
        same_size=same_size,
        chosen=_predicted(chosen.size, chosen.depth, cost.estimate(chosen, vector, 1)),
    )


def _predicted(size: int, depth: int, estimate: Estimate) -> Predicted:
    tokens = estimate.expected_tokens
    return Predicted(
        size=size,
        depth=depth,
        tokens=tokens,
        step=tokens / estimate.speedup,
        speedup=estimate.speedup,
        seconds_per_token=estimate.seconds / tokens,
    )


def _profile(row: PublishedRow, offloading: Offloading | None) -> Profile:
    device, pair = known_devices()[row.device].spec(), every_class()[row.model_class]
    streamed = None if offloading is None else _streamed(row.device, pair.target, offloading)
    return roofline_profile(
        device, pair.target, pair.draft,
        context_length=_CONTEXT, batch_sizes=(1,), streamed=streamed,
    )  # fmt: skip


def _streamed(device: str, target: ModelShape, offloading: Offloading) -> StreamedWeights:
    """Streams all layers, as the paper's baseline does, through two buffers or one."""
    link, words = host_link(device)
    return streamed_layers(
        target,
        target.layers_bytes(_DTYPE_BYTES),
        LINKS[link].bytes_per_second,
        words,
        buffers=2 if offloading == "overlapping" else 1,
    )


def _cells(entry: PaperComparison) -> tuple[str, ...]:
    published, compared, chosen = entry.published, entry.compared, entry.chosen
    where = published.device + ("" if entry.offloading is None else f", read {entry.offloading}")
    if published.size is None:
        where += f"; {published.source}"
    tree = f"{published.size}, {published.depth}" if published.size else ""
    return (
        f"{published.target} / {published.draft} ({where})",
        "" if published.temperature is None else f"{published.temperature:g}",
        tree,
        "" if published.tokens is None else f"{published.tokens:.2f}",
        f"{published.speedup:.2f}x",
        _seconds(published.seconds_per_token),
        entry.acceptance,
        f"{compared.tokens:.2f}{_percent(entry.tokens_deviation)}",
        f"{compared.speedup:.2f}x{_percent(entry.speedup_deviation)}",
        "" if entry.speedup_at_its_tokens is None else f"{entry.speedup_at_its_tokens:.2f}x",
        f"{chosen.size}, {chosen.depth}",
        f"{chosen.tokens:.2f}",
        f"{chosen.speedup:.2f}x",
        _seconds(chosen.seconds_per_token),
    )


def _percent(deviation: float | None) -> str:
    return "" if deviation is None else f" ({100 * deviation:+.0f} %)"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:#.2g}"


if __name__ == "__main__":
    typer.run(paper)
