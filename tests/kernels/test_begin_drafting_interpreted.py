"""The start of a drafting pass against a plain loop over the batch."""

from types import SimpleNamespace

import pytest
import torch

from sequoia_vllm.drafting.draft_batch import DraftBatch, SlotStates
from sequoia_vllm.kernels.begin_drafting import find_continuations
from sequoia_vllm.kernels.modes import GREEDY, SAMPLED, SEEDED, SKIP
from sequoia_vllm.kernels.predictions import new_record

UNTOUCHED = -99
TREE_SIZE, INNER_NODES, LONGEST, MAX_TREES = 12, 5, 40, 6
# By request: slot, tokens in the cache, sampled, read, bound, mode.
BATCH = [
    (4, 20, 3, 18, 3, GREEDY),  # reads all: 18, 19 and the token at 20
    (0, 16, 0, 0, 16, GREEDY),  # a part of a prompt: nothing sampled, no tree
    (7, 30, 1, 10, 8, SAMPLED),  # more than its bound: no tree yet
    (2, 9, 1, 9, 4, SKIP),  # reads, but never drafts
    (5, 39, 2, 39, 2, SEEDED),  # its root is the last position with a tree
    (1, 40, 1, 40, 2, SEEDED),  # ... and past it
    (8, 5, 1, 5, 1, GREEDY),  # in a row without room for a tree
    (3, 0, 0, 0, 0, GREEDY),  # nothing at all
    (6, 7, 0, 9, 4, GREEDY),  # has read more than there is
]
SLOTS, ROWS = 11, 12


def given(batch, slots):
    by_slot = {
        "computed": torch.full((slots,), 1000, dtype=torch.int32),
        "modes": torch.full((slots,), GREEDY, dtype=torch.int32),
        "most_nodes": torch.full((slots,), 2**31 - 1, dtype=torch.int32),
        "read": torch.full((slots,), UNTOUCHED, dtype=torch.int32),
        "drafted_nodes": torch.full((slots,), TREE_SIZE, dtype=torch.int32),  # of the last step
        "drafted_rows": torch.full((slots,), UNTOUCHED, dtype=torch.int32),
        "temperature": torch.arange(slots).float() / 8,
        "top_k": torch.arange(slots, dtype=torch.int32) + 5,
        "top_p": torch.arange(slots).float() / 16,
        "min_p": torch.arange(slots).float() / 32,
        "seeds": torch.arange(slots) * 10**12,
    }
    for slot, computed, _, read, _, mode in batch:
        by_slot["computed"][slot], by_slot["read"][slot] = computed, read
        by_slot["modes"][slot] = mode
    by_request = {
        name: torch.tensor([request[column] for request in batch], dtype=torch.int32)
        for name, column in {"requests": 0, "num_sampled": 2, "bounds": 4}.items()
    }
    # Of the target's pass: as many tokens before it as the request's slot, and a row more for each.
    rows = torch.tensor([1 + place for place in range(len(batch))], dtype=torch.int32)
    slots_of = by_request.pop("requests")
    by_request["batch"] = SimpleNamespace(
        idx_mapping=slots_of,
        seq_lens=slots_of + rows,
        query_start_loc=torch.nn.functional.pad(rows.cumsum(0).int(), (1, 0)),
    )
    return SlotStates(**by_slot), by_request


WRITTEN = (
    "slots", "starts", "counts", "first_rows", "last_rows", "computed_before", "roots", "contexts",
    "modes", "temperature", "top_k", "top_p", "min_p", "seeds",
)  # fmt: skip


def check(batch, slots, rows, most_nodes=None, state_offset=0):
    taken = DraftBatch(rows, torch.device("cpu"), state_offset=state_offset)
    for name in WRITTEN:
        getattr(taken, name).fill_(UNTOUCHED)
    states, arguments = given(batch, slots)
    for slot, most in (most_nodes or {}).items():
        states.most_nodes[slot] = most
    levels = SimpleNamespace(tree=SimpleNamespace(size=TREE_SIZE), rows_per_tree=INNER_NODES)
    taken.begin(**arguments, states=states, levels=levels, longest=LONGEST, max_trees=MAX_TREES)
    out = {name: getattr(taken, name) for name in WRITTEN}
    trees, first_row = {}, 0
    for row, (slot, computed, sampled, read, bound, mode) in enumerate(batch):
        end = computed + (sampled > 0)
        readable = computed if state_offset else end
        count = max(min(readable - read, bound), 0)
        found = [out[name][row].item() for name in ("slots", "starts", "counts", "roots", "modes")]
        assert found == [slot, read, count, max(end - 1, 0), mode]
        assert out["first_rows"][row] == first_row
        first_row += count
        assert out["first_rows"][row + 1] == first_row
        assert out["last_rows"][row] == max(first_row - 1, 0)
        assert out["computed_before"][row] == slot
        assert out["contexts"][row] == max(end - 1 - state_offset * (sampled > 0), 0)
        assert out["temperature"][row] == slot / 8
        assert (out["top_k"][row], out["top_p"][row]) == (slot + 5, slot / 16)
        assert out["min_p"][row] == slot / 32
        assert out["seeds"][row] == slot * 10**12
        assert states.read[slot] == read + count
        assert states.drafted_rows[slot] == row * INNER_NODES
        complete = read + count == readable and sampled > 0
        if complete and mode != SKIP and end - 1 < LONGEST and row < MAX_TREES:
            trees[slot] = min(TREE_SIZE, (most_nodes or {}).get(slot, TREE_SIZE))
    assert states.drafted_nodes.tolist() == [trees.get(slot, 0) for slot in range(slots)]
    others = sorted(set(range(slots)) - {request[0] for request in batch})
    assert (states.read[others] == UNTOUCHED).all()
    assert (states.drafted_rows[others] == UNTOUCHED).all()
    padding = slice(len(batch), None)
    assert (out["slots"][padding] == -1).all()
    assert (out["modes"][padding] == SKIP).all()
    zeros = ("starts", "counts", "roots", "computed_before")
    assert not any(out[name][padding].any() for name in zeros)
    assert (out["first_rows"][len(batch) :] == first_row).all()
    assert (out["last_rows"][padding] == max(first_row - 1, 0)).all()
    return trees


@pytest.mark.parametrize("state_offset", [0, 1])
def test_graphs_find_padding_in_a_new_batch(state_offset, bfloat16_by_default):
    taken = DraftBatch(2, torch.device("cpu"), state_offset, depth=3)
    integers, most = dict.fromkeys(WRITTEN, (torch.int32, 0)), torch.iinfo(torch.int32).max
    values = integers | {
        "slots": (torch.int64, -1), "last_rows": (torch.int64, 0), "seeds": (torch.int64, 0),
        "modes": (torch.int32, SKIP), "top_k": (torch.int32, most),
        "temperature": (torch.float32, 0), "top_p": (torch.float32, 1), "min_p": (torch.float32, 0),
    }  # fmt: skip
    for name, (dtype, value) in values.items():
        assert getattr(taken, name).dtype == dtype, name
        assert getattr(taken, name).tolist() == [value] * (3 if name == "first_rows" else 2), name
    assert (taken.contexts is taken.roots) == (state_offset == 0)
    assert taken.told.tolist() == [[-1] * 3] * 2
    assert taken.multiples(2).dtype == torch.int32
    assert taken.multiples(2).tolist() == [0, 2, 4]


@pytest.mark.parametrize("rows", [len(BATCH), ROWS])
def test_a_batch(rows):
    assert set(check(BATCH, SLOTS, rows)) == {4, 5}


def test_a_draft_that_lags_behind_needs_not_read_the_root():
    # Their tokens in the cache are all they read; what was sampled last, they read along.
    assert set(check(BATCH, SLOTS, ROWS, state_offset=1)) == {4, 5}
    assert set(
        check([(4, 20, 1, 18, 2, GREEDY), (0, 20, 0, 18, 2, GREEDY)], 6, 4, state_offset=1)
    ) == {4}


def test_a_request_may_cap_its_tree():
    capped = {4: 3, 5: TREE_SIZE + 1, 8: 2}
    assert check(BATCH, SLOTS, ROWS, capped) == {4: 3, 5: TREE_SIZE}


@pytest.mark.parametrize("requests", [150, 512, 700])
def test_rows_go_on_where_the_program_takes_the_next_requests(requests):
    batch = [(799 - row, row % 50, row % 3, row % 7, 4, row % 4 - 1) for row in range(requests)]
    assert check(batch, 800, 800)


def test_without_requests_all_is_padding():
    assert check([], 3, 4) == {}


# By request: prompt, output, prediction (None: there is none), what is told.
TOLD = {
    "a longer match of its own": ([5, 6, 7, 8, 9, 5, 6], [7], [7, 1, 2], [8, 9, 5]),
    "an equal one": ([6, 7, 8, 9, 6], [7], [7, 1, 2], [1, 2, -1]),
    "none of its own": ([6, 8], [7], [7, 1, 2, 4, 4], [1, 2, 4]),
    "a replaced token": ([6, 8], [7], [3, 1, 2], [1, 2, -1]),
    "one that its own text has": ([6, 7, 8, 9, 6], [7], [3, 1, 2], [8, 9, 6]),
    "a part of a prompt": ([6, 7, 8, 6, 7, 4], [], [3, 1, 2], [8, 6, 7]),
    "its end": ([6, 8], [7, 1], [7, 1], [-1, -1, -1]),
    "no prediction": ([6, 7, 8, 6], [7], None, [8, 6, 7]),
    "longer matches than count": (
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8],
        [3, 1, 2, 3, 4, 5, 6, 7, 8, 5], [5, -1, -1],
    ),
}  # fmt: skip


def test_the_longest_match_tells_and_of_equal_ones_the_predictions():
    length, cases = 20, list(TOLD.values())
    texts = torch.full((len(cases), length), 7, dtype=torch.int32)
    records, roots, addresses = [], [], torch.zeros(len(cases), dtype=torch.int64)
    for slot, (prompt, output, prediction, _) in enumerate(cases):
        end = len(prompt + output) - (not output)  # its last token is not read yet
        texts[slot, : len(prompt + output)] = torch.tensor(prompt + output)
        roots.append(end - 1)
        if prediction is not None:
            records.append(torch.from_numpy(new_record(prediction, len(prompt))))
            addresses[slot] = records[-1].data_ptr()
    slots, told = torch.arange(len(cases)), torch.full((len(cases), 3), -9)
    roots = torch.tensor(roots, dtype=torch.int32)
    branches = torch.full((len(cases),), -9, dtype=torch.int32)
    find_continuations(texts, slots, roots, told, branches, addresses, window=length)
    assert not branches.any()  # too few tokens match
    assert dict(zip(TOLD, told.tolist(), strict=True)) == {k: case[3] for k, case in TOLD.items()}
