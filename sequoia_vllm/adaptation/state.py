"""The file in which an engine keeps what it learned about its drafts for its next start."""

from typing import Literal

from pydantic import Field

from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.json_file import FileModel
from sequoia_vllm.tree import Acceptance

SCHEMA: Literal["sequoia-vllm/adaptation/1"] = "sequoia-vllm/adaptation/1"


Workload = Literal["greedy", "sampled", "mixed"]
# From this many remembered trees on, the expected tokens are known to about 3 %.
_FEWEST_TREES = 500.0


class StateError(SequoiaError, ValueError):
    """The file holds no state, or the state of another version."""


class FadedCounts(FileModel):
    """Counts of one workload (`FadingAcceptance`)."""

    trees: float = Field(ge=0, description="Weight of its verified static trees.")
    offered: list[list[float]] = Field(description="[depth][child], at their weight.")
    accepted: list[list[float]] = Field(description="[depth][child], at their weight.")
    vector: list[list[float]] = Field(
        description="p[depth][child] by these counts; where they are missing, by earlier ones."
    )
    vector_trees: float = Field(
        default=0.0, ge=0, description="Like trees, but not reduced by restarts and pauses."
    )


class AdaptationState(FileModel):
    """What a `DraftController` learned."""

    described = "adaptation"
    refused = StateError
    schema_: Literal["sequoia-vllm/adaptation/1"] = Field(default=SCHEMA, alias="schema")
    parents: list[int] = Field(description="The tree.")
    schedule: list[int] = Field(description="Drafts by batch size from 0 on, as configured.")
    lookup: list[int] = Field(description="Drafts by batch size, as learned.")
    acceptance: dict[Workload, FadedCounts]
    times: list[tuple[int, int, float]] = Field(description="(drafts, batch size, seconds).")

    def usual_acceptance(self) -> tuple[Workload, Acceptance] | None:
        """The vector of the workload with the most trees; None: too few were verified."""
        workload = max(self.acceptance, key=lambda name: self.acceptance[name].vector_trees)
        counted = self.acceptance[workload]
        if counted.vector_trees < _FEWEST_TREES:
            return None
        return workload, Acceptance.of(counted.vector)
