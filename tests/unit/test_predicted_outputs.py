"""OpenAI's field for predictions becomes our option, and the usage says what became of it."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

import sequoia_vllm
from sequoia_vllm.engine.common.step_messages import add_fields, attach_predicted
from sequoia_vllm.engine.core.prediction_option import MOST_PREDICTED, PREDICTION, is_counted
from sequoia_vllm.engine.frontend.predicted_outputs import PredictedOutputs, generate

TEXT = 'naïve "text"\n'
FIELD = {"type": "content", "content": TEXT}
PARTS = {"type": "content", "content": [{"type": "text", "text": part} for part in (TEXT, "b")]}
EVENTS = [
    b'data: {"choices":[{"text":"\\"choices\\":[]"}],"usage":{"total_tokens":1}}\n\n',
    b'data: {"choices":[],"usage":{"total_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
]


class App:
    """The server behind the middleware: it answers with `parts`, and keeps what it was asked.

    Each element of `outputs` stands for one answer's last output: its index, tokens and counts.
    """

    def __init__(
        self, parts: list[bytes], kind: bytes = b"application/json", status: int = 200,
        outputs: tuple[tuple[int, int, tuple[int, int, int]], ...] = (),
    ) -> None:  # fmt: skip
        self.parts, self.kind, self.status, self.outputs = parts, kind, status, outputs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope, self.messages = scope, []
        while not self.messages or self.messages[-1].get("more_body"):
            self.messages.append(await receive())
        self.params = SamplingParams(extra_args={PREDICTION: TEXT})
        # As vLLM does, in another task.
        self.seen = await asyncio.create_task(self.generated())
        length = str(sum(map(len, self.parts))).encode()
        headers = [(b"content-type", self.kind), (b"content-length", length)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for place, part in enumerate(self.parts, start=1):
            more = place < len(self.parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    async def generated(self) -> list[Any]:
        async def vllms(*_: Any) -> Any:
            for index, length, counts in self.outputs:
                metrics = None
                if is_counted(self.params):
                    metrics = SimpleNamespace(spec_decode_metrics=None)
                    attach_predicted(metrics, counts)
                    metrics = metrics.spec_decode_metrics
                answer = SimpleNamespace(
                    index=index, token_ids=[1] * length, spec_decode_metrics=metrics
                )
                yield SimpleNamespace(outputs=[answer])

        return [one async for one in generate(vllms, self, "prompt", self.params, "id")]

    def ask(self, *bodies: bytes, path: str = "/v1/completions") -> list[Any]:
        """What the client gets for a request whose body comes in these pieces."""
        given = [
            {"type": "http.request", "body": body, "more_body": place < len(bodies)}
            for place, body in enumerate(bodies, start=1)
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return given.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"Content-Length", b"7"), (b"host", b"here")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        asyncio.run(PredictedOutputs(self)(scope, receive, send))
        return sent

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages)


def request(field: Any, **others: Any) -> bytes:
    return json.dumps({"prompt": "a", "prediction": field, **others}).encode()


@pytest.fixture(scope="module", autouse=True)
def fields() -> None:
    add_fields()


def test_vllm_finds_the_class_by_its_option():
    assert sequoia_vllm.predicted_outputs is PredictedOutputs
    with pytest.raises(AttributeError, match="no attribute 'predicted'"):
        _ = sequoia_vllm.predicted


@pytest.mark.parametrize(
    "bodies",
    [[b'{"prompt": "a", ', b'"n":1}'], [b""], [b'{"prompt": "a prediction"}'], [b'["prediction"]'],
     [b'{"prediction": '], [b'{"prediction": "\xff"}'], [b'{"prediction": ' + 99999 * b"["],
     [request(None)], [request(FIELD, vllm_xargs=[1])], [request(FIELD), b""]],
)  # fmt: skip
def test_other_requests_and_their_answers_pass_as_they_are(bodies):
    app = App([b'{"usage": {}, ', b'"more": 1}'])
    sent = app.ask(*bodies, path="/v1/responses" if bodies[1:] == [b""] else "/v1/completions")
    assert [message["body"] for message in app.messages] == bodies
    assert [message.get("body") for message in sent] == [None, *app.parts]
    assert app.scope["headers"][0] == (b"Content-Length", b"7")
    assert not is_counted(app.params)


@pytest.mark.parametrize("path", ["/v1/completions", "/root/v1/chat/completions"])
@pytest.mark.parametrize(("field", "text"), [(FIELD, TEXT), (PARTS, f"{TEXT}b")])
def test_the_field_becomes_the_option(field, text, path):
    app = App([b"{}"])
    body = request(field, vllm_xargs={"other": 1.5}, seed=3)
    app.ask(body[:9], body[9:], path=path)
    options = {"other": 1.5, PREDICTION: text}
    assert json.loads(app.body) == {"prompt": "a", "seed": 3, "vllm_xargs": options}
    assert app.scope["headers"] == [
        (b"host", b"here"), (b"content-length", str(len(app.body)).encode())
    ]  # fmt: skip
    assert is_counted(app.params)


@pytest.mark.parametrize(
    ("field", "message"),
    [("a text", '{"type": "content", "content": TEXT}'), ({"content": "a"}, "must be"),
     ({"type": "content"}, "must be"), ({"type": "content", "content": 3}, "must be"),
     ({"type": "content", "content": ["a"]}, "must be"),
     ({"type": "content", "content": [{"type": "image", "text": "a"}]}, "must be"),
     ({"type": "content", "content": [{"type": "text", "text": None}]}, "must be"),
     ({"type": "content", "content": ""}, "prediction is empty: leave it out"),
     ({"type": "content", "content": []}, "prediction is empty: leave it out"),
     ({"type": "content", "content": "a" * (8 * MOST_PREDICTED + 1)}, "prediction has 524289")],
)  # fmt: skip
def test_wrong_fields_are_refused_like_vllm_does(field, message):
    app = App([b"{}"])
    start, answer = app.ask(request(field))
    assert start["status"] == 400
    error = json.loads(answer["body"])["error"]
    assert message in error.pop("message")
    assert error == {"type": "BadRequestError", "param": "prediction", "code": 400}
    assert not hasattr(app, "scope")


def test_both_names_at_once_are_refused():
    start, answer = App([b"{}"]).ask(request(FIELD, vllm_xargs={PREDICTION: "a"}))
    assert start["status"] == 400
    assert "give one of them" in json.loads(answer["body"])["error"]["message"]


# Of two answers: the last run of accepted tokens of the second ends three behind it.
OUTPUTS = ((0, 20, (10, 4, 20)), (1, 12, (8, 0, 15)))
COUNTS = {"accepted_prediction_tokens": 15, "rejected_prediction_tokens": 4}


@pytest.mark.parametrize("others", [{}, {"reasoning_tokens": 2}])
def test_the_usage_of_json_has_the_counts_of_all_answers(others):
    body = json.dumps(
        {"text": TEXT, "usage": {"total_tokens": 5, "completion_tokens_details": others or None}},
        ensure_ascii=False, separators=(",", ":"),
    ).encode()  # fmt: skip
    app = App([body[:10], body[10:]], outputs=OUTPUTS)
    start, answer = app.ask(request(FIELD))
    found = json.loads(answer["body"])
    assert found.pop("usage")["completion_tokens_details"] == {**others, **COUNTS}
    assert found == {"text": TEXT}
    assert dict(start["headers"])[b"content-length"] == str(len(answer["body"])).encode()
    assert [one.outputs[0].spec_decode_metrics for one in app.seen] == [None, None]


def test_the_last_event_of_a_stream_has_the_counts():
    app = App(EVENTS, kind=b"text/event-stream; charset=utf-8", outputs=OUTPUTS)
    [_, *sent] = app.ask(request(FIELD))
    first, last, done = (message["body"] for message in sent)
    assert (first, done) == (EVENTS[0], EVENTS[2])
    usage = {"total_tokens": 2, "completion_tokens_details": COUNTS}
    assert last.endswith(b"\n\n")
    assert json.loads(last.removeprefix(b"data: ")) == {"choices": [], "usage": usage}


def test_errors_behind_the_middleware_pass():
    app = App([b'{"error": {}, ', b'"usage": {}}'], status=404)
    assert [message.get("body") for message in app.ask(request(FIELD))] == [None, *app.parts]


def test_counts_of_a_whole_answer_end_where_it_does():
    """Python's front end has them; a request that did not ask has none."""
    answer = SimpleNamespace(spec_decode_metrics=None, token_ids=[1] * 12)
    assert sequoia_vllm.prediction_counts(answer) is None
    answer.spec_decode_metrics = RequestSpecDecodeMetrics.new(4)
    assert sequoia_vllm.prediction_counts(answer) is None
    attach_predicted(answer, (8, 3, 15))
    counts = sequoia_vllm.prediction_counts(answer)
    assert (counts.accepted, counts.rejected) == (5, 3)


def test_vllms_own_metrics_stay():
    """Where a server is asked for them; the counts come with them."""
    metrics = RequestSpecDecodeMetrics.new(4)
    output = SimpleNamespace(spec_decode_metrics=metrics)
    attach_predicted(output, (1, 2, 3))
    assert output.spec_decode_metrics is metrics
    assert metrics.sequoia_predicted == (1, 2, 3)
    assert "sequoia_predicted" not in metrics.to_dict()
