"""A tree as large as the paper's for offloading: 768 nodes, 18 deep, up to 32 children."""

from tests.support.engines import sequoia

NODES, DEPTH, CHILDREN = 768, 18, 32
# The first child is accepted often enough for paths of that depth.
ACCEPTANCE = [0.7, *(0.066 / rank for rank in range(1, CHILDREN))]


def large_tree(**keys) -> dict:
    """An engine's configuration with that tree, which batches of any size draft whole."""
    schedule = [[1, 1, NODES - 1]]
    return sequoia(
        NODES, DEPTH, acceptance=ACCEPTANCE, num_speculative_tokens_per_batch_size=schedule, **keys
    )
