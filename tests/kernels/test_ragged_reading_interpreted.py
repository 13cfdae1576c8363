"""Committed tokens that the draft reads in one pass, a different number of each request."""

import pytest
import torch

from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.growth import DraftModel, DraftStates, TreeGrowth
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables
from tests.support.attending import Batch

# A prompt beside decoding, one without rows, and a chunk of a prompt; then rows of padding.
CONTEXTS, COUNTS = [700, 3, 0, 20, 11], [5, 1, 150, 0, 70]
MAX_LEN, BLOCK = 64, 16
assert_close = torch.testing.assert_close


@pytest.mark.parametrize("processors", [1, 32])
@pytest.mark.parametrize("window", [None, 40])
def test_each_row_attends_to_what_its_request_has_before_it(window, processors):
    batch = Batch(CONTEXTS, COUNTS, nodes=512, heads=(2, 1), head_size=32)
    batch.ancestors = torch.ones(512, 512, dtype=torch.bool).tril()
    output = batch.run(processors, window=window, max_queries=256)
    assert_close(output, batch.expected(window=window), atol=2e-5, rtol=2e-5)


class Reader(DraftModel):
    """Its state at a row is the row's token; it notes what it was asked to read."""

    def forward(self, queries):
        self.queries = queries
        return DraftStates(queries.token_ids[:, None].float())

    def compute_logits(self, hidden):
        return hidden


def reading(counts, rows, most):
    """The queries of such a pass, and the states of roots that it keeps."""
    requests = len(counts)
    batch = DraftBatch(requests, torch.device("cpu"))
    batch.slots.copy_(torch.arange(requests).flip(0))
    batch.starts.copy_(torch.arange(requests) * 3)
    first_rows = torch.tensor([0, *counts]).cumsum(0)
    batch.first_rows.copy_(first_rows)
    batch.last_rows.copy_((first_rows[1:] - 1).clamp(min=0))
    blocks = torch.arange(requests * MAX_LEN // BLOCK, dtype=torch.int32).view(requests, -1)
    token_ids = torch.arange(requests * MAX_LEN, dtype=torch.int32).view(requests, MAX_LEN)
    growth = TreeGrowth(
        batch=batch, drafted=None, model=Reader(),
        inputs=DraftInputs.empty(PagedTables.of([blocks], [BLOCK]), rows, token_ids, MAX_LEN),
        depth=3, longest_chain=32,
    )  # fmt: skip
    growth.keep_roots(growth.read_committed(requests, rows, most, MAX_LEN), requests)
    return growth._model.queries, growth._roots.hidden[:, 0].tolist()


@pytest.mark.parametrize(("most", "chain"), [(4, 4), (5, 32), (30, 32)])
def test_growth_reads_what_follows_and_keeps_the_last_states(most, chain):
    counts = [3, 0, 4, 1] if most == 4 else [3, 0, 5, 1]
    rows = 16
    queries, roots = reading(counts, rows, most)
    expected = [
        (3 - request) * MAX_LEN + 3 * request + offset
        for request, count in enumerate(counts)
        for offset in range(count)
    ]
    read = len(expected)
    assert queries.token_ids.tolist() == [*expected, *[0] * (rows - read)]
    assert queries.slots[0, read:].tolist() == [-1] * (rows - read)
    assert queries.query_start_loc.tolist() == [0, *torch.tensor(counts).cumsum(0).tolist()]
    assert (queries.width, len(queries.ancestors)) == (most, chain)
    assert torch.equal(queries.ancestors, torch.ones_like(queries.ancestors).tril())
    first, _, *others = roots
    assert [first, *others] == [expected[2], expected[read - 2], expected[read - 1]]
