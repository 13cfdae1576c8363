"""What the engine core tells its controller of a step, as vLLM's scheduler describes it."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from sequoia_vllm.adaptation.controller import DraftController
from sequoia_vllm.engine.core import adapting
from sequoia_vllm.engine.core.adapting import SchedulerAdapter
from sequoia_vllm.tree import TokenTree


class Told(DraftController):
    """Keeps the steps that it is told of."""

    def __init__(self) -> None:
        super().__init__(TokenTree.chain(3), [3] * 9, [3] * 9, [3, 1])
        self.steps = []

    def observe(self, step) -> None:
        self.steps.append(step)


@pytest.fixture
def told(monkeypatch, tmp_path):
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path))
    return Told()


def step_of(new=(), cached=(), drafts=3, preempted=()) -> SchedulerOutput:
    """``new`` and ``cached``: (request, tokens scheduled, drafts among them, tokens computed)."""
    output = SchedulerOutput.make_empty()
    output.num_spec_tokens_to_schedule = drafts
    output.num_scheduled_tokens = {name: tokens for name, tokens, _, _ in (*new, *cached)}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.scheduled_spec_decode_tokens = {n: [-1] * d for n, _, d, _ in cached if d}
    requests = CachedRequestData.make_empty()
    requests.req_ids = [name for name, *_ in cached]
    requests.num_computed_tokens = [computed for *_, computed in cached]
    output.scheduled_cached_reqs = requests
    greedy = SamplingParams(temperature=0)
    output.scheduled_new_reqs = [
        NewRequestData(name, None, [], greedy, None, ([],), computed, None)
        for name, _, _, computed in new
    ]
    output.preempted_req_ids = set(preempted)
    return output


def test_steps_are_told_with_their_prompts_contexts_and_preemptions(told):
    adapter = SchedulerAdapter(told, "a-pair", keeps=False)
    adapter.before_step(0.75, set())
    adapter.follow(step_of(new=[("a", 100, 0, 0)]), b"", 0, 1.0, is_busy=True)
    adapter.before_step(1.25, set())  # within the step
    adapter.follow(step_of(cached=[("a", 4, 3, 100)]), b"", 2, 1.5, is_busy=True)
    mixed = step_of(new=[("b", 50, 0, 16)], cached=[("a", 4, 3, 103)], preempted=["c"])
    adapter.follow(mixed, b"", 1, 1.75, is_busy=False)
    adapter.before_step(8.0, set())
    changed = step_of(cached=[("a", 4, 3, 105), ("b", 1, 0, 66)], drafts=1)
    adapter.follow(changed, b"", 0, 9.0, is_busy=True)
    first, alone, mixed, changed = told.steps
    assert (first.drafts, first.seconds, first.prompts, first.context) == (None, 0.25, 99, 0)
    assert (alone.drafts, alone.seconds, alone.prompts, alone.context) == (3, 0.5, 0, 100)
    assert (mixed.drafts, mixed.seconds, mixed.prompts, mixed.context) == (3, 0.25, 49, 119)
    assert [step.preempted for step in told.steps] == [0, 0, 1, 0]
    assert (changed.drafts, changed.seconds, changed.prompts) == (None, 1.0, 0)
    assert [step.gained for step in told.steps] == [0, 2, 1, 0]
    assert changed.workload == "greedy"


def test_requests_that_a_user_reset_were_not_preempted(told):
    """Drafts that took too much memory are fewer for a while; a reset says nothing of memory."""
    adapter = SchedulerAdapter(told, "a-pair", keeps=False)
    adapter.before_step(1.0, {"a", "b"})
    adapter.follow(step_of(cached=[("c", 4, 3, 9)], preempted=["a", "b", "d"]), b"", 0, 1.5, True)
    adapter.before_step(1.5, set())
    adapter.follow(step_of(cached=[("c", 4, 3, 9)], preempted=["a"]), b"", 0, 2.0, True)
    assert [step.preempted for step in told.steps] == [1, 1]


@pytest.mark.parametrize(
    ("scheduled", "measured", "has_room", "begins"),
    [
        pytest.param([15] * 8, False, False, [5, 2, 1, 1, 1, 1, 1, 1], id="nothing is known"),
        pytest.param([15] * 8, True, False, [15, 15, 7, 7, 5, 3, 3, 3], id="measured, too large"),
        pytest.param(
            [5, 3, 2, 2, 1, 1, 0, 0], True, False, [5, 3, 2, 2, 1, 1, 0, 0], id="measured"
        ),
        pytest.param([15] * 8, True, True, [15] * 8, id="whole trees are free"),
    ],
)
def test_larger_batches_begin_with_twice_the_nodes_of_one_request(
    monkeypatch, tmp_path, scheduled, measured, has_room, begins
):
    """However many were measured to pay there: the load may be another."""
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(tmp_path))
    settings = SimpleNamespace(
        tree=TokenTree.chain(15), chosen_for="cpu" if measured else None, adapts_as="p", keeps=False
    )
    known = SimpleNamespace(of=lambda _: settings)
    monkeypatch.setattr(adapting, "SequoiaSettings", known)
    monkeypatch.setattr(adapting, "most_drafts", lambda _: [15] * 8)
    monkeypatch.setattr(adapting, "fewer_drafts", lambda _: [15, 11, 7, 5, 3, 2, 1])
    monkeypatch.setattr(adapting, "is_offloaded", lambda _: has_room)
    config = SimpleNamespace(use_v2_model_runner=False)
    adapter = adapting.new_adapter(config, [15, *scheduled])
    assert adapter.controller.lookup[1:] == begins
