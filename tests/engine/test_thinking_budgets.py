"""Thinking budgets stay with their requests, whatever rows of the batch these move to."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from sequoia_vllm.engine.v1.verifier import forget_stale_budgets

ROWS, VOCABULARY, START, END = 7, 64, 3, 5


def empty_batch() -> InputBatch:
    """vLLM's, of an engine without speculation, as the sampler sees it."""
    marked = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=[END])
    return InputBatch(
        max_num_reqs=ROWS, max_model_len=64, max_num_batched_tokens=256, device=torch.device("cpu"),
        vocab_size=VOCABULARY, block_sizes=[16], max_num_blocks_per_req=[4],
        reasoning_config=marked,
    )  # fmt: skip


def request(name: str, budget: int | None) -> CachedRequestState:
    """It is thinking when it begins."""
    return CachedRequestState(
        req_id=name, prompt_token_ids=[7, START], mm_features=[],
        sampling_params=SamplingParams(temperature=0, thinking_token_budget=budget),
        generator=None, block_ids=([],), num_computed_tokens=0, output_token_ids=[],
    )  # fmt: skip


class Batches:
    """Random steps of vLLM's input batch: requests end, others begin, rows are reordered."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.batch = empty_batch()
        self.requests: dict[str, CachedRequestState] = {}
        self.begun = 0

    def step(self) -> None:
        """Changes the batch as vLLM's runner does before it samples."""
        for name in list(self.requests):
            if self.rng.random() < 0.3:
                self.batch.remove_request(name)
                del self.requests[name]
        while len(self.requests) < ROWS and self.rng.random() < 0.5:
            self.begun += 1
            new = request(str(self.begun), self.rng.choice([None, None, 0, 2, 5]))
            self.requests[new.req_id] = new
            self.batch.add_request(new)
        self.batch.condense()
        if len(self.requests) > 1 and self.rng.random() < 0.3:
            self.batch.swap_states(*self.rng.sample(range(len(self.requests)), 2))
        self.batch.refresh_metadata()
        for row, name in enumerate(self.batch.req_ids):
            drafts = [9] * 3 if self.params[row].thinking_token_budget is None else []
            self.batch.spec_token_ids[row][:] = drafts
            assert self.batch.req_output_token_ids[row] is self.requests[name].output_token_ids

    @property
    def params(self) -> list[SamplingParams]:
        return [self.requests[name].sampling_params for name in self.batch.req_ids]

    def forced(self) -> list[bool]:
        """Which rows the holder forces to end their thinking; all go on with token 9 else."""
        holder, spec = self.batch.thinking_budget_state_holder, self.batch.spec_token_ids
        holder.update_state(self.batch.req_output_token_ids, spec)
        logits = torch.zeros(len(self.requests), VOCABULARY)
        holder.apply_to_logits(logits, False, spec)
        found = [bool(row) for row in logits[:, END] > 0]
        for name, ends in zip(self.batch.req_ids, found, strict=True):
            self.requests[name].output_token_ids.append(END if ends else 9)
        return found


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_ends_its_own_requests_thinking_and_no_others(seed):
    batches = Batches(seed)
    seen = set()
    for _ in range(200):
        batches.step()
        forget_stale_budgets(batches.batch.thinking_budget_state_holder, batches.params)
        told = {name: state.output_token_ids for name, state in batches.requests.items()}
        budgets = [params.thinking_token_budget for params in batches.params]
        expected = [
            budget is not None and len(told[name]) == budget
            for name, budget in zip(batches.batch.req_ids, budgets, strict=True)
        ]
        assert batches.forced() == expected
        seen |= {budget for budget, ends in zip(budgets, expected, strict=True) if ends}
    assert seen == {0, 2, 5}
