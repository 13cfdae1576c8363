"""The scheduler tells what earlier answers said: to requests of their salt and adapter alone."""

from itertools import count, product
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.engine.core.followed_predictions import FollowedPredictions
from sequoia_vllm.engine.core.prediction_option import COUNTED, PREDICTION, foretold
from sequoia_vllm.engine.core.scheduling import TreeScheduling
from tests.support import processors
from tests.support.engines import configured, whole_trees

NAMES = map(str, count())
BLOCK, STOP = 32, 3
ANSWER, OTHER = [10, 11, 12, 13, 14], [20, 21, 22, STOP]
ADAPTERS = None, LoRARequest("one", 1, "nowhere"), LoRARequest("two", 2, "nowhere")


def scheduler_with(history: bool = True, **options: Any) -> TreeScheduling:
    """vLLM's own below, without an engine."""
    config = configured(whole_trees(history=history), enable_prefix_caching=False, **options)
    layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer"], layers)])
    config.cache_config.num_gpu_blocks = cache.num_blocks
    return TreeScheduling(config, cache, StructuredOutputManager(config), BLOCK)


@pytest.fixture
def scheduler():
    return scheduler_with()


def begin(
    scheduler: TreeScheduling, options: dict[str, Any] | None = None, **about: Any
) -> Request:
    """Adds a request of up to five tokens."""
    params = SamplingParams(max_tokens=5, stop_token_ids=[STOP], extra_args=options)
    request = Request(next(NAMES), [1, 2, 5], params, None, **about)
    scheduler.add_request(request)
    assert params.extra_args == options
    return request


def emit(scheduler: TreeScheduling, request: Request, tokens: list[int]) -> SchedulerOutput:
    """One step, which emits these."""
    step, name = scheduler.schedule(), request.request_id
    output = ModelRunnerOutput([name], {name: 0}, sampled_token_ids=[list(tokens)])
    scheduler.update_from_output(step, output)
    return step


def told(scheduler: TreeScheduling, answer: list[int] = ANSWER, **about: Any) -> Any:
    """What a request is told, which then gets this answer."""
    request = begin(scheduler, **about)
    emit(scheduler, request, answer)
    assert request.is_finished()
    return foretold(request.sampling_params)


def test_answers_that_stopped_or_are_at_their_length_are_told_to_the_next_requests(scheduler):
    assert [told(scheduler), told(scheduler, OTHER)] == [None, ANSWER]
    [sent] = emit(scheduler, begin(scheduler), ANSWER).scheduled_new_reqs
    assert foretold(sent.sampling_params) == OTHER + ANSWER
    assert "sequoia_prediction': '<9 long>" in repr(sent)  # as it is logged


def test_nothing_crosses_salts_or_adapters(scheduler):
    salted = [{"cache_salt": salt, "lora_request": one} for salt, one in product("ab", ADAPTERS)]
    owners = [*salted, *({"lora_request": one} for one in ADAPTERS)]
    answers = [[100 + number, *ANSWER[1:]] for number in range(len(owners))]
    for wanted in ([None] * len(owners), answers):
        pairs = zip(owners, answers, strict=True)
        assert [told(scheduler, answer, **owner) for owner, answer in pairs] == wanted


def test_what_was_aborted_or_failed_and_sessions_are_told_to_nobody(scheduler):
    request = begin(scheduler)
    emit(scheduler, request, ANSWER[:4])
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    request.status = RequestStatus.FINISHED_ERROR
    scheduler._handle_stopped_request(request)
    emit(scheduler, session := begin(scheduler, resumable=True), ANSWER)
    assert session.output_token_ids[:] == ANSWER
    assert scheduler.history.size == 0


def test_a_users_own_prediction_is_followed_and_it_alone_is_counted(scheduler):
    scheduler.predictions = FollowedPredictions(scheduler.tree, has_branches=False)  # as on V2
    told(scheduler)
    own = begin(scheduler, {PREDICTION: [7, 8], COUNTED: True})
    assert own.sampling_params.extra_args == {PREDICTION: [7, 8], COUNTED: True}
    others = begin(scheduler, {COUNTED: True, "other": 1})
    assert others.sampling_params.extra_args == {PREDICTION: ANSWER, "other": 1}
    assert scheduler.predictions.requests.keys() == {own.request_id}


def test_requests_without_drafts_and_sessions_are_told_nothing(scheduler):
    told(scheduler)
    for request in (begin(scheduler, {MOST_DRAFTS: 0}), begin(scheduler, resumable=True)):
        assert foretold(request.sampling_params) is None


def test_it_is_forgotten_with_the_prefix_cache(scheduler):
    told(scheduler)
    assert scheduler.reset_prefix_cache()
    assert told(scheduler) is None
    assert told(scheduler) == ANSWER


def test_there_is_none_by_default_or_where_nobody_drafts():
    assert scheduler_with(history=False).history is None
    assert scheduler_with(logits_processors=[processors.EvenTokensOnly]).history is None
