"""A draft model that is the only stage of its pipeline, whatever the target's has.

To be named as an engine's ``worker_extension_cls``, which every worker imports: `Worker`
adds nothing; what the module does is done when it is imported.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed import parallel_state
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator


class Worker:
    """Nothing."""


@contextmanager
def _only_stage() -> Iterator[None]:
    """Within it models take this process for a pipeline of its own."""
    group = parallel_state._PP
    assert group is not None
    alone = copy.copy(group)
    alone.ranks, alone.world_size, alone.rank_in_group = [group.rank], 1, 0
    parallel_state._PP = alone
    try:
        yield
    finally:
        parallel_state._PP = group


def _in_only_stage(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _only_stage():
            return original(*args, **kwargs)

    return call


for name in ("load_draft_model", "_run_model"):
    original = getattr(StandaloneARSpeculator, name)
    setattr(StandaloneARSpeculator, name, _in_only_stage(original))
