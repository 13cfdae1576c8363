"""What the engine core sends to its workers in a step, and that nothing is lost with the rest."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from sequoia_vllm.engine.common.step_messages import StepOutcome, attach_outcome, outcome_of
from sequoia_vllm.engine.core.scheduling import TreeScheduling, post_step
from sequoia_vllm.engine.worker.worker_base import SequoiaWorker
from tests.support.engines import generated, metric, noting, plain_outputs, running, sequoia
from tests.support.models import DRAFT, prompts

PROMPTS = prompts(3)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
CHOICE = SamplingParams(
    temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
)


def methods_sent(llm):
    """The methods of workers that are called within the block, in order."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return noting(executor, "collective_rpc", lambda method, *_: method)


@pytest.mark.engine
def test_a_step_is_one_message_and_with_grammars_two():
    """Their masks come with the second message; the drafts never need one."""
    plain = plain_outputs(PROMPTS, GREEDY)
    with running(sequoia()) as llm:
        with methods_sent(llm) as sent:
            found = generated(llm, PROMPTS, GREEDY)
        drafts = metric(llm, "vllm:spec_decode_num_draft_tokens")
        accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
        with methods_sent(llm) as masked:
            outputs = llm.generate(PROMPTS, CHOICE, use_tqdm=False)
    assert set(sent) == {"execute_model"}
    assert found == plain
    assert drafts >= 15 * 3
    assert accepted > 0
    assert len(sent) < 40
    assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}
    assert set(masked) == {"execute_model", "sample_tokens"}


@pytest.mark.engine
def test_vllms_own_engines_ask_as_before():
    config = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 2}
    with running(config) as llm:
        with methods_sent(llm) as sent:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
        [positions] = [m for m in llm.get_metrics() if m.name.endswith("accepted_tokens_per_pos")]
        assert len(positions.values) == 2
    assert set(sent) == {"execute_model", "sample_tokens", "take_draft_token_ids"}


class Told(TreeScheduling):
    """A scheduler that notes what it is told of drafts."""

    def __init__(self) -> None:
        self.told, self.brought = [], None

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        self.told.append(draft_token_ids)


def asks(core: SimpleNamespace, model_executed: bool) -> None:
    core.asked.append(model_executed)


def test_drafts_are_told_once_and_asked_for_where_the_output_had_none():
    core = SimpleNamespace(scheduler=Told(), asked=[])
    drafts = DraftTokenIds(["a"], [[1, 2]])
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    attach_outcome(output, StepOutcome(drafts=drafts))
    core.scheduler.brought = outcome_of(output).drafts
    post_step(asks, core, True)
    assert core.scheduler.told == [drafts]
    post_step(asks, core, True)
    core.scheduler.brought = outcome_of(EMPTY_MODEL_RUNNER_OUTPUT).drafts
    post_step(asks, core, False)
    assert core.scheduler.told == [drafts]
    assert core.asked == [True, False]


def test_a_step_without_drafts_asks_for_none():
    core = SimpleNamespace(scheduler=Told(), asked=[])
    core.scheduler.brought = nothing = DraftTokenIds([], [])
    post_step(asks, core, True)
    assert (core.asked, core.scheduler.told) == ([], [nothing])


@pytest.mark.parametrize("ahead", [True, False])
def test_engines_that_work_a_step_ahead_are_left_alone(ahead):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
    worker = SimpleNamespace(vllm_config=config)
    assert SequoiaWorker._takes_single_steps.func(worker) is not ahead
