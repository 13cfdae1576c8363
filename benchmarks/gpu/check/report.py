"""What the check of kernels found, and its file.

Plain dataclasses, so that it is written where there is no pydantic.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sequoia_vllm.errors import SequoiaError

SCHEMA = "sequoia-vllm/gpu-check/v1"


class GpuCheckError(SequoiaError, ValueError):
    """A check that cannot be run; the message names the fix."""


@dataclass(frozen=True)
class Check:
    """Results against a reference.

    Attributes:
        error: The worst difference found, in the measure that ``limit`` is of.
        limit: The largest that is right.
    """

    name: str
    error: float
    limit: float
    passed: bool


@dataclass(frozen=True)
class AttentionTime:
    """One launch of tree attention.

    Attributes:
        seconds: Median per launch, its merge included; CUDA graph, cache not in L2.
        bytes_read: Keys and values of all positions, once.
        bandwidth_floor: Seconds to move as many bytes in a large copy.
        arithmetic_floor: Seconds for its products at the rate of a large one.
        copy_seconds: A copy that reads and writes ``bytes_read`` in all, timed alike.
        flash_seconds: As ``seconds``, with vLLM's FlashAttention over the contexts; None:
            it was not there.
    """

    shape: str
    heads: int
    kv_heads: int
    head_size: int
    cache_dtype: str
    batch_size: int
    context_length: int
    nodes: int
    seconds: float
    spread: float
    bytes_read: int
    bandwidth_floor: float
    arithmetic_floor: float
    copy_seconds: float
    flash_seconds: float | None = None

    @property
    def share_of_bandwidth(self) -> float:
        """Share of the bandwidth that a large copy achieves, 0 to 1."""
        return self.bandwidth_floor / self.seconds


@dataclass(frozen=True)
class PartTime:
    """Another part of a step, as one CUDA graph.

    Attributes:
        tokens: Of each request: nodes scored, or nodes of a level.
        vocabulary: Size; 0: does not matter.
    """

    part: str
    model: str
    batch_size: int
    context_length: int
    tokens: int
    vocabulary: int
    seconds: float
    spread: float


@dataclass
class StageReport:
    """One stage."""

    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    attention: list[AttentionTime] = field(default_factory=list)
    parts: list[PartTime] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything could be run, and was right."""
        return not self.failures and all(check.passed for check in self.checks)


@dataclass
class GpuCheckReport:
    """Everything, as it is written to disk.

    Attributes:
        interpreted: Run by Triton's interpreter: times mean nothing then.
    """

    date: str
    device: str
    interpreted: bool
    provenance: dict[str, Any]
    copy_bytes_per_second: float = 0.0
    product_operations_per_second: float = 0.0
    stages: dict[str, StageReport] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every stage passed."""
        return all(stage.passed for stage in self.stages.values())

    def save(self, path: Path) -> None:
        """Writes the JSON."""
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
