"""Profiles: how long each part of a step takes on one device for one model pair.

A profile is a JSON file (`Profile`), written by the measuring tool
(``"source": "measured"``) or computed from datasheet values (``"source": "roofline"``, see
`sequoia_vllm.hardware.roofline`). All times are in seconds, per engine step, for the whole batch.
"""

import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from sequoia_vllm.drafters.registry import HeadShape, drafts_in_one_pass
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.hardware.device import DeviceSpec
from sequoia_vllm.hardware.models import ModelShape
from sequoia_vllm.hardware.streaming import StreamedWeights
from sequoia_vllm.json_file import FileModel

Seconds = Annotated[float, Field(gt=0, le=1e5)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]
ProfileSource = Literal["measured", "roofline"]
HOW_TIMED: dict[ProfileSource, str] = {
    "measured": "measured", "roofline": "roofline, not measured",
}  # fmt: skip
"""Words for times, by their source."""


class ProfileError(SequoiaError, ValueError):
    """A profile that cannot be used; says which entry is wrong."""


class Curve(FileModel):
    """Time of one forward pass against its tokens, at one batch size and context."""

    batch_size: Count = Field(description="Requests in the batch.")
    context_length: Count = Field(description="Committed tokens of each request.")
    tokens: list[Count] = Field(min_length=1)
    """Tokens of *each request*, increasing. The target scores a tree of n nodes with n tokens."""
    seconds: list[Seconds] = Field(min_length=1)  # median time, one for each of `tokens`
    spread: list[Annotated[float, Field(ge=0)]] | None = None
    """Interquartile range of each time, seconds."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError(f"tokens must increase, not {self.tokens}")
        for name, values in (("seconds", self.seconds), ("spread", self.spread)):
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(
                    f"{name} has {len(values)} values for {len(self.tokens)} token counts"
                )
        return self


class Overhead(FileModel):
    """Time of a step outside the models' forward passes, at one batch size."""

    batch_size: Count = Field(description="Requests in the batch.")
    context_length: Count | None = None  # committed tokens of each request; none: whatever it is
    plain_seconds: float = Field(ge=0, le=1e5)  # a plain step: scheduling, sampling, output
    tree_seconds: float = Field(ge=0, le=1e5)
    """A speculative step: all of the plain one's, commit and tree bookkeeping, and verification
    unless the profile has a curve for it (drawing children belongs to the draft level)."""
    commit_seconds: float | None = Field(default=None, ge=0, le=1e5)
    """Moving accepted keys and values, of trees that are no chains."""


class Profile(FileModel):
    """Times on one device for one model pair."""

    described = "profile"
    refused = ProfileError
    schema_: Literal["sequoia-vllm/profile/v1"] = "sequoia-vllm/profile/v1"
    source: ProfileSource  # where the times come from: a running engine, or datasheet values
    date: datetime.date = Field(description="Day of the measurement, or of the datasheet values.")
    device: str = Field(min_length=1, description="Device name as the driver gives it.")
    target: str = Field(min_length=1, description="Target model, as given to vLLM.")
    draft: str = Field(
        min_length=1, description="Draft model, as given to vLLM; or a kind without weights."
    )
    target_parameters: float = Field(gt=0, description="Parameters of the target.")
    draft_parameters: float = Field(
        ge=0, description="Parameters of the draft; 0: it has no weights."
    )
    dtype: str = Field(default="bfloat16", description="vLLM's dtype (or quantization).")
    tensor_parallel_size: Count = Field(default=1, description="Devices the target is split over.")
    target_forward: list[Curve] = Field(min_length=1)
    """One target forward pass, logits of every token included."""
    draft_level: list[Curve] = Field(min_length=1)
    """One draft forward pass over the nodes of one level that have children, drawing those children
    included; of a drafter that drafts all levels in one pass: drawing alone."""
    draft_reading: list[Curve] | None = None
    """The step's first draft pass, over what was committed, or by the positions of the block of a
    one-pass drafter. None: the first pass takes what one over a level does."""
    head: HeadShape | None = None  # what the draft is, where it is a head; none: a model
    overhead: list[Overhead] = Field(min_length=1, description="The rest of a step.")
    verification: list[Curve] | None = None
    """Walking the trees of a step, by nodes scored; none: in the target's pass and the rest."""
    datasheet: DeviceSpec | None = None  # the datasheet values used (roofline only)
    target_shape: ModelShape | None = Field(default=None, description="Computed profiles only.")
    draft_shape: ModelShape | None = Field(default=None, description="Computed profiles only.")
    assumptions: dict[str, float] | None = None  # what the roofline assumed and nobody measured
    streamed: StreamedWeights | None = None  # of the target; computed profiles only
    provenance: dict[str, Any] = Field(default_factory=dict)
    """Free form: argv, versions, git SHA, configuration hashes of the models."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, curves in (
            ("target_forward", self.target_forward),
            ("draft_level", self.draft_level),
            ("draft_reading", self.draft_reading or []),
            ("verification", self.verification or []),
        ):
            keys = [(curve.batch_size, curve.context_length) for curve in curves]
            if len(set(keys)) != len(keys):
                raise ValueError(f"{name} has two curves for the same batch size and context")
        rests = [(entry.batch_size, entry.context_length) for entry in self.overhead]
        if len(set(rests)) != len(rests):
            raise ValueError("overhead has two entries for the same batch size and context")
        if len({context is None for _, context in rests}) > 1:
            raise ValueError("overhead must have a context_length in all of its entries or in none")
        if any(curve.tokens[0] != 1 for curve in self.target_forward):
            raise ValueError(
                "every curve of target_forward must start at 1 token: that is plain decoding"
            )
        if drafts_in_one_pass(self.head) and self.draft_reading is None:
            raise ValueError("a head that drafts in one pass needs its time: draft_reading")
        if self.source == "roofline" and self.datasheet is None:
            raise ValueError('a "roofline" profile must carry the datasheet values it used')
        return self
