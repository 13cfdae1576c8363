"""Random requests through an engine in this process, which is driven step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.soak.random_requests import RandomRequest
from sequoia_vllm.engine.request_options import MOST_DRAFTS

_SAME_LOGPROB = 1e-3


@dataclass(frozen=True)
class Completion:
    """One of a request's outputs.

    Attributes:
        tokens: Its token ids.
        text: Them as text.
        ended_by: Finish reason, and what stopped it.
        logprobs: Of each token, if they were asked for.
    """

    tokens: tuple[int, ...]
    text: str
    ended_by: tuple[str | None, int | str | None]
    logprobs: tuple[float, ...] | None


Answer = list[Completion]


def sampling_params(request: RandomRequest) -> SamplingParams:
    """The request's, as vLLM takes them."""
    more: dict[str, Any] = {}
    if request.structured is not None:
        more["structured_outputs"] = StructuredOutputsParams(
            **request.structured, disable_any_whitespace="json" in request.structured
        )
    if request.most_drafts is not None:
        more["extra_args"] = {MOST_DRAFTS: request.most_drafts}
    return SamplingParams(**request.parameters, **more)


def answers(
    llm: LLM, requests: Sequence[RandomRequest], leaving: bool = True
) -> dict[int, Answer]:
    """Each request's outputs; of one that leaves, what it had by then.

    Args:
        llm: An engine without other requests.
        requests: In the order in which they arrive.
        leaving: Whether clients leave that are to leave.
    """
    engine, waiting, step = llm.llm_engine, list(requests), 0
    leaves = {str(request.number): request.leaves for request in requests if leaving}
    found: dict[int, Answer] = {}
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0].arrives <= step or not engine.has_unfinished_requests()):
            request = waiting.pop(0)
            engine.add_request(str(request.number), request.prompt, sampling_params(request))
        for output in engine.step():
            answer = [_completion(one) for one in output.outputs]
            found[int(output.request_id)] = answer
            limit = leaves.get(output.request_id)
            if limit is not None and not output.finished and len(answer[0].tokens) >= limit:
                engine.abort_request([output.request_id])
        step += 1
    return found


def same(request: RandomRequest, ours: Answer | None, plain: Answer) -> bool:
    """Whether a request's answer is plain vLLM's, or began like it when its client left."""
    if request.leaves is not None:
        # Of several outputs one may not have begun.
        begun = {} if ours is None else {one.tokens: one for one in ours}
        return all(
            any(tokens == one.tokens[: len(tokens)] for one in plain) for tokens in begun
        )
    return ours is not None and len(ours) == len(plain) and all(map(_same, ours, plain))


def _same(ours: Completion, plain: Completion) -> bool:
    if (ours.tokens, ours.text, ours.ended_by) != (plain.tokens, plain.text, plain.ended_by):
        return False
    if ours.logprobs is None or plain.logprobs is None:
        return ours.logprobs is plain.logprobs
    pairs = zip(ours.logprobs, plain.logprobs, strict=True)
    return all(abs(one - other) <= _SAME_LOGPROB for one, other in pairs)


def differences(
    llm: LLM, requests: Sequence[RandomRequest], plain: dict[int, Answer]
) -> list[RandomRequest]:
    """Requests whose answer is not plain vLLM's, also when nothing else is in the batch.

    A token may rightly differ where two are equally likely but for rounding, which depends
    on what else is in the batch: such requests are sent again, alone.
    """
    found = answers(llm, requests)
    return [
        request
        for request in requests
        if not same(request, found.get(request.number), plain[request.number])
        and not same(
            request, answers(llm, [request]).get(request.number), plain[request.number]
        )
    ]


def kv_cache_usage(llm: LLM) -> float:
    """Share of the KV cache's blocks that requests hold."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return float(scheduler.kv_cache_manager.usage)


def _completion(output: Any) -> Completion:
    logprobs = None
    if output.logprobs is not None:
        tokens = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = tuple(float(at[token].logprob) for token, at in tokens)
    return Completion(
        tuple(output.token_ids),
        output.text,
        (output.finish_reason, output.stop_reason),
        logprobs,
    )
