"""Positions by depth and the verifier's inputs against plain loops."""

from types import SimpleNamespace

import pytest
import torch

from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED, SKIP
from sequoia_vllm.kernels.scoring_inputs import gather_for_verification, place_nodes

UNTOUCHED = -99
# A tree of five nodes: depth minus index.
SHIFTS = torch.tensor([0, 0, -1, -2, -2])
# Nodes of each request in the batch, beside rows that belong to no tree.
NODES = [3, 1, 5, 0, 2]
CU_ROWS = torch.tensor([0, 3, 4, 9, 9, 11], dtype=torch.int32)
ROWS = torch.tensor([0, 1, 2, 7, 8, 9, 10, 11, 12, 13, 14])  # 3 to 6 read a prompt
SLOTS = torch.tensor([4, 1, 0, 5, 2])


# Of a tree of five nodes, for each slot.
OWN_SHIFTS = torch.tensor(
    [[0, 0, -1, -1, -2], SHIFTS.tolist(), [0, 0, 0, -1, -1], [0] * 5, [0, 0, -1, -2, -3], [0] * 5]
)


def batch_of(rows=ROWS, cu_rows=CU_ROWS, slots=SLOTS):
    return SimpleNamespace(logits_indices=rows, cu_num_logits=cu_rows, idx_mapping=slots)


@pytest.mark.parametrize("shifts", [SHIFTS, OWN_SHIFTS], ids=["one", "own"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_nodes_are_placed_by_depth(dtype, shifts):
    positions = torch.arange(100, 118)
    context_lens = torch.full((6,), UNTOUCHED, dtype=torch.int32)
    noted_slots = context_lens.long()
    expected, contexts, slots = positions.tolist(), context_lens.tolist(), noted_slots.tolist()
    for request, nodes in enumerate(NODES):
        rows = ROWS[CU_ROWS[request] : CU_ROWS[request] + nodes].tolist()
        own = shifts.expand(6, 5)[SLOTS[request]]
        for node, row in enumerate(rows):
            expected[row] += int(own[node])
        if rows:
            contexts[request], slots[request] = 100 + rows[0], int(SLOTS[request])
    batch = batch_of(ROWS.to(dtype), slots=SLOTS.to(dtype))
    place_nodes(batch, shifts, positions, (context_lens, noted_slots))
    assert positions.tolist() == expected
    assert context_lens.tolist() == contexts
    assert noted_slots.tolist() == slots
    assert contexts[3] == contexts[5] == UNTOUCHED


@pytest.mark.parametrize("shifts", [SHIFTS, OWN_SHIFTS], ids=["one", "own"])
def test_nodes_are_shifted_on_every_axis(shifts):
    """By as much as on the one axis, whatever position an image has left each at."""
    starts = torch.tensor([100, 40, 7])
    axes = (starts[:, None] + torch.arange(19))[:, :18]
    one = torch.arange(18)
    for positions in (one, axes):
        place_nodes(batch_of(), shifts, positions)
    assert torch.equal(axes, starts[:, None] + one)


def test_a_large_tree_is_placed():
    """More nodes than a program takes at once."""
    size = 1500
    shifts = torch.arange(size) // 2 * -1
    positions = torch.arange(size) + 7
    context_lens, zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    batch = batch_of(torch.arange(size), torch.tensor([0, size], dtype=torch.int32), zero)
    place_nodes(batch, shifts, positions, (context_lens, zero))
    assert torch.equal(positions, torch.arange(size) + 7 + shifts)
    assert context_lens.tolist() == [7]


def test_no_trees_are_placed():
    positions = torch.arange(3)
    nothing, cu_rows = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    place_nodes(batch_of(nothing, cu_rows, nothing), SHIFTS, positions)
    assert positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize("with_invalid", [False, True])
def test_inputs_of_the_verifier(with_invalid):
    slots = torch.tensor([5, 0, 3, 1, 2], dtype=torch.int32)
    by_slot = {
        "num_nodes": torch.tensor([4, 0, 0, 4, 9, 9], dtype=torch.int32),
        "state_rows": torch.tensor([1, 9, 9, 3, 9, 0], dtype=torch.int32),
        "modes": torch.tensor([GREEDY, SKIP, SKIP, SAMPLED, GREEDY, SEEDED], dtype=torch.int32),
        "temperatures": torch.arange(6) / 8,
        "seeds": torch.arange(6) * -(10**12),
    }
    input_ids = torch.arange(200, 218, dtype=torch.int32)
    positions = torch.arange(100, 118)
    counts = CU_ROWS.diff()
    row_nodes = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts.tolist()])
    row_slots = slots.repeat_interleave(counts)
    invalid = torch.zeros(11, dtype=torch.bool)
    invalid[5] = True  # node 1 of the third request
    paths = torch.full((5, 4), UNTOUCHED, dtype=torch.int32)
    batch = SimpleNamespace(
        logits_indices=ROWS, expanded_idx_mapping=row_slots, expanded_local_pos=row_nodes,
        input_ids=input_ids, positions=positions, idx_mapping=slots, cu_num_logits=CU_ROWS,
    )  # fmt: skip
    inputs = gather_for_verification(
        batch, **by_slot, invalid=invalid if with_invalid else None, scored=paths[:, 0]
    )
    expected = []
    for row, (node, slot) in enumerate(zip(row_nodes.tolist(), row_slots.tolist(), strict=True)):
        is_draft = node < by_slot["num_nodes"][slot] and not (with_invalid and invalid[row])
        expected.append(int(input_ids[ROWS[row]]) if is_draft else -1)
    assert inputs.tokens.tolist() == expected
    assert expected[8] == -1  # its tree had four nodes: the fifth was not drafted
    assert inputs.token_ids.tolist() == input_ids[ROWS].tolist()
    assert inputs.positions.tolist() == positions[ROWS].tolist()
    for name in ("state_rows", "modes", "temperatures", "seeds"):
        assert getattr(inputs, name).tolist() == by_slot[name][slots.long()].tolist()
    assert inputs.root_positions.tolist() == [100, 107, 108, 113, 113]
    assert paths[:, 0].tolist() == [3, 1, 4, 0, 0]
    assert (paths[:, 1:] == UNTOUCHED).all()

    part = inputs.part(slice(1, 3), slice(3, 9))
    assert part.tokens.tolist() == expected[3:9]
    assert part.positions.tolist() == inputs.positions[3:9].tolist()
    assert part.modes.tolist() == [GREEDY, SAMPLED]
    assert part.temperatures.tolist() == [0.0, 3 / 8]


def test_many_rows_and_requests():
    """More than one program has, each request with one row but the last."""
    requests, rows = 150, 300
    cu_rows = torch.cat([torch.arange(requests), torch.tensor([rows])]).int()
    slots = torch.arange(requests).flip(0).int()
    row_slots = slots.repeat_interleave(cu_rows.diff())
    row_nodes = torch.cat([torch.arange(count) for count in cu_rows.diff().tolist()]).int()
    every = torch.arange(requests, dtype=torch.int32)
    scored = torch.zeros(requests, dtype=torch.int32)
    batch = SimpleNamespace(
        logits_indices=torch.arange(rows), expanded_idx_mapping=row_slots,
        expanded_local_pos=row_nodes, input_ids=torch.arange(rows, dtype=torch.int32),
        positions=torch.arange(rows), idx_mapping=slots, cu_num_logits=cu_rows,
    )  # fmt: skip
    inputs = gather_for_verification(
        batch, num_nodes=every, state_rows=every + 1, modes=every + 2,
        temperatures=every.float(), seeds=every.long(), invalid=None, scored=scored,
    )  # fmt: skip
    drafted = torch.where(row_nodes < row_slots, torch.arange(rows), -1)
    assert torch.equal(inputs.tokens, drafted)
    assert torch.equal(inputs.root_positions, torch.arange(requests, dtype=torch.int32))
    assert torch.equal(inputs.state_rows, slots + 1)
    assert scored.tolist() == [min(int(slot), 1) for slot in slots[:-1]] + [0]
