"""Thinking budgets stay with their requests, whatever rows of the batch these move to.

On tree nodes they force what vLLM's own state forces once a node's path is committed.
"""

import random
from copy import copy
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from sequoia_vllm.engine.v1.thinking_budgets import ThinkingBudgets
from sequoia_vllm.tree import TokenTree

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
        self.budgets = ThinkingBudgets(self.batch.thinking_budget_state_holder)

    def step(self) -> None:
        """Changes the batch as vLLM's runner does before it samples."""
        for name in list(self.requests):
            if self.rng.random() < 0.3:
                self.batch.remove_request(name)
                self.budgets.forget(name)
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
        self.budgets.follow([self.requests[name] for name in self.batch.req_ids])

    @property
    def params(self) -> list[SamplingParams]:
        return [self.requests[name].sampling_params for name in self.batch.req_ids]

    def forced(self) -> list[bool]:
        """Which rows are forced to end their thinking; all go on with token 9 else."""
        logits = torch.zeros(len(self.requests), VOCABULARY)
        self.budgets.apply_to_logits(logits, False, [])
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
        told = {name: state.output_token_ids for name, state in batches.requests.items()}
        budgets = [params.thinking_token_budget for params in batches.params]
        expected = [
            budget is not None and len(told[name]) == budget
            for name, budget in zip(batches.batch.req_ids, budgets, strict=True)
        ]
        assert batches.forced() == expected
        seen |= {budget for budget, ends in zip(budgets, expected, strict=True) if ends}
    assert seen == {0, 2, 5}


# -- on trees ----------------------------------------------------------------------------------

#   0 ─┬─ 1 ─┬─ 3 ─── 6
#      │     └─ 4 ─── 7
#      └─ 2 ─── 5
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3, 4))
LONG_START, LONG_END = [3, 4], [5, 6, 7]


def forced_after(holder, params: SamplingParams, prompt: list[int], outputs: list[int]) -> int:
    """What vLLM's own holder forces once these were emitted one by one; -1: nothing."""
    own = copy(holder)
    own._state, own.cu_num_tokens, own.in_spec_mode = {}, {}, False
    own.sync_batch(BatchUpdate(1, removed=(), added=[(0, params, prompt, [])], moved=()))
    for count in range(len(outputs) + 1):
        own.update_state([outputs[:count]], None)
        logits = own.apply_to_logits(torch.zeros(1, VOCABULARY), False, None)
    return int(logits.argmax()) if logits.any() else -1


@pytest.mark.parametrize("markers", [([START], [END]), (LONG_START, LONG_END)], ids=["1", "3"])
@pytest.mark.parametrize("budget", [0, 1, 3, 9])
def test_each_node_is_forced_by_its_own_path(budget, markers):
    """Three requests, the second without a budget; they follow what is forced, as the target."""
    start, end = markers
    marked = SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)
    holder = ThinkingBudgetStateHolder(marked, ROWS, 0, torch.device("cpu"), False)
    rng = random.Random(budget)
    requests = [request("a", budget), request("b", None), request("c", budget)]
    requests[0].prompt_token_ids = [7, *start]
    budgets, seen = ThinkingBudgets(holder), set()
    for _ in range(40):
        budgets.follow(requests)
        tokens = [[rng.choice([*start, *start, *end, 9, 9]) for _ in TREE.parents] for _ in "abc"]
        trees = SimpleNamespace(
            requests=torch.arange(3), num_nodes=torch.tensor([8, 8, 6]),
            tokens=torch.tensor(tokens),
            depths=torch.from_numpy(TREE.depths.copy())[None].expand(3, -1),
            parents=torch.tensor([TREE.parents] * 3), first_logits_row=torch.tensor([0, 8, 16]),
            drafts="abc",
        )  # fmt: skip
        before = torch.zeros(22, VOCABULARY)
        found = budgets.force_nodes(before, trees)
        assert not before.any()
        for row in range(22):
            place, node = divmod(row, 8)
            path = []
            while node > 0:
                path.append(tokens[place][node])
                node = TREE.parents[node]
            one = requests[place]
            expected = -1
            if place != 1:
                outputs = one.output_token_ids + path[::-1]
                expected = forced_after(holder, one.sampling_params, one.prompt_token_ids, outputs)
            assert (int(found[row].argmax()) if found[row].any() else -1) == expected
            seen.add(expected)
        for place, one in enumerate(requests):
            accepted = tokens[place][3] if rng.random() < 0.5 else 9
            root = found[8 * place]
            one.output_token_ids.append(int(root.argmax()) if root.any() else accepted)
            if rng.random() < 0.3:  # a step that emitted two
                outputs = [one.sampling_params, one.prompt_token_ids, one.output_token_ids]
                forced = forced_after(holder, *outputs) if place != 1 else -1
                one.output_token_ids.append(forced if forced >= 0 else 9)
    assert seen == {-1, *end}
