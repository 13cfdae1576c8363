"""Loading the draft where the target's weights are offloaded: the draft's stay on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.model_executor.offloader.base import NoopOffloader, get_offloader, set_offloader


@contextmanager
def nothing_offloaded() -> Iterator[None]:
    """Models built in the block are not offloaded; then the engine's offloader is back.

    One offloader serves all models of a process. A draft that comes from host memory, level by
    level, would cost more than it saves. And vLLM's prefetch backend takes the layers of one
    model only.
    """
    offloader = get_offloader()
    set_offloader(NoopOffloader())
    try:
        yield
    finally:
        set_offloader(offloader)
