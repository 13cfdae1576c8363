"""Times a few passes of the target and the draft at start-up, as `graph_times` times CUDA graphs.

So an engine on CPUs knows what rows cost, before its first request. Passes have no contexts, and
write nothing. All ranks run the same passes in the same order.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sequoia_vllm.adaptation.step_times import Floats, PassTime, Timed, step_seconds
from sequoia_vllm.engine.runner.tensor_parallel import take_from_rank0

_ROWS = (1, 4, 8, 16, 32)
_FAR = 1024  # times the last of them: no step has more rows
_ROUNDS = 3  # the fastest pass counts: the first may prepare something, and any may wait


@torch.inference_mode()
def time_passes(runner: Any) -> list[Timed]:
    """Seconds of decode steps by the passes of a V1 runner, for steps of up to 32 rows.

    They also price branches and the trees that they replace.
    """
    rows = [count for count in _ROWS if count <= runner.max_num_tokens]
    target, draft = _fastest(runner.run_target, rows), _fastest(runner.drafter.run_draft, rows)
    prices = torch.from_numpy(np.concatenate([target, draft]))
    take_from_rank0(prices)  # all ranks choose the same branches
    own, of_draft = prices.numpy().reshape(2, -1)
    branches = runner.drafter.foretold.branches
    branches.pass_time, branches.draft = _between(rows, own), float(of_draft[0] / own[0])
    batches = min(runner.max_num_reqs, rows[-1])
    seconds = step_seconds(
        runner.tree, batches, range(runner.tree.size),
        lambda count: np.interp(count, rows, target), lambda count: np.interp(count, rows, draft),
    )  # fmt: skip
    return [
        (drafts, batch, float(seconds[drafts, batch]))
        for drafts in range(runner.tree.size)
        for batch in range(1, batches + 1)
        if batch * (1 + drafts) <= rows[-1]
    ]


def _between(rows: list[int], seconds: Floats) -> PassTime:
    """Time of a pass, relative to the first one's: on a line between these, beyond by its rows."""
    relative = seconds / seconds[0]
    known, times = [*rows, _FAR * rows[-1]], [*relative, _FAR * relative[-1]]
    return lambda count: np.interp(count, known, times)


def _fastest(run: Callable[[int], object], rows: list[int]) -> Floats:
    """Seconds ``[len(rows)]`` of passes over so many rows."""
    took = np.empty((_ROUNDS, len(rows)))
    for times in took:
        for place, count in enumerate(rows):
            started = time.perf_counter()
            run(count)
            times[place] = time.perf_counter() - started
    # More rows take no less time: a pass that seems slower than a larger one waited each time.
    fastest: Floats = np.minimum.accumulate(took.min(axis=0)[::-1])[::-1]
    return fastest
