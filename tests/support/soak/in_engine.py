"""Random requests through an engine in this process, which is driven step by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from tests.support.soak.random_requests import RandomRequest

_SAME_LOGPROB = 1e-3


@dataclass(frozen=True)
class Completion:
    """One of a request's outputs."""

    tokens: tuple[int, ...]
    text: str
    ended_by: tuple[str | None, int | str | None]
    logprobs: tuple[float, ...] | None


Answer = dict[int, Completion]
"""A request's outputs, by their index."""


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


def answers(llm: LLM, requests: Sequence[RandomRequest], leaving: bool = True) -> dict[int, Answer]:
    """Each request's outputs; of one that leaves, what it had by then."""
    engine, waiting, step = llm.llm_engine, list(requests), 0
    leaves = {str(request.number): request.leaves for request in requests if leaving}
    found: dict[int, Answer] = {}
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0].arrives <= step or not engine.has_unfinished_requests()):
            request = waiting.pop(0)
            engine.add_request(str(request.number), request.prompt, sampling_params(request))
        for output in engine.step():
            answer = found.setdefault(int(output.request_id), {})
            # Of several outputs only those that have something new.
            answer.update({one.index: _completion(one) for one in output.outputs})
            limit = leaves.get(output.request_id)
            longest = max(len(one.tokens) for one in answer.values())
            if limit is not None and not output.finished and longest >= limit:
                engine.abort_request([output.request_id])
        step += 1
    return found


def same(request: RandomRequest, ours: Answer | None, plain: Answer) -> bool:
    """Whether a request's answer is plain vLLM's, or began like it when its client left."""
    ours = ours or {}
    if request.leaves is not None:
        return all(
            one.tokens == plain[index].tokens[: len(one.tokens)] for index, one in ours.items()
        )
    return ours.keys() == plain.keys() and all(
        _same(one, plain[index]) for index, one in ours.items()
    )


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
        and not same(request, answers(llm, [request]).get(request.number), plain[request.number])
    ]


def _completion(output: Any) -> Completion:
    logprobs = None
    if output.logprobs is not None:
        tokens = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = tuple(float(at[token].logprob) for token, at in tokens)
    return Completion(
        tuple(output.token_ids), output.text, (output.finish_reason, output.stop_reason), logprobs
    )
