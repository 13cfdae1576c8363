"""OpenAI's field ``prediction`` for ``vllm serve --middleware sequoia_vllm.predicted_outputs``.

The middleware makes the option `PREDICTION` of it. The usage of the answer says what became of it.
"""

import json
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse
from vllm.exceptions import VLLMValidationError

from sequoia_vllm.engine.common.step_messages import PREDICTED
from sequoia_vllm.engine.core.prediction_option import (
    COUNTED,
    PREDICTION,
    check_prediction,
    foretold,
)
from sequoia_vllm.verification.prediction import PredictionCounts

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

FIELD = "prediction"
_PATHS = ("/v1/chat/completions", "/v1/completions")
_HAS_NO_CHOICE = b'"choices":[]'  # the last event of a stream, with its usage; no text can say so


@dataclass
class Usage:
    """What became of the predictions of one HTTP request, over all of its answers."""

    accepted: int = 0
    rejected: int = 0

    def add_to(self, answer: Any) -> bytes:
        """An answer of vLLM as JSON, with these counts in its usage if it has one."""
        if usage := answer.get("usage"):
            details = usage.get("completion_tokens_details") or {}
            usage["completion_tokens_details"] = {
                **details,
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
            }
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


# Set in the task of an HTTP request that has the field, and in the tasks that this one starts.
_usage: ContextVar[Usage | None] = ContextVar("usage", default=None)


class PredictedOutputs:
    """An ASGI middleware; requests without the field pass as they are."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves a request; answers one with a wrong field with status 400, like vLLM."""
        if scope["type"] != "http" or not scope["path"].endswith(_PATHS):
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        try:
            body = translated(b"".join(message.get("body", b"") for message in messages))
        except VLLMValidationError as error:
            await _refusal(error)(scope, receive, send)
            return
        if body is None:
            await self._app(scope, _replaying(messages, receive), send)
            return
        usage = Usage()
        _usage.set(usage)
        scope = {**scope, "headers": _with_length(scope["headers"], body)}
        again = _replaying([{"type": "http.request", "body": body}], receive)
        await self._app(scope, again, _Answer(send, usage))


def translated(body: bytes) -> bytes | None:
    """A request's JSON with the option in the place of the field; None: it has no field.

    What vLLM will refuse has none.

    Raises:
        VLLMValidationError: The field is wrong.
    """
    if FIELD.encode() not in body:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or request.get(FIELD) is None:
        return None
    options = request.get("vllm_xargs") or {}
    if not isinstance(options, dict):
        return None
    if PREDICTION in options:
        raise _wrong(f"and vllm_xargs with {PREDICTION} say the same: give one of them")
    text = _text_of(request.pop(FIELD))
    try:
        check_prediction(text)
    except VLLMValidationError as error:
        raise _wrong(error.args[0].removeprefix(PREDICTION).strip()) from None
    request["vllm_xargs"] = {**options, PREDICTION: text}
    return json.dumps(request).encode()


def _text_of(field: Any) -> str:
    if isinstance(field, dict) and field.get("type") == "content":
        content = field.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(parts, list) and all(map(_is_text, parts)):
            return "".join(part["text"] for part in parts)
    raise _wrong(
        'must be {"type": "content", "content": TEXT}, where TEXT is a text or a list of '
        '{"type": "text", "text": ...}'
    )


def _is_text(part: Any) -> bool:
    is_object = isinstance(part, dict) and part.get("type") == "text"
    return is_object and isinstance(part.get("text"), str)


def _wrong(message: str) -> VLLMValidationError:
    return VLLMValidationError(f"{FIELD} {message}", parameter=FIELD)


def _refusal(error: VLLMValidationError) -> JSONResponse:
    """The answer that vLLM gives to such an error behind its middlewares."""
    status = 400
    said = {"message": str(error), "type": "BadRequestError", "param": FIELD, "code": status}
    return JSONResponse({"error": said}, status_code=status)


def _replaying(messages: Iterable[Message], receive: Receive) -> Receive:
    left = deque(messages)

    async def again() -> Message:
        return left.popleft() if left else await receive()

    return again


def _with_length(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> list[tuple[bytes, bytes]]:
    others = [header for header in headers if header[0].lower() != b"content-length"]
    return [*others, (b"content-length", str(len(body)).encode())]


class _Answer:
    """Sends an answer on, with counts in its usage: a stream as it comes, JSON when it is whole."""

    def __init__(self, send: Send, usage: Usage) -> None:
        self._send, self._usage = send, usage
        self._start: Message | None = None  # of JSON: its length is not known yet
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            if message["status"] == 200 and kind.startswith(b"application/json"):
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            body = self._usage.add_to(json.loads(self._body))
            start = self._start
            await self._send({**start, "headers": _with_length(start["headers"], body)})
            message = {**message, "body": body}
        elif _HAS_NO_CHOICE in message.get("body", b""):
            lines = message["body"].split(b"\n")
            message = {**message, "body": b"\n".join(map(self._counted, lines))}
        await self._send(message)

    def _counted(self, line: bytes) -> bytes:
        start, found, event = line.partition(b"data: ")
        if not found or _HAS_NO_CHOICE not in event:
            return line
        return start + found + self._usage.add_to(json.loads(event))


# Until: vLLM knows OpenAI's field.
def generate(
    original: Callable[..., AsyncGenerator[Any, None]],
    self: Any,
    prompt: Any,
    sampling_params: Any,
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[Any, None]:
    """Calls vLLM's, and counts for a request that has the field what became of its prediction."""
    usage = _usage.get()
    if usage is None or foretold(sampling_params) is None:
        return original(self, prompt, sampling_params, *args, **kwargs)
    sampling_params.extra_args = {**sampling_params.extra_args, COUNTED: True}
    return _counting(original(self, prompt, sampling_params, *args, **kwargs), usage)


async def _counting(outputs: AsyncGenerator[Any, None], usage: Usage) -> AsyncGenerator[Any, None]:
    """Passes outputs on; an answer's last one brings its counts."""
    lengths: Counter[int] = Counter()  # tokens of each answer
    async with aclosing(outputs):
        async for output in outputs:
            for answer in output.outputs:
                lengths[answer.index] += len(answer.token_ids)
                if (counts := prediction_counts(answer, lengths[answer.index])) is not None:
                    usage.accepted += counts.accepted
                    usage.rejected += counts.rejected
                    if not answer.spec_decode_metrics.histogram:  # it only brought the counts
                        answer.spec_decode_metrics = None
            yield output


def prediction_counts(answer: Any, length: int | None = None) -> PredictionCounts | None:
    """What became of the prediction of an answer, if its request asked (`COUNTED`) and it ended.

    Args:
        answer: vLLM's `CompletionOutput`.
        length: Its tokens, if ``answer`` has the last of them alone.
    """
    found = getattr(answer.spec_decode_metrics, PREDICTED, None)
    if found is None:
        return None
    counts = PredictionCounts(*found)
    within = counts.accepted_within(len(answer.token_ids) if length is None else length)
    return replace(counts, accepted=within)
