"""Cuts long chains of committed tokens into pieces that a mask has room for."""

from dataclasses import replace

import torch
from torch import Tensor

from sequoia_vllm.drafting.growth import NodeQueries


def chain_pieces(chains: NodeQueries, rows: int) -> tuple[NodeQueries, Tensor]:
    """Pieces of R requests' chains, each a request of its own.

    Keys of all of a pass's rows are in the cache when it attends to them. So a piece is a chain
    below a longer context: the tokens of the pieces before it. Only the device knows how many rows
    each request has; the host knows how many pieces there are at most.

    Args:
        chains: Its ``ancestors`` are those of the longest piece, bool ``[P, P]``.
        rows: At least the rows of all requests.

    Returns:
        R + rows // P pieces, some of them of no rows; int64: the request that each belongs to.
    """
    longest, starts = chains.ancestors.shape[-1], chains.query_start_loc
    requests = len(chains.context_lens)
    of_each = (starts.diff() + longest - 1) // longest
    ends = of_each.cumsum(0)
    pieces = torch.arange(requests + rows // longest, device=starts.device)
    owners = torch.searchsorted(ends, pieces, right=True).clamp_(max=requests - 1)
    tokens_before = ((pieces - (ends - of_each)[owners]) * longest).int()
    first_rows = torch.minimum(starts[owners] + tokens_before, starts[owners + 1])
    cut = replace(
        chains,
        request_slots=chains.request_slots[owners],
        context_lens=chains.context_lens[owners] + tokens_before,
        query_start_loc=torch.cat([first_rows, starts[-1:]]),
        width=longest,
        uneven=False,
    )
    return cut, owners
