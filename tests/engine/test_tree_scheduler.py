"""Which requests the scheduler of Model Runner V2 leaves without drafts."""

import pickle
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager

from sequoia_vllm import plugin
from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine import hooks
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.common.step_messages import is_loaded
from sequoia_vllm.engine.core import scheduling_ahead as scheduling
from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.engine.core.scheduling import TreeScheduling
from sequoia_vllm.engine.core.scheduling_ahead import TreeSchedulingAhead
from sequoia_vllm.engine.frontend import engine_config
from sequoia_vllm.tree import TokenTree
from tests.support import processors
from tests.support.engines import configured, generated, metric, plain_outputs, running, sequoia
from tests.support.models import prompts

DRAFTS = 3
GREEDY = SamplingParams(temperature=0)
UNDRAFTED = SamplingParams(extra_args={MOST_DRAFTS: 0})
# Of a backend that cannot follow trees.
GRAMMAR = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))


@pytest.fixture
def scheduler(monkeypatch):
    """Without an engine: all that is replaced of vLLM's gives every request its placeholders."""

    def init(self, processors=None, **more):
        speculative_config = SimpleNamespace()
        tree = TokenTree.chain(DRAFTS)
        SequoiaSettings(tree, "given", None, {}, **more).store(speculative_config)
        self.vllm_config = SimpleNamespace(
            speculative_config=speculative_config,
            scheduler_config=SimpleNamespace(async_scheduling=True),
            model_config=SimpleNamespace(logits_processors=processors),
            structured_outputs_config=SimpleNamespace(reasoning_parser=None),
            use_v2_model_runner=False,
        )
        self.requests, self.dynamic_sd_lookup = {}, None
        self.structured_output_manager = SimpleNamespace(vllm_config=self.vllm_config)

    def update(self, output):
        for name in output.num_scheduled_tokens:
            drafts = [-1] * output.num_spec_tokens_to_schedule
            self.requests[name].spec_token_ids = drafts

    monkeypatch.setattr(AsyncScheduler, "__init__", init)
    monkeypatch.setattr(AsyncScheduler, "_update_after_schedule", update)
    return TreeSchedulingAhead()


def step(scheduler, requests, new=True, finished=()) -> dict[str, int]:
    """Drafts of each request after a step with these."""
    for name in requests:
        scheduler.requests.setdefault(name, SimpleNamespace(spec_token_ids=[]))
    scheduler._update_after_schedule(
        SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(requests, 1),
            num_spec_tokens_to_schedule=DRAFTS,
            has_sync_kv_loads=False,
            finished_req_ids=set(finished),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, sampling_params=params)
                for name, params in (requests.items() if new else ())
            ],
        )
    )
    return {name: len(scheduler.requests[name].spec_token_ids) for name in requests}


def test_workers_hear_what_requests_begin_on_loaded_keys(scheduler, monkeypatch):
    """Whether they waited for them, or run as soon as they are loaded."""
    monkeypatch.setattr(AsyncScheduler, "_update_waiting_for_remote_kv", lambda *_: None)
    scheduler.requests = {name: SimpleNamespace() for name in "abc"}
    for name in "ad":  # the second has been aborted
        scheduler._update_waiting_for_remote_kv(SimpleNamespace(request_id=name))

    def loaded(names: str, waits: bool = True) -> str:
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(names, 1), has_sync_kv_loads=not waits,
            num_spec_tokens_to_schedule=DRAFTS, finished_req_ids=set(), scheduled_new_reqs=[],
        )  # fmt: skip
        scheduler._update_after_schedule(output)
        return "".join(name for name in names if is_loaded(output, name))

    assert [loaded("b"), loaded("ab"), loaded("ab"), scheduler.loaded] == ["", "a", "", set()]
    assert [loaded("c", waits=False), loaded("c")] == ["c", ""]


def test_drafts_stay_a_branch_while_their_request_waits(scheduler):
    scheduler.requests, grammars = dict.fromkeys("abc"), scheduler.structured_output_manager
    scheduler._note_branches(["a", "b"], frozenset("ab"))
    assert grammars.branches == {"a", "b"}
    scheduler._note_branches(["b", "c"], frozenset())
    assert grammars.branches == {"a"}
    del scheduler.requests["a"]
    scheduler._note_branches(["c"], frozenset("c"))
    assert grammars.branches == {"c"}


def test_each_request_is_asked_once(scheduler, monkeypatch):
    asked = []
    plain = scheduling.reason_without_drafts
    monkeypatch.setattr(
        scheduling, "reason_without_drafts", lambda p, *how: asked.append(p) or plain(p, *how)
    )
    requests = {"a": GREEDY, "b": GRAMMAR, "c": GREEDY}
    first = step(scheduler, requests)
    assert first == {"a": DRAFTS, "b": 0, "c": DRAFTS}
    assert step(scheduler, requests, new=False) == first
    assert len(asked) == 3


def test_finished_requests_are_forgotten(scheduler):
    step(scheduler, {"a": GRAMMAR, "b": GRAMMAR, "c": GREEDY})
    assert step(scheduler, {"c": GREEDY}, new=False, finished=["a", "b"]) == {"c": DRAFTS}
    assert scheduler.without_drafts == {}
    step(scheduler, {"a": GRAMMAR, "c": GREEDY})
    assert step(scheduler, {"a": GREEDY, "c": GREEDY}, finished=["a"])["a"] == DRAFTS


def test_one_request_without_drafts_keeps_the_batch_uniform(scheduler):
    """It is scored with placeholders; alone, or as one of many, it is not."""
    assert step(scheduler, {"a": UNDRAFTED, "b": GREEDY}) == {"a": DRAFTS, "b": DRAFTS}
    assert step(scheduler, {"a": UNDRAFTED}, new=False) == {"a": 0}
    many = {str(index): UNDRAFTED if index < 2 else GREEDY for index in range(16)}
    assert set(step(scheduler, many).values()) == {DRAFTS}
    more = {str(index): UNDRAFTED if index < 3 else GREEDY for index in range(16)}
    assert sorted(step(scheduler, more).values()) == [0] * 3 + [DRAFTS] * 13


def test_a_grammar_follows_no_placeholders(scheduler):
    assert step(scheduler, {"a": GRAMMAR, "b": GREEDY}) == {"a": 0, "b": DRAFTS}
    both = {"a": GRAMMAR, **{str(index): GREEDY for index in range(20)}, "b": UNDRAFTED}
    found = step(scheduler, both)
    assert (found["a"], found["b"], found["1"]) == (0, 0, DRAFTS)


def test_requests_with_a_thinking_budget_draft(scheduler):
    """A budget of 0 is one: no token of thinking."""
    for budget in (0, 7):
        thinking = SamplingParams(thinking_token_budget=budget)
        assert step(scheduler, {"a": thinking, "b": GREEDY}) == {"a": DRAFTS, "b": DRAFTS}


def test_zeros_that_ask_for_nothing_special_draft(scheduler):
    zeros = {"temperature": 0, "seed": 0, "top_k": 0, "min_p": 0, "min_tokens": 0,
        "logprobs": 0, "prompt_logprobs": 0, "logprob_token_ids": [], "stop": [], "bad_words": [],
        "logit_bias": {}, "extra_args": {}, "thinking_token_budget": -1}  # fmt: skip
    requests = {name: SamplingParams(**{name: value}) for name, value in zeros.items()}
    assert step(scheduler, requests) == dict.fromkeys(zeros, DRAFTS)


def test_nobody_drafts_beside_processors_that_cannot_run_on_trees(scheduler):
    ours = TreeSchedulingAhead(processors=[processors.EvenTokensOnly])
    assert step(ours, {"a": GREEDY, "b": UNDRAFTED}) == {"a": 0, "b": 0}
    ours = TreeSchedulingAhead(processors=[processors.WithoutLast])
    assert step(ours, {"a": GREEDY, "b": UNDRAFTED}) == {"a": DRAFTS, "b": DRAFTS}


@pytest.mark.parametrize(("kind", "asked"), [("model", True), ("lookup", False), ("eagle3", False)])
def test_a_draft_model_alone_reads_in_every_step(scheduler, kind, asked):
    """Others have nothing to do where steps only read prompts: newer versions may skip them."""
    ours = TreeSchedulingAhead(drafter=kind)
    assert (vars(ours).get("can_skip_drafts") is False) == asked


class Users(Scheduler):
    """A user's own, which counts steps."""

    steps = 0

    def schedule(self, *args, **kwargs):
        Users.steps += 1
        return super().schedule(*args, **kwargs)


@pytest.mark.engine
def test_a_users_scheduler_comes_behind_ours():
    texts, params = prompts(2), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with running(sequoia(), scheduler_cls=Users) as llm:
        found = generated(llm, texts, params)
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert found == plain_outputs(texts, params)
    assert Users.steps > 0
    assert list(type(scheduler).__mro__[1:4]) == [TreeScheduling, Users, Scheduler]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("users", [None, Users, f"{__name__}.Users", AsyncScheduler])
def test_a_schedulers_name_reaches_other_processes(users, ahead):
    config = SimpleNamespace(async_scheduling=ahead, scheduler_cls=users)
    engine_config._choose_scheduler(config)
    sent = pickle.loads(pickle.dumps(config.scheduler_cls))
    ours = TreeSchedulingAhead if ahead else TreeScheduling
    if users is None:
        assert resolve_obj_by_qualname(sent) is ours
    else:
        assert sent.args == (ours, users if isinstance(users, type) else Users)


@pytest.mark.parametrize("scheduler_cls", ["builtins.dict", "json.loads", dict])
def test_what_is_no_scheduler_of_vllms_is_refused_by_name(scheduler_cls):
    with pytest.raises(ConfigError, match="does not derive from vLLM's") as error:
        configured(sequoia(), scheduler_cls=scheduler_cls)
    assert repr(scheduler_cls) in str(error.value)
    assert "leave scheduler_cls out" in str(error.value)


def test_plain_vllms_schedulers_are_left_alone():
    plugin.register()
    for scheduler in (Scheduler, AsyncScheduler, StructuredOutputManager):
        assert not [one for one in vars(scheduler).values() if hasattr(one, hooks._ORIGINAL)]
