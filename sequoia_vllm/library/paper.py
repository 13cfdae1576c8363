"""The paper's own figures beside what our optimizer and cost model predict of its set-ups.

Nothing here was run by us. Of each set-up two things are predicted, since the paper's figures
rest on both and only one of them is in our hands:

- *tokens per step*, by the optimizer, from an acceptance vector. The vectors of the paper's
  pairs were not published, so that this tells how alike the vectors are, and little of us;
- *the time of a step* in plain steps, by the roofline. It hardly depends on the vector: the
  speedup that it makes of the paper's own tokens is the fair comparison of cost models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

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

VECTORS = ("shipped", "appendix-e")
_DTYPE_BYTES = 2.0
# Prompts of the paper have 128 tokens, and completions 128: about this in the middle.
_CONTEXT = 192
Offloading = Literal["overlapping", "in turns"]


@dataclass(frozen=True)
class PublishedRow:
    """What the paper says of one set-up.

    Attributes:
        device: Ours for it, by id; boards are not told apart.
        target, draft: As the paper calls them.
        model_class: Our class with models of these shapes.
        temperature: None: not stated where the figure is.
        speedup: Over ``baseline``.
        baseline: What the paper compares with.
        tokens: Per step; None: not stated with this speedup.
        size: Nodes of the tree, root included; None: not stated.
        levels: Of the tree, the root's among them, as the paper counts depth.
        plain_seconds: A token of the baseline; None: not stated.
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
        """The paper's; None: not stated."""
        return None if self.plain_seconds is None else self.plain_seconds / self.speedup

    @property
    def depth(self) -> int | None:
        """Of the tree, in edges."""
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
        tokens: Expected per step.
        step: Time of a step in plain steps.
        speedup: Against plain decoding.
        seconds_per_token: With this tree.
    """

    size: int
    depth: int
    tokens: float
    step: float
    speedup: float
    seconds_per_token: float


@dataclass(frozen=True)
class PaperComparison:
    """A set-up of the paper under one published vector: every figure but ``published`` predicted.

    Attributes:
        published: The paper's.
        acceptance: Name of the vector; it is not of this pair, or of other data.
        offloading: How reading is taken to go with computing; None: nothing is offloaded.
        plain_seconds: A plain step.
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
        """What stands beside the paper's: its size of tree, where it states one."""
        return self.same_size or self.chosen

    @property
    def tokens_deviation(self) -> float | None:
        """Of predicted tokens per step from the paper's, as a share of these."""
        return (
            None
            if self.published.tokens is None
            else (self.compared.tokens / self.published.tokens - 1)
        )

    @property
    def speedup_deviation(self) -> float:
        """Of the predicted speedup, likewise."""
        return self.compared.speedup / self.published.speedup - 1

    @property
    def speedup_at_its_tokens(self) -> float | None:
        """What the cost model makes of the paper's own tokens per step; None: not stated."""
        tokens = self.published.tokens
        return None if tokens is None else tokens / self.compared.step

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
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


def compare_with_paper() -> list[PaperComparison]:
    """Every set-up of `PUBLISHED` under each published vector, in this order."""
    return [
        _compare(row, name, offloading)
        for row in PUBLISHED
        for offloading in _ways(row)
        for name in VECTORS
    ]


def _ways(row: PublishedRow) -> tuple[Offloading | None, ...]:
    """Both where the paper's own time of a step can be told, which shows which it is."""
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
    """All layers, as the paper's baseline reads them; with two buffers, or with one."""
    link, words = host_link(device)
    return streamed_layers(
        target,
        target.layers_bytes(_DTYPE_BYTES),
        LINKS[link].bytes_per_second,
        words,
        buffers=2 if offloading == "overlapping" else 1,
    )
