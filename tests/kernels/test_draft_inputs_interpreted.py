"""What the draft model reads against plain loops: padding, ends of the model, several groups."""

from types import SimpleNamespace

import pytest
import torch

from sequoia_vllm.kernels.draft_inputs import NO_SLOT, DraftInputs, PagedTables

UNTOUCHED = -99
MAX_LEN = 64
# Request slots of a batch of five; the fourth is a graph's padding.
REQUESTS = torch.tensor([3, 0, 2, -1, 4])
POISON = torch.iinfo(torch.int32).max // 1024


def tables_of(block_sizes, requests=5, windows=None):
    """Tables wider than the model's length needs, none of whose blocks is another's."""
    generator = torch.Generator().manual_seed(7)
    tables = []
    for size in block_sizes:
        width = -(-MAX_LEN // size)
        table = torch.randperm(requests * width, generator=generator).view(requests, width).int()
        tables.append(torch.nn.functional.pad(table, (0, 3), value=POISON)[:, :width])
    return PagedTables.of(tables, block_sizes, windows)


def untouched_inputs(tables, rows, token_ids=None, longest=MAX_LEN):
    token_ids = torch.zeros(5, MAX_LEN, dtype=torch.int32) if token_ids is None else token_ids
    inputs = DraftInputs.empty(tables, rows, token_ids, longest)
    for buffer in (inputs.token_ids, inputs.positions, inputs.slots):
        buffer.fill_(UNTOUCHED)
    return inputs


def expected_slot(tables, group, request, position):
    size = int(tables.layout[group, 3])
    return int(tables.tables[group][request, position // size]) * size + position % size


def check_rows(inputs, expected, block_sizes):
    """`expected` are (token, position, place in the cache or None, request) of each row."""
    rows = len(expected)
    assert inputs.token_ids[:rows].tolist() == [token for token, _, _, _ in expected]
    assert inputs.positions[:rows].tolist() == [position for _, position, _, _ in expected]
    for group in range(len(block_sizes)):
        assert inputs.slots[group, :rows].tolist() == [
            NO_SLOT if cached is None else expected_slot(inputs.tables, group, request, cached)
            for _, _, cached, request in expected
        ]
    for buffer in (inputs.token_ids, inputs.positions, inputs.slots):
        assert (buffer[..., rows:] == UNTOUCHED).all()


# Windows by group, and tokens of each request that the target had computed before the step.
WINDOWS, COMPUTED_BEFORE = {0: 3}, torch.tensor([0, 0, 34, 9, 60], dtype=torch.int32)


@pytest.mark.parametrize("windows", [{}, WINDOWS])
@pytest.mark.parametrize("state_offset", [0, 1])
@pytest.mark.parametrize("block_sizes", [(16,), (32,), (16, 32), (32, 16, 64)])
def test_committed_tokens(block_sizes, state_offset, windows):
    """Of requests that read something, nothing, or more than the model holds; then padding."""
    starts = torch.tensor([0, 15, 31, 9, MAX_LEN - 2], dtype=torch.int32)
    first_rows = torch.tensor([0, 4, 4, 6, 10, 13], dtype=torch.int32)
    token_ids = torch.arange(5 * (MAX_LEN + 3), dtype=torch.int32).view(5, MAX_LEN + 3)[:, :MAX_LEN]
    longest = 33
    inputs = untouched_inputs(tables_of(block_sizes, windows=windows), 40, token_ids, longest)
    batch = SimpleNamespace(
        slots=REQUESTS, starts=starts, first_rows=first_rows, computed_before=COMPUTED_BEFORE,
        state_offset=state_offset,
    )  # fmt: skip
    inputs.read_committed(batch, 5, num_rows=16)
    expected, before_windows = [], []
    for request, slot in enumerate(REQUESTS.tolist()):
        for offset in range(first_rows[request + 1] - first_rows[request]):
            position = int(starts[request]) + offset
            real = slot >= 0 and position + state_offset < MAX_LEN
            token = int(token_ids[slot, position + state_offset]) if real else 0
            place = position if real else None
            expected.append((token, min(position, longest - 1), place, request))
            before_windows.append(position <= COMPUTED_BEFORE[request] - WINDOWS[0])
    expected += [(0, 0, None, 0)] * 3
    last = [cached is None for _, _, cached, _ in expected[10:13]]
    assert last == [False, state_offset == 1, True]
    assert before_windows == [False] * 4 + [True, False] + [False] * 7
    if windows:  # looked at here, and then as if it were not there
        left_out = before_windows.index(True)
        assert inputs.slots[:, left_out].tolist()[0] == NO_SLOT
        assert (inputs.slots[1:, left_out] != NO_SLOT).all()
        inputs.slots[0, left_out] = expected_slot(inputs.tables, 0, 2, int(starts[2]))
    check_rows(inputs, expected, block_sizes)


@pytest.mark.parametrize("requests", [1, 2, 3, 127, 128, 300])
def test_each_row_finds_its_request(requests):
    """Among any number of them, of which many read nothing, also the first and the last."""
    generator = torch.Generator().manual_seed(requests)
    counts = torch.randint(-3, 4, (requests,), generator=generator).clamp(min=0)
    first_rows = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = int(first_rows[-1]) + 2
    token_ids = torch.arange(requests * 8, dtype=torch.int32).view(requests, 8)
    inputs = untouched_inputs(tables_of((16,), requests), rows, token_ids)
    batch = SimpleNamespace(
        slots=torch.arange(requests), starts=torch.full((requests,), 5, dtype=torch.int32),
        first_rows=first_rows, computed_before=torch.zeros(requests, dtype=torch.int32),
        state_offset=0,
    )  # fmt: skip
    inputs.read_committed(batch, requests, rows)
    expected = [
        (request * 8 + 5 + offset, 5 + offset, 5 + offset, request)
        for request, count in enumerate(counts.tolist())
        for offset in range(count)
    ]
    check_rows(inputs, [*expected, *[(0, 0, None, 0)] * 2], (16,))


def read_level(inputs, requests, contexts, tokens, nodes, first, depth):
    batch = SimpleNamespace(slots=requests, contexts=contexts)
    level = SimpleNamespace(nodes=nodes, width=nodes.shape[-1], first=first, depth=depth)
    inputs.read_level(batch, len(requests), level, tokens)


# Columns of a level's nodes, for each request slot.
OWN_NODES = torch.tensor([[2, 3, 5], [0, 0, 0], [1, 4, 8], [7, 8, 1], [3, 2, 6]], dtype=torch.int32)


@pytest.mark.parametrize("by_slot", [OWN_NODES[2], OWN_NODES], ids=["one", "own"])
@pytest.mark.parametrize("block_sizes", [(16,), (32,), (16, 32), (32, 16, 64)])
def test_nodes_of_a_level(block_sizes, by_slot):
    roots = torch.tensor([0, 14, 30, 0, MAX_LEN - 6], dtype=torch.int32)
    tokens = torch.arange(5 * 12).view(5, 12)[:, :9]
    first, depth, longest = 4, 2, 32
    inputs = untouched_inputs(tables_of(block_sizes), rows=33, longest=longest)
    read_level(inputs, REQUESTS, roots, tokens, by_slot, first, depth)
    expected = [
        (
            int(tokens[request, node]) if slot >= 0 else 0,
            min(root + depth, longest - 1),
            root + place if slot >= 0 and root + place < MAX_LEN else None,
            request,
        )
        for request, (slot, root) in enumerate(zip(REQUESTS.tolist(), roots.tolist(), strict=True))
        for place, node in enumerate(by_slot.expand(5, 3)[slot].tolist(), start=first)
    ]
    assert [cached for _, _, cached, _ in expected[-3:]] == [MAX_LEN - 2, MAX_LEN - 1, None]
    check_rows(inputs, expected, block_sizes)


@pytest.mark.parametrize("block_sizes", [(16,), (32, 16)])
def test_roots_and_masks(block_sizes):
    roots = torch.tensor([0, 14, 30, 9, MAX_LEN - 3], dtype=torch.int32)
    token_ids = torch.arange(5 * (MAX_LEN + 3), dtype=torch.int32).view(5, MAX_LEN + 3)[:, :MAX_LEN]
    width, mask, longest = 4, 777, 32
    inputs = untouched_inputs(tables_of(block_sizes), 22, token_ids, longest)
    inputs.read_block(SimpleNamespace(slots=REQUESTS, roots=roots), 5, width, mask)
    expected = [
        (
            int(token_ids[slot, root]) if slot >= 0 and offset == 0 else mask,
            min(root + offset, longest - 1),
            root + offset if slot >= 0 and root + offset < MAX_LEN else None,
            request,
        )
        for request, (slot, root) in enumerate(zip(REQUESTS.tolist(), roots.tolist(), strict=True))
        for offset in range(width)
    ]
    assert [cached for _, _, cached, _ in expected[-2:]] == [MAX_LEN - 1, None]
    check_rows(inputs, expected, block_sizes)


def test_more_rows_than_one_program_has():
    inputs = untouched_inputs(tables_of((16,), requests=40), rows=400)
    roots = torch.arange(40, dtype=torch.int32)
    nodes, tokens = torch.arange(1, 8, dtype=torch.int32), torch.arange(40 * 9).view(40, 9)
    read_level(inputs, torch.arange(40).flip(0), roots, tokens, nodes, first=2, depth=1)
    expected = [
        (request * 9 + node, request + 1, request + 1 + node, request)
        for request in range(40)
        for node in range(1, 8)
    ]
    check_rows(inputs, expected, (16,))


def test_no_entry_beyond_a_table_is_read():
    """A position that the table has no block for has no slot, even if the model goes so far."""
    table = torch.tensor([[5, POISON, POISON]], dtype=torch.int32)[:, :1]
    token_ids = torch.zeros(1, 1024, dtype=torch.int32)
    inputs = untouched_inputs(PagedTables.of([table], [16]), 8, token_ids, longest=1024)
    nodes, context = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([14]).int()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    read_level(inputs, torch.tensor([0]), context, tokens, nodes, first=0, depth=1)
    assert inputs.slots[0, :3].tolist() == [5 * 16 + 14, 5 * 16 + 15, NO_SLOT]


def test_tables_that_do_not_fit_are_refused():
    table = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="1 block tables and 2 block sizes"):
        PagedTables.of([table], [16, 16])
    with pytest.raises(ValueError, match="must be int32"):
        PagedTables.of([table.long()], [16])
    with pytest.raises(ValueError, match="must be int32"):
        PagedTables.of([table.t()], [16])


def test_batches_that_do_not_fit_are_refused():
    inputs = untouched_inputs(tables_of((16,)), rows=9)
    with pytest.raises(ValueError, match="10 rows of 5 requests"):
        inputs.read_committed(None, 5, num_rows=10)
