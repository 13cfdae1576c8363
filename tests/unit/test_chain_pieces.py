"""Long chains, cut into pieces: what each row sees stays what it was."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sequoia_vllm.drafting.chain_pieces import chain_pieces
from sequoia_vllm.drafting.growth import NodeQueries

LONGEST = 4


def seen_by_rows(chains: NodeQueries, owners: list[int]) -> dict[int, tuple[int, int]]:
    """By row: whose it is, and how many tokens it sees, itself included."""
    starts, contexts = chains.query_start_loc.tolist(), chains.context_lens.tolist()
    return {
        row: (owner, contexts[index] + row - starts[index] + 1)
        for index, owner in enumerate(owners)
        for row in range(starts[index], starts[index + 1])
    }


@given(
    st.lists(st.tuples(st.integers(0, 14), st.integers(0, 9)), min_size=1, max_size=5), st.data()
)
def test_each_row_sees_what_it_saw(requests, data):
    counts, contexts = zip(*requests, strict=True)
    rows = sum(counts) + data.draw(st.integers(0, 9))  # the host knows a bound
    chains = NodeQueries(
        request_slots=torch.arange(len(requests)) + 10,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int(),
        first=0, width=max(counts), ancestors=torch.ones(LONGEST, LONGEST).tril().bool(),
        max_keys=100, uneven=True,
    )  # fmt: skip
    pieces, owners = chain_pieces(chains, rows)
    assert seen_by_rows(pieces, owners.tolist()) == seen_by_rows(chains, [*range(len(requests))])
    assert pieces.query_start_loc.diff().max() <= pieces.width == LONGEST
    assert pieces.request_slots.tolist() == [owner + 10 for owner in owners.tolist()]
    assert pieces.context_lens.dtype == pieces.query_start_loc.dtype == torch.int32
    assert len(owners) == len(requests) + rows // LONGEST
