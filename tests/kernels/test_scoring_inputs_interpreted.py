"""Positions by depth and the verifier's inputs against plain loops."""

from types import SimpleNamespace

import pytest
import torch

from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED
from sequoia_vllm.kernels.scoring_inputs import gather_for_verification, place_nodes
from sequoia_vllm.kernels.told_branches import BRANCH

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


MANY = [1] * 149 + [151], [*range(149, -1, -1)]  # more rows and requests than a program has


@pytest.mark.parametrize(
    ("counts", "slots", "with_invalid"),
    [(NODES, [5, 0, 3, 1, 2], False), (NODES, [5, 0, 3, 1, 2], True), (*MANY, False)],
    ids=["few", "invalid", "many"],
)
def test_inputs_of_the_verifier(counts, slots, with_invalid):
    counts, slots = torch.tensor(counts), torch.tensor(slots, dtype=torch.int32)
    cu_rows = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    row_nodes = torch.cat([torch.arange(count) for count in counts.tolist()]).int()
    row_slots = slots.repeat_interleave(counts)
    rows = torch.arange(len(row_nodes))
    rows[3:] += 4  # these read a prompt
    every = torch.arange(6 * 25, dtype=torch.int32)
    by_slot = {
        "num_nodes": torch.tensor([4, 0, 0, 4, 9, 9], dtype=torch.int32).repeat(25),
        "state_rows": every + 1, "modes": every % 4 - 1, "temperatures": every / 8,
        "seeds": every.long() * -(10**12),
    }  # fmt: skip
    input_ids = torch.arange(200, 207 + len(rows), dtype=torch.int32)
    positions = torch.arange(100, 107 + len(rows))
    invalid = torch.zeros(len(rows), dtype=torch.bool)
    invalid[5] = True  # of a node that was drafted
    paths = torch.full((len(slots), 4), UNTOUCHED, dtype=torch.int32)
    batch = SimpleNamespace(
        logits_indices=rows, expanded_idx_mapping=row_slots, expanded_local_pos=row_nodes,
        input_ids=input_ids, positions=positions, idx_mapping=slots, cu_num_logits=cu_rows,
    )  # fmt: skip
    inputs = gather_for_verification(
        batch, **by_slot, invalid=invalid if with_invalid else None, scored=paths[:, 0]
    )
    is_draft = (row_nodes < by_slot["num_nodes"][row_slots]) & ~(invalid & with_invalid)
    expected = torch.where(is_draft, input_ids[rows], -1).long()
    assert torch.equal(inputs.tokens, expected)
    assert is_draft[5] != with_invalid
    assert (~is_draft).sum() >= 3  # nodes that their trees did not have
    assert torch.equal(inputs.token_ids, input_ids[rows])
    assert torch.equal(inputs.positions, positions[rows])
    for name in ("state_rows", "modes", "temperatures", "seeds"):
        assert torch.equal(getattr(inputs, name), by_slot[name][slots]), name
    assert torch.equal(inputs.root_positions, positions[rows[cu_rows[:-1]]].int())
    assert torch.equal(paths[:, 0], counts.minimum(by_slot["num_nodes"][slots]).int())
    assert (paths[:, 1:] == UNTOUCHED).all()

    part = inputs.part(slice(1, 3), slice(3, 9))
    assert torch.equal(part.tokens, expected[3:9])
    assert torch.equal(part.positions, inputs.positions[3:9])
    assert torch.equal(part.modes, inputs.modes[1:3])
    assert torch.equal(part.temperatures, inputs.temperatures[1:3])


def test_a_branch_is_matched_in_place_of_its_tree():
    """Not where the step scores none of it; and without Q, so that it is not walked as sampled."""
    counts, modes = [3, 4, 1, 3, 3], [SAMPLED, GREEDY, SAMPLED, SEEDED, SAMPLED]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    slots, rows = torch.tensor([4, 2, 0, 1, 3]), torch.arange(int(starts[-1]))
    by_slot = {
        "num_nodes": [4, 4, 4, 0, 4], "state_rows": [BRANCH, 9, BRANCH, BRANCH, BRANCH],
        "modes": [SAMPLED, SEEDED, GREEDY, SAMPLED, SAMPLED],
    }  # fmt: skip
    assert modes == [by_slot["modes"][slot] for slot in slots.tolist()]
    given = {name: torch.tensor(values, dtype=torch.int32) for name, values in by_slot.items()}
    paths = torch.full((5, 4), UNTOUCHED, dtype=torch.int32)
    row_nodes = torch.cat([torch.arange(count) for count in counts]).int()
    batch = SimpleNamespace(
        logits_indices=rows, expanded_idx_mapping=slots.repeat_interleave(torch.tensor(counts)),
        expanded_local_pos=row_nodes, input_ids=rows.int(), positions=rows, idx_mapping=slots,
        cu_num_logits=starts,
    )  # fmt: skip
    inputs = gather_for_verification(
        batch, **given, temperatures=torch.ones(5), seeds=torch.ones(5, dtype=torch.int64),
        invalid=None, scored=paths[:, 0],
    )  # fmt: skip
    assert inputs.modes.tolist() == [SEEDED, GREEDY, SAMPLED, SEEDED, SAMPLED]
    assert paths[:, 0].tolist() == [BRANCH, BRANCH, 1, 3, 0]
