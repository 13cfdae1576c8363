"""A worker extension: what times steps at start does so whatever the machine's clocks say.

Spawned ranks see nothing of what a test patches, but import what their engine names.
"""

import math

from sequoia_vllm.engine.worker.start import timing


def _left(self) -> float:
    """A minute for each kind of step on the first rank, and none on the others."""
    return -1.0 if timing.get_tp_group().rank_in_group else 60.0


timing._Session._left = _left
timing._MOST_SPREAD = math.inf
timing._LEAST_SHARE = 0.0


class WithoutClocks:
    """Adds nothing to a worker: that this module was imported is what counts."""
