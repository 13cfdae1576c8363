"""Decoding steps of requests that nobody sent, as vLLM's scheduler would have them run.

vLLM's own warm-up on GPUs does the same: what is run is what serves, from the target's pass to
the draft's next trees.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from sequoia_vllm.engine.runner.wrapping import runs_v2
from sequoia_vllm.engine.worker.start.points import Point

_CONTEXT = 128  # tokens; of whole blocks, if requests may be that long
_NUMBERS = count()


@dataclass(frozen=True)
class Layout:
    """Where dummy requests lie in the KV cache.

    All begin with the same tokens, as if these were in the prefix cache: nobody computes
    them, and what their blocks hold does not matter.

    Attributes:
        context: Tokens that all of them begin with.
        max_length: Longest request, in tokens.
        block_sizes: Tokens per block of each cache group.
        num_blocks: Of the cache; the first is not given out.
    """

    context: int
    max_length: int
    block_sizes: tuple[int, ...]
    num_blocks: int

    @classmethod
    def of(cls, runner: Any) -> Layout:
        """Of this runner's cache."""
        cache = runner.kv_cache_config
        sizes = tuple(group.kv_cache_spec.block_size for group in cache.kv_cache_groups)
        whole = math.ceil(_CONTEXT / max(sizes)) * max(sizes)
        most = runner.max_model_len
        context = whole if whole <= most // 2 else min(_CONTEXT, most // 2)
        return cls(context, most, sizes, cache.num_blocks)

    def block_ids(self, requests: int, length: int) -> list[tuple[list[int], ...]] | None:
        """The blocks of each request in each group, for so many tokens; None: too few."""
        shared = [self.context // size for size in self.block_sizes]
        all_of_one = [math.ceil(length / size) for size in self.block_sizes]
        own = [number - held for number, held in zip(all_of_one, shared, strict=True)]
        if 1 + sum(shared) + requests * sum(own) > self.num_blocks:
            return None
        ids = count(1)

        def take(number: int) -> list[int]:
            return [next(ids) for _ in range(number)]

        first = [take(number) for number in shared]
        return [
            tuple([*held, *take(number)] for held, number in zip(first, own, strict=True))
            for _ in range(requests)
        ]


class DummyRequests:
    """A batch of greedy requests with trees, or without, stepped by hand.

    Args:
        worker: A Sequoia worker that has warmed up; every rank of a group does the same steps.
        point: How many requests, and nodes of each.
        blocks: As `Layout.block_ids` gives them.
        context: Tokens that are taken for computed.
    """

    def __init__(
        self, worker: Any, point: Point, blocks: list[tuple[list[int], ...]], context: int
    ) -> None:
        self._worker = worker
        self._drafts = point.nodes - 1
        self._context = context
        self._is_v2 = runs_v2(worker.model_runner)
        self._is_ahead = bool(worker.vllm_config.scheduler_config.async_scheduling)
        number = next(_NUMBERS)
        self._blocks = {f"_start_{number}_{row}": ids for row, ids in enumerate(blocks)}
        self._computed = dict.fromkeys(self._blocks, context)
        self._emitted = dict.fromkeys(self._blocks, 0)
        self._proposed: dict[str, list[int]] = {}
        self._under_way: deque[tuple[Any, dict[str, int]]] = deque()

    def begin(self) -> None:
        """The first step: all of them compute their prompt's last token."""
        params = SamplingParams(temperature=0.0, max_tokens=1 << 16, ignore_eos=True)
        prompt = [1] * (self._context + 1)
        scheduled = SchedulerOutput.make_empty()
        for request_id, blocks in self._blocks.items():
            request = Request(request_id, prompt, params, None)
            request.num_computed_tokens = self._context
            scheduled.scheduled_new_reqs.append(
                NewRequestData.from_request(request, blocks, prefill_token_ids=prompt)
            )
        self._run(scheduled, {request_id: [] for request_id in self._blocks})

    def step(self) -> None:
        """One more decoding step of all of them."""
        cached = CachedRequestData.make_empty()
        for request_id in self._blocks:
            cached.req_ids.append(request_id)
            cached.num_computed_tokens.append(self._computed[request_id])
            cached.num_output_tokens.append(self._emitted[request_id])
            cached.new_block_ids.append(None)
        scheduled = SchedulerOutput.make_empty()
        scheduled.scheduled_cached_reqs = cached
        placeholders = [0] * self._drafts  # V2 knows its drafts itself
        self._run(
            scheduled,
            {
                request_id: placeholders if self._is_v2 else self._proposed.get(request_id, [])
                for request_id in self._blocks
            },
        )

    def end(self) -> None:
        """Waits for what is under way, and lets all of them finish."""
        while self._under_way:
            self._settle()
        scheduled = SchedulerOutput.make_empty()
        scheduled.finished_req_ids = set(self._blocks)
        self._worker.execute_model(scheduled)

    def _run(self, scheduled: Any, drafts: dict[str, list[int]]) -> None:
        tokens = {request_id: 1 + len(ids) for request_id, ids in drafts.items()}
        scheduled.num_scheduled_tokens = tokens
        scheduled.total_num_scheduled_tokens = sum(tokens.values())
        scheduled.scheduled_spec_decode_tokens = {name: ids for name, ids in drafts.items() if ids}
        scheduled.num_spec_tokens_to_schedule = self._drafts
        output = self._worker.execute_model(scheduled)
        if output is None:
            output = self._worker.sample_tokens(None)
        # Until it is known what became of its drafts, all count as accepted.
        for request_id, number in tokens.items():
            self._computed[request_id] += number
        self._under_way.append((output, tokens))
        if not self._is_v2 and self._drafts:
            proposed = self._worker.take_draft_token_ids()
            self._proposed = dict(zip(proposed.req_ids, proposed.draft_token_ids, strict=True))
        while len(self._under_way) > self._is_ahead:
            self._settle()

    def _settle(self) -> None:
        output, tokens = self._under_way.popleft()
        if hasattr(output, "get_output"):
            output = output.get_output()
        for request_id, row in output.req_id_to_index.items():
            emitted = sum(1 for token in output.sampled_token_ids[row] if token >= 0)
            self._emitted[request_id] += emitted
            self._computed[request_id] -= tokens[request_id] - emitted
