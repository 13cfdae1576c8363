"""Block tables of Model Runner V2 that lead outside the cache wherever a request has no block.

vLLM leaves there what earlier requests had: what is written past a request's blocks lands in
another's, and nobody sees it. Here the stand-in's cache update refuses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OUTSIDE = 1 << 20  # a block that no cache of the tests has


@contextmanager
def only_own_blocks() -> Iterator[None]:
    """Within the block, every step's tables end where its requests' blocks end."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    from sequoia_vllm.engine.common.patched import patched

    original = BlockTables.gather_block_tables

    def gather_block_tables(self: Any, requests: Any, *args: Any, **kwargs: Any) -> Any:
        for group, table in enumerate(self.block_tables):
            for request in requests.tolist():
                table.gpu[request, int(self.num_blocks.np[group, request]) :] = OUTSIDE
            # Rows beyond the batch are padding, which is read and looked at by nobody.
            self.input_block_tables[group][: len(requests)].fill_(OUTSIDE)
        return original(self, requests, *args, **kwargs)

    with patched(BlockTables, "gather_block_tables", gather_block_tables):
        yield
