"""KV cache slots and requests that drafts leave room for: as many as a step's drafts need."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from sequoia_vllm.engine.common import draft_schedule
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.engine.core.scheduling import TreeScheduling
from sequoia_vllm.tree import TokenTree
from tests.support.engines import metric, plain_outputs, running, scheduler_of, sequoia
from tests.support.generating import joined
from tests.support.models import prompts

LARGEST, DEPTH = 15, 4
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
REQUESTS, BLOCK = 6, 32


class InVllmsPlace(Scheduler):
    def schedule(self, throttle_prefills=False):
        """Look-ahead slots, and drafts by the number of requests scheduled."""
        assert throttle_prefills
        lookup, most = self.dynamic_sd_lookup, self.max_num_running_reqs
        drafts = lookup and [lookup[batch] for batch in range(1, most + 1)]
        return SimpleNamespace(
            slots_and_drafts=(self.num_lookahead_tokens, drafts),
            num_scheduled_tokens=dict.fromkeys(self.requests, 1),
            num_spec_tokens_to_schedule=LARGEST,
        )


class TreesOverIt(TreeScheduling, InVllmsPlace):
    pass


def scheduler(lookup, running, waiting, beyond=0):
    """What of vLLM's is read and set; a head that drafts blocks has a slot beyond its drafts."""
    made = object.__new__(TreesOverIt)
    vars(made).update(
        tree=SimpleNamespace(depth=DEPTH),
        adapter=None,
        nobody_drafts=False,
        thinks=False,
        requests={},
        dynamic_sd_lookup=lookup,
        num_spec_tokens=LARGEST,
        num_lookahead_tokens=LARGEST + beyond,
        max_num_running_reqs=len(lookup or [0]) - 1,
        get_request_counts=lambda: (running, waiting),
    )
    return made


def scheduled(of):
    return of.schedule(throttle_prefills=True).slots_and_drafts


@given(
    lookup=st.lists(st.integers(0, LARGEST), min_size=2, max_size=9),
    running=st.integers(0, 8),
    waiting=st.integers(0, 20),
    beyond=st.integers(0, 1),
)
def test_there_are_slots_for_the_drafts_of_any_batch(lookup, running, waiting, beyond):
    """Whatever the table, and however few requests could be scheduled."""
    running = min(running, len(lookup) - 1)
    of = scheduler(lookup, running, waiting, beyond)
    slots, drafts = scheduled(of)
    blocks = DEPTH if beyond else 0  # of some heads, whatever is drafted
    assert all(max(count, blocks) + beyond <= slots for count in drafts if count > 0)
    assert slots <= LARGEST + beyond
    # What is expected to run is not cut.
    largest = min(running + waiting, len(lookup) - 1)
    expected = slice(max(running, 1), largest + 1)
    assert drafts[max(running, 1) - 1 : largest] == lookup[expected]
    assert (of.dynamic_sd_lookup, of.num_lookahead_tokens) == (lookup, LARGEST + beyond)


def test_large_batches_reserve_little():
    lookup = [0, *[LARGEST] * 4, *[3] * 12]
    assert scheduled(scheduler(lookup, running=16, waiting=0))[0] == 3
    assert scheduled(scheduler(lookup, running=5, waiting=9))[0] == 3
    assert scheduled(scheduler(lookup, running=0, waiting=9))[0] == LARGEST
    assert scheduled(scheduler(lookup, running=16, waiting=0, beyond=1))[0] == DEPTH + 1


@pytest.mark.parametrize("undrafted", [{"extra_args": {MOST_DRAFTS: 0}}, {"max_tokens": 2}])
def test_a_step_of_requests_that_never_draft_is_one_without_drafts(undrafted):
    of = scheduler([0, 9, 9, 9], running=2, waiting=0)
    of.requests["a"] = SimpleNamespace(sampling_params=SamplingParams(**undrafted))
    found = of.schedule(throttle_prefills=True)
    assert found.num_spec_tokens_to_schedule == 0
    of.requests["b"] = SimpleNamespace(sampling_params=GREEDY)
    found = of.schedule(throttle_prefills=True)
    assert found.num_spec_tokens_to_schedule == LARGEST


def test_a_step_that_fails_leaves_the_scheduler_as_it_was():
    of = scheduler([0, 9, 3], running=2, waiting=0)
    with pytest.raises(AssertionError):
        of.schedule(throttle_prefills=False)
    assert (of.dynamic_sd_lookup, of.num_lookahead_tokens) == ([0, 9, 3], LARGEST)


def test_without_a_schedule_slots_are_vllms():
    assert scheduled(scheduler(None, running=2, waiting=0)) == (LARGEST, None)


def serve_one_after_another(llm, texts) -> tuple[list[list[int]], dict[str, list[tuple[int, int]]]]:
    """A request more in every step.

    Returns:
        Tokens of each request; and of each, for every step that scheduled it, how many ran before
        it, and how many blocks it held beyond those of its tokens of the step.
    """
    scheduler, reserved = scheduler_of(llm), {}
    manager = scheduler.kv_cache_manager
    original = manager.allocate_slots

    def allocate_slots(request, new, *args, **kwargs):
        ran = len(scheduler.running)
        allocated = original(request, new, *args, **kwargs)
        [held] = manager.get_block_ids(request.request_id)
        needed = -(-(request.num_computed_tokens + new) // BLOCK)
        name, _, _ = request.request_id.partition("-")
        reserved.setdefault(name, []).append((ran, len(held) - needed))
        return allocated

    with patched(manager, "allocate_slots", allocate_slots):
        tokens = joined(llm, texts, [GREEDY] * len(texts), every=1)
    return [one for [one] in tokens], reserved


@pytest.mark.engine
def test_an_engine_holds_no_blocks_for_drafts_that_it_does_not_schedule():
    """From four requests on nothing is drafted; a tree of 64 nodes takes two blocks or three."""
    schedule = [[1, 1, 63], [2, 3, 3], [4, REQUESTS, 0]]
    config = sequoia(64, 6, num_speculative_tokens_per_batch_size=schedule)
    texts = prompts(REQUESTS)
    with running(config, block_size=BLOCK, enable_prefix_caching=False) as llm:
        found, reserved = serve_one_after_another(llm, texts)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0
    assert found == plain_outputs(texts, GREEDY)
    assert max(extra for _, extra in reserved["0"]) >= 2
    for name in ("4", "5"):
        crowded = [extra for ran, extra in reserved[name] if ran >= 4]
        assert len(crowded) > 20
        assert set(crowded) == {0}


WAITING = 8
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
# Prompts are read in pieces, and 4 trees of 16 nodes take all of a step.
LIMITS = {"max_num_batched_tokens": 64, "max_num_seqs": WAITING}


def run(config) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Tokens of each request, and the step in which it had its first."""
    with running(config, **LIMITS) as llm:
        engine, tokens, first = llm.llm_engine, {}, {}
        for place, text in enumerate(prompts(WAITING)):
            engine.add_request(str(place), text, LONG)
        step = 0
        while engine.has_unfinished_requests():
            step += 1
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                first.setdefault(output.request_id, step)
    return tokens, first


@pytest.mark.engine
def test_prompts_are_read_while_others_decode():
    """They are read as soon as by plain vLLM, but for the half of each step that trees may take."""
    expected, plain = run(None)
    found, trees = run(sequoia())
    assert found == expected
    assert max(trees.values()) <= 2 * max(plain.values())


# -- however many slots vLLM sets aside for heads that draft blocks --------------------------


BUDGET, NODES = 8192, 128
SETTINGS = SequoiaSettings(TokenTree.chain(4), "a test", None, {})


def config(active=None, ours=True):
    speculative = SimpleNamespace()
    if ours:
        SETTINGS.store(speculative)
    return SimpleNamespace(
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(max_num_active_seqs=active, max_num_seqs=1024),
    )


@pytest.fixture
def lowering():
    """What vLLM 0.33 does, and whether it would have warned of it."""

    def lower(of):
        scheduler = of.scheduler_config
        active = scheduler.max_num_active_seqs or scheduler.max_num_seqs
        if active > BUDGET // NODES:
            lower.warned = True
            scheduler.max_num_active_seqs = BUDGET // NODES

    lower.warned = False
    return lower


@pytest.mark.parametrize("users", [None, 400, 8])
def test_users_decide_how_many_requests_run(users, lowering):
    of = config(users)
    draft_schedule.check_budget(lowering, of)
    assert of.scheduler_config.max_num_active_seqs == users
    assert not lowering.warned


def test_other_engines_are_left_alone(lowering):
    of = config(ours=False)
    draft_schedule.check_budget(lowering, of)
    assert of.scheduler_config.max_num_active_seqs == 64


def test_a_budget_that_vllm_refuses_leaves_the_users_number():
    def refuse(_):
        raise ValueError("too few")

    of = config(400)
    with pytest.raises(ValueError, match="too few"):
        draft_schedule.check_budget(refuse, of)
    assert of.scheduler_config.max_num_active_seqs == 400


@pytest.mark.parametrize(
    ("kind", "slots"), [("dflash", 0), ("dspark", 0), ("model", 127), (None, 127)]
)
def test_blocks_take_no_rows_of_the_targets_batch(kind, slots):
    of = SimpleNamespace()
    if kind:
        replace(SETTINGS, drafter=kind).store(of)
    assert draft_schedule.drafting_slots(lambda _: 127, of) == slots
