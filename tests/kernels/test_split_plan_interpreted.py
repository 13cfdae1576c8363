"""How the device divides uneven requests among programs, against the same sums in Python."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sequoia_vllm.kernels.split_plan import SplitPlan

GROUP, ROWS, KEYS, LEAST = 4, 16, 8, 2
# (context, rows): a long one, a prompt, one token, nothing, many short ones.
BATCHES = {
    "one long context": ([4000, 0, 17, 9, 30], [7, 40, 1, 0, 3]),
    "equal requests": ([100] * 6, [5] * 6),
    "only prompts": ([0, 600], [64, 33]),
    "nobody has rows": ([1 << 30, 5], [0, 0]),
}


def plan(contexts, rows, at_once, window=0, spare=0):
    starts = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
    tree = SimpleNamespace(
        context_lens=torch.tensor(contexts, dtype=torch.int32), query_start_loc=starts, first=0
    )
    tiles = len(rows) + sum(rows) * GROUP // ROWS + spare
    constants = {
        "GROUP": GROUP, "KEYS": KEYS, "MIN_BLOCKS": LEAST, "WINDOWED": window > 0, "HEAD_SIZE": 64,
    }  # fmt: skip
    return SplitPlan.launch(tree, ROWS, tiles, at_once, window, constants)


@pytest.mark.parametrize("spare", [0, 200])
@pytest.mark.parametrize(("at_once", "window"), [(1, 0), (3, 0), (40, 0), (16, 50)])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_tile_and_split_has_one_program(batch, at_once, window, spare):
    contexts, rows = map(np.array, batch)
    found = plan(*batch, at_once, window, spare)
    begins = np.maximum(contexts - window + 1, 0) // KEYS * KEYS if window else 0
    blocks = np.where(rows > 0, -(-(contexts + rows - begins) // KEYS), 0)
    tiles = -(-rows * GROUP // ROWS)
    split = max(LEAST, -(-int((tiles * blocks).sum()) // at_once))
    splits = -(-blocks // split)
    taken, merged = tiles * splits, np.where(splits > 1, tiles, 0)
    partials = np.where(splits > 1, taken, 0)
    firsts = [np.cumsum(each) - each for each in (taken, partials, merged)]
    firsts[1][merged == 0] = -1
    expected = np.stack([np.full(len(rows), split), *firsts], axis=1)
    assert found.requests.tolist() == expected.tolist()
    for list_of, counts in ((found.programs, taken), (found.merged, merged)):
        requests = np.repeat(np.arange(len(rows)), counts).tolist()
        assert list_of.tolist() == requests + [-1] * (len(list_of) - len(requests))
    # What `tree_attention` makes room for.
    assert partials.sum() < 2 * at_once
    assert at_once > 1 or splits.max() <= 1
