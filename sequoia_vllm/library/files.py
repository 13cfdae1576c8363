"""File formats of the tree library: measured acceptance in, trees out."""

import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    model_validator,
)

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.hardware.budget import Ranges, checked_ranges
from sequoia_vllm.hardware.choose import ScheduleEstimate
from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.step_profile import ProfileSource
from sequoia_vllm.hardware.streaming import StreamedWeights
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.tree import Acceptance, AcceptanceError, TokenTree

LIBRARY_SCHEMA = "sequoia-vllm/tree-library/v1"
USER_TREE_SCHEMA = "sequoia-vllm/user-tree/v1"
Probability = Annotated[float, Field(ge=0, le=1)]
Table = list[Probability] | list[list[Probability]]
Vector = Annotated[
    list[float] | list[list[float]], AfterValidator(lambda values: Acceptance.of(values) and values)
]

StoredTree = Annotated[
    InstanceOf[TokenTree],
    BeforeValidator(
        lambda tree: tree if isinstance(tree, TokenTree) else TokenTree.from_dict(tree)
    ),
    PlainSerializer(TokenTree.to_dict),
]  # a token tree inside another file


class LibraryError(SequoiaError, ValueError):
    """A library file or request that cannot be used; says what to do."""


class AcceptanceCounts(FileModel):
    """The counts behind a vector, and what ended the counting."""

    stopped_by: Literal["precision", "tokens", "prompts"]
    """The precision asked for, the most tokens, or that every prompt had its greedy completion."""
    precision: float  # largest half-width (95 %) times the share of trees that reach its depth
    wanted_precision: float = Field(gt=0, description="The precision asked for.")
    most_tokens: int = Field(ge=1, description="The most tokens it was to generate.")
    trees: int = Field(ge=0, description="Trees verified.")
    tokens: int = Field(ge=0, description="Tokens that these emitted.")
    offered: list[list[int]] = Field(description="[depth][child]: times it was offered.")
    accepted: list[list[int]] = Field(description="[depth][child]: times it was accepted.")


class AcceptanceFile(FileModel):
    """A measured or published acceptance vector (``trees/acceptance/*.json``), which ``sequoia-vllm
    tree build --acceptance`` reads too."""

    described = "acceptance"
    refused = AcceptanceError
    schema_: Literal["sequoia-vllm/acceptance/v1"] = "sequoia-vllm/acceptance/v1"
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Draft strength class: the last part of a library tree's name."""
    description: str = Field(min_length=1, description="What was measured, in one line.")
    source: Literal["measured", "published"]
    date: datetime.date = Field(description="Day of the measurement or publication.")
    target: str | None = Field(default=None, description="Target it was measured on.")
    draft: str | None = Field(default=None, description="Draft it was measured on.")
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy; none: not stated."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    acceptance: Vector
    """p[k], or p[d][k] by the depth d of the parent (0: the root): probability that the verifier
    accepts child k (from 0) of an accepted node, whatever its siblings do; sums to at most 1."""
    trials: list[int] | list[list[int]] | None = None
    """Same shape: times a node with at least k + 1 children was reached."""
    low: Table | None = Field(default=None, description="Same shape: 95 % interval, lower end.")
    high: Table | None = Field(default=None, description="Same shape: 95 % interval, upper end.")
    calibration: AcceptanceCounts | None = None  # by `tune`
    provenance: dict[str, Any] = Field(default_factory=dict)
    """Free form: argv, versions, hashes of models and prompts."""

    @model_validator(mode="after")
    def _same_shape(self) -> Self:

        def shape(values: list[Any]) -> list[int]:
            return [len(row) if isinstance(row, list) else 0 for row in values]

        for name in ("trials", "low", "high"):
            values = getattr(self, name)
            if values is not None and shape(values) != shape(self.acceptance):
                raise ValueError(f"{name} must have the shape of acceptance")
        if self.source == "measured" and not (self.target and self.draft):
            raise ValueError("a measured vector must name its target and its draft")
        return self

    @property
    def vector(self) -> Acceptance:
        """The vector itself."""
        return Acceptance.of(self.acceptance)


class ProfileReference(FileModel):
    """Which times a tree was chosen with."""

    source: ProfileSource
    date: datetime.date
    device: str = Field(description="Device name in the profile.")
    context_length: int = Field(ge=1)
    file: str | None = Field(default=None, description="Measured profile, within the library.")
    sha256: str | None = Field(default=None, description="Its content.")
    assumptions: dict[str, float] | None = None  # what a roofline assumed and nobody measured


class TreeEntry(FileModel):
    """A tree with its schedule, and everything that it was made from."""

    name: str = Field(min_length=1, description="<device>/<model class>/<draft strength class>.")
    model_class: str = Field(min_length=1)
    target: str
    draft: str
    target_parameters: float = Field(gt=0)
    draft_parameters: float = Field(ge=0)
    dtype: str
    tensor_parallel_size: int = Field(ge=1)
    acceptance_class: str = Field(description="Name of the acceptance file.")
    acceptance_source: Literal["measured", "published"]
    acceptance_target: str | None = None  # target the vector was measured on; none: not stated
    acceptance_draft: str | None = Field(default=None, description="Draft, likewise.")
    temperature: float | None = Field(default=None, ge=0)
    acceptance: Vector
    profile: ProfileReference
    streamed: StreamedWeights | None = None  # outside the devices' memory; none: nothing is
    tree: StoredTree = Field(description="With the keys of a tree file.")
    schedule: Annotated[Ranges, AfterValidator(checked_ranges)]
    """[first, last, drafts] for ranges of batch sizes, without gaps from 1; each request drafts
    that prefix of the tree; 0: no speculation."""
    estimates: list[ScheduleEstimate] = Field(min_length=1, description="The smallest batch first.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        most = max(drafts for _, _, drafts in self.schedule)
        if most >= self.tree.size:
            raise ValueError(f"schedule: {most} drafts from a tree of {self.tree.size} nodes")
        return self


class LibraryFile(FileModel):
    """The trees of one device type (``trees/<device>.json``)."""

    described = "library"
    refused = LibraryError
    schema_: Literal["sequoia-vllm/tree-library/v1"] = "sequoia-vllm/tree-library/v1"
    device: str = Field(min_length=1, description="Our id of the device; the file's name.")
    datasheet: DeviceSpec | None = Field(default=None, description="None for CPUs.")
    generated_by: str
    entries: list[TreeEntry] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [entry.name for entry in self.entries]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two entries are named {name}")
            if not name.startswith(f"{self.device}/"):
                raise ValueError(f"entry {name} does not belong to device {self.device}")
        return self


class UserTree(FileModel):
    """A tuned tree of the user's own, keyed by what it was tuned for."""

    described = "user tree"
    refused = LibraryError
    schema_: Literal["sequoia-vllm/user-tree/v1"] = "sequoia-vllm/user-tree/v1"
    device: str = Field(min_length=1, description="Device name as the driver gives it.")
    entry: TreeEntry
