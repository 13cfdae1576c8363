"""Which blocks the draft has filled, and where requests that share them begin to read."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sequoia_vllm.engine.runner.draft_blocks import DraftBlocks
from sequoia_vllm.engine.v2.drafting import draft_progress
from tests.support.prefix_cache import BLOCK, DEPTH, DRAFTS, SLOTS, Engine, Request, Scheduled

DEPTHS = [min(drafts, DEPTH) for drafts in range(DRAFTS + 1)]


def test_blocks_are_filled_when_all_of_them_is_read():
    blocks = DraftBlocks({0: 4})
    blocks.start("first", [[7, 8, 9]], 0)
    blocks.read("first", 0, 6)
    blocks.start("second", [[7, 8, 5]], 8)
    assert blocks.filled_tokens("second", 8) == 4
    blocks.read("first", 6, 9)
    assert blocks.filled_tokens("second", 8) == 8
    assert blocks.filled_tokens("second", 4) == 4


def test_blocks_that_are_given_out_anew_hold_nothing():
    blocks = DraftBlocks({0: 4})
    blocks.start("first", [[7, 8]], 0)
    blocks.read("first", 0, 8)
    blocks.forget("first")
    blocks.start("second", [[7, 8]], 4)  # finds the first of them, gets the other anew
    assert blocks.filled_tokens("second", 8) == 4
    blocks.extend("second", [[9]])
    blocks.read("second", 4, 12)
    blocks.start("third", [[7, 8, 9]], 12)
    assert blocks.filled_tokens("third", 12) == 12
    blocks.extend("third", [[8]])  # as if it had been evicted meanwhile
    assert blocks.filled_tokens("third", 12) == 4


def test_every_group_with_layers_of_the_draft_counts():
    blocks = DraftBlocks({1: 4, 2: 8})
    assert blocks.step == 4
    blocks.start("first", [[1], [2, 3, 4, 5], [6, 7]], 0)
    blocks.read("first", 0, 12)
    blocks.start("second", [[1], [2, 3, 4, 5], [6, 7]], 16)
    assert blocks.filled_tokens("second", 16) == 8  # of group 1 it would be 12


def test_null_blocks_before_a_window_count_as_filled():
    """vLLM puts its first block in their place; whatever happens, nobody has to fill it."""
    blocks = DraftBlocks({0: 4, 1: 4})
    blocks.start("first", [[1, 2, 3], [4, 5, 6]], 0)
    blocks.read("first", 0, 12)
    blocks.start("second", [[1, 2, 3], [0, 0, 6]], 12)
    assert blocks.filled_tokens("second", 12) == 12
    blocks.extend("second", [[7], [0]])
    blocks.start("third", [[1, 2, 3, 8], [0, 0, 0, 9]], 0)
    assert blocks.filled_tokens("third", 16) == 0  # its blocks are new, but for those
    blocks.start("fourth", [[1, 2, 3], [0, 0, 6]], 12)
    assert blocks.filled_tokens("fourth", 12) == 0
    blocks.read("fourth", 0, 12)
    assert blocks.filled_tokens("second", 12) == 12


# -- V2, against an engine that knows what the draft's cache holds. (V1: test_cache_contents.py)


class Staged:
    """vLLM's `StagedWriteTensor`, whose writes are a Triton kernel's."""

    def __init__(self, size, dtype, device, max_concurrency):
        self.gpu = torch.full((size,), 99, dtype=dtype, device=device)
        self.staged = []

    def stage_write_elem(self, index, value):
        self.staged.append((index, value))

    def apply_write(self):
        assert len({index for index, _ in self.staged}) == len(self.staged)  # they race
        for index, value in self.staged:
            self.gpu[index] = value
        self.staged.clear()


class V2Reader:
    """`ModelDraftProgress` among requests of an `Engine` whose outcomes are known a step late."""

    def __init__(self):
        self.progress = draft_progress.ModelDraftProgress(
            SLOTS, DEPTHS, unknown_drafts=DRAFTS, device=torch.device("cpu")
        )
        self.progress.use_cache({0: BLOCK})

    def start(self, request):
        self.progress.start(request.slot, request.computed, [request.blocks])

    def extend(self, request, blocks):
        self.progress.extend(request.slot, [blocks])

    def finish(self, request):
        pass

    def read(self, batch, drafting, budget):
        slots = np.array([scheduled.request.slot for scheduled in batch], dtype=np.intp)
        computed = [s.computed + s.rejected_before for s in batch]
        step = SimpleNamespace(
            idx_mapping_np=slots,
            num_computed_tokens_np=np.array(computed, dtype=np.int32),
            num_scheduled_tokens=np.array([s.num_scheduled for s in batch], dtype=np.int32),
            num_draft_tokens_per_req=np.array([s.drafts for s in batch], dtype=np.int32),
            is_prefilling_np=np.array([s.prefilling for s in batch], dtype=bool),
        )
        self.progress.gain(step)
        if not (batch and drafting):
            return {}
        committed = self.progress.committed_at_least(slots)
        for scheduled, at_least in zip(batch, committed.tolist(), strict=True):
            if scheduled.sampled:
                assert at_least <= scheduled.request.computed + 1
        reading = np.array([scheduled.request.most for scheduled in batch]) >= committed
        most = self.progress.most_unread(slots[reading])
        bounds = self.progress.take_bounds(slots, reading, budget)
        assert bounds.sum() <= budget
        assert bounds.max() <= most
        assert not bounds[~reading].any()
        reads = {}
        for scheduled, bound in zip(batch, bounds.tolist(), strict=True):
            # As `kernels.begin_drafting` does it.
            request = scheduled.request
            start = int(self.progress.read[request.slot])
            end = request.computed + bool(scheduled.sampled)
            count = max(min(end - start, bound), 0)
            self.progress.read[request.slot] = start + count
            drafts = bool(scheduled.sampled) and start + count == end
            if count > 0 or drafts:
                reads[request.name] = (start, start + count)
        return reads


def starting(name, prompt, cached, blocks, slot):
    """A request whose whole prompt runs in this step, which samples a token."""
    tokens = list(range(prompt))
    request = Request(name, [*tokens, 0], prompt, slot, blocks, cached)
    return request, Scheduled(request, cached, 0, True, 0, [0])


@pytest.fixture(autouse=True, scope="module")
def no_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_progress, "StagedWriteTensor", Staged)
        yield


@pytest.mark.parametrize("budget", [40, 12, 8])
def test_a_prompt_that_two_requests_share_is_read_once(budget):
    """The second finds blocks that the first gets, computes and fills in the same step."""
    reader = V2Reader()
    both = [starting("a", 9, 0, [1, 2, 3], 1), starting("b", 10, 8, [1, 2, 4], 0)]
    for request, _ in both:
        reader.start(request)
        request.computed = request.prompt
    first = reader.read([scheduled for _, scheduled in reversed(both)], True, budget)
    assert (
        first
        == {
            40: {"a": (0, 10), "b": (8, 11)},
            12: {"a": (0, 10), "b": (8, 10)},
            8: {"a": (0, 8)},  # and the other waits, with nothing to start from
        }[budget]
    )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_pass_attends_to_keys_that_were_not_written(seed):
    engine = Engine(Random(seed), V2Reader())
    for _ in range(40):
        engine.step()


def test_requests_that_can_use_no_tree_are_not_read():
    """What they leave in the prefix cache is read for the first that drafts."""
    reader = V2Reader()
    undrafted, scheduled = starting("a", 9, 0, [1, 2, 3], 1)
    drafted, later = starting("b", 10, 8, [1, 2, 4], 0)
    undrafted.most = 0
    found = []
    for request, step in ((undrafted, scheduled), (drafted, later)):
        reader.start(request)
        request.computed = request.prompt
        found.append(reader.read([step], True, 40))
    assert found == [{}, {"b": (0, 11)}]
