"""OpenAI's field for predictions over HTTP, and a user's logits processors, with one server."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from sequoia_vllm.engine.core.prediction_option import MOST_PREDICTED, PREDICTION
from tests.support.models import prompts
from tests.support.processors import FOR_TREES
from tests.support.serving import ROOT, Server

pytestmark = pytest.mark.engine

PROMPTS = prompts(7)[3:]  # the answers to others repeat a line
TOKENS = 60
SECRET = "Xylophone"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("servers")
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    options = (
        "--middleware=sequoia_vllm.predicted_outputs",
        '--speculative-config={"method": "sequoia", "adapt": false}',
        f"--chat-template={template}", "--enable-log-requests",
        '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
        "--logits-processors", *FOR_TREES,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        server = Server(folder / "server.log", *options, forks=True)
    with server:
        yield server


def foretelling(text: str | None) -> dict[str, Any]:
    return {} if text is None else {"prediction": {"type": "content", "content": text}}


def asked(
    server: Server, kind: str, text: str | None = None, place: int = 0, **others: Any
) -> tuple[list[str], Any]:
    """The texts of an answer and its usage; `kind`: which of the two APIs, streamed or not."""
    streams = {"stream": True, "stream_options": {"include_usage": True}}
    options = {
        "model": server.model, "temperature": 0, "max_tokens": TOKENS,
        **(streams if "streamed" in kind else {}), **others,
    }  # fmt: skip
    if "chat" in kind:
        messages = [{"role": "user", "content": PROMPTS[place]}]
        create, options = server.client.chat.completions.create, {"messages": messages, **options}
        options |= foretelling(text)
    else:
        create, options = server.client.completions.create, {"prompt": PROMPTS[place], **options}
        options["extra_body"] = {**options.get("extra_body", {}), **foretelling(text)}
    found = create(**options)
    texts, usage = [""] * options.get("n", 1), None
    for piece in found if "streamed" in kind else [found]:
        usage = piece.usage or usage
        for choice in piece.choices:
            whole = getattr(choice, "delta", None) or getattr(choice, "message", None)
            texts[choice.index] += (whole.content if whole else choice.text) or ""
    return texts, usage


def edited(text: str) -> str:
    """Two changed places."""
    third = len(text) // 3
    return f"{text[:third]} {SECRET}{text[third : 2 * third]}{text[2 * third + 4 :]}"


def counts(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def same_but_counts(usage: Any, plain: Any) -> bool:
    """The prediction is no part of the prompt, nor of the answer."""
    left_out = {"completion_tokens_details"}
    return usage.model_dump(exclude=left_out) == plain.model_dump(exclude=left_out)


@pytest.mark.parametrize("kind", ["chat", "chat, streamed", "completions", "completions, streamed"])
def test_answers_stay_and_the_usage_counts(kind, server):
    [text], plain = asked(server, kind)
    assert plain.completion_tokens_details is None
    assert plain.completion_tokens == TOKENS
    found = {}
    for name, told in {
        "right": text, "edited": edited(text), "other": " ".join([SECRET] * 60)
    }.items():  # fmt: skip
        [again], usage = asked(server, kind, told)
        assert again == text, name
        assert same_but_counts(usage, plain)
        found[name] = counts(usage)
    # The last token may come without a tree; nothing is told behind the end. Trees had what others
    # told, as it was rejected.
    assert TOKENS - 1 <= found["right"][0] <= TOKENS
    assert found["right"][1] == 0
    assert 0.7 * TOKENS < found["edited"][0] < TOKENS - 1
    assert found["edited"][1] > 0
    assert found["other"][0] <= 2
    assert found["other"][1] > 0


@pytest.mark.parametrize("kind", ["completions", "chat, streamed"])
def test_counts_of_several_answers_are_added(kind, server):
    seeded = {"temperature": 0.8, "seed": 4, "n": 2}
    texts, plain = asked(server, kind, **seeded)
    assert texts[0] != texts[1]
    found, usage = asked(server, kind, texts[1], **seeded)
    assert found == texts
    assert same_but_counts(usage, plain)
    alone = 0.8 * TOKENS  # what the answer that was foretold has
    assert alone < counts(usage)[0] < 2 * TOKENS - 10
    assert counts(usage)[1] > 0


def test_a_schemas_answer_is_foretold_by_its_tokens(server):
    """A tool's last call as the prediction of its next one. Its text has other tokens by itself."""
    names = {"enum": ["weather", "population", "price"]}
    schema = {"type": "array", "items": names, "minItems": 6, "maxItems": 6}
    asks = {"type": "json_schema", "json_schema": {"name": "calls", "schema": schema}}
    answers, steps = [], []
    for told in ({}, {PREDICTION: "unlike it"}, None):
        options = {"vllm_xargs": {PREDICTION: answers[0].token_ids} if told is None else told}
        found = server.client.completions.create(
            model=server.model, prompt=PROMPTS[0], temperature=0, max_tokens=TOKENS,
            extra_body={"response_format": asks, "return_token_ids": True, **options},
        )  # fmt: skip
        answers += found.choices
        server.wait_until_idle()
        steps += server.metric("vllm:spec_decode_num_drafts_total")
    assert len(json.loads(answers[0].text)) == 6
    assert answers[0] == answers[1] == answers[2]
    wrong, right = np.diff(steps)
    assert 0 < right < 0.6 * wrong


def test_nothing_is_accepted_behind_a_stop_string(server):
    [text], _ = asked(server, "completions")
    stop = text[len(text) // 2 :].split()[1]
    for kind in ("completions", "completions, streamed"):
        [cut], plain = asked(server, kind, stop=[stop])
        assert len(cut) < len(text)
        [found], usage = asked(server, kind, text, stop=[stop])
        assert found == cut
        assert same_but_counts(usage, plain)
        assert plain.completion_tokens - 1 <= counts(usage)[0] <= plain.completion_tokens


def test_requests_at_once_have_their_own_counts(server):
    answers = [asked(server, "chat", place=place)[0][0] for place in range(4)]
    told = {"right": answers, "other": answers[1:] + answers[:1], "none": [None] * 4}
    jobs = [(name, place) for name in told for place in range(4)] * 2
    with ThreadPoolExecutor(max_workers=8) as pool:
        found = list(
            pool.map(
                lambda job: asked(server, "chat, streamed", told[job[0]][job[1]], job[1]), jobs
            )
        )
    for (name, place), ([text], usage) in zip(jobs, found, strict=True):
        assert text == answers[place]
        if name == "none":
            assert usage.completion_tokens_details is None
        else:
            assert (counts(usage)[0] > 0.8 * TOKENS) == (name == "right")


@pytest.mark.parametrize(
    ("field", "message"),
    [("a text", "prediction must be"), ({"type": "content", "content": 5}, "prediction must be"),
     ({"type": "content", "content": ""}, "prediction is empty"),
     ({"type": "content", "content": "a" * (8 * MOST_PREDICTED + 1)}, "of 524288 at most"),
     ({"type": "content", "content": "7 x " * (2 * MOST_PREDICTED)}, "of 65536 at most")],
)  # fmt: skip
@pytest.mark.parametrize("chats", [True, False])
def test_wrong_fields_are_refused(field, message, chats, server):
    body = {"prediction": field}
    with pytest.raises(openai.BadRequestError, match=message) as error:
        asked(server, "chat" if chats else "completions", extra_body=body)
    assert error.value.param in ("prediction", PREDICTION)


def test_the_log_names_no_foretold_text(server):
    asked(server, "chat", edited(asked(server, "chat")[0][0]))
    assert f"'{PREDICTION}': '<" in server.log
    assert SECRET not in server.log


def test_requests_of_the_page_are_answered(server, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/predicted-outputs.md").read_text("utf-8")
    [code] = re.findall(r"```py\n([^`]*openai[^`]*)```", page)
    [body] = re.findall(r"\ncurl [^`]* -d '(.*?)'\n", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("area.py").write_text("def area(w):\n    return w * w\n")
    exec(code.replace("http://localhost:8000", server.url), {})
    assert "accepted_prediction_tokens=" in capsys.readouterr().out
    url, body = f"{server.url}/v1/chat/completions", json.loads(body) | {"model": server.model}
    usage = httpx.post(url, json=body, trust_env=False, timeout=120).raise_for_status().json()
    assert "rejected_prediction_tokens" in usage["usage"]["completion_tokens_details"]


def test_processors_of_users_run_on_trees(server):
    """Asked for by requests; their tokens are those without drafts."""

    def answered(**options: Any) -> str:
        return asked(server, "completions", extra_body={"vllm_xargs": options})[0][0]

    expected = answered(without_last=3, sequoia_max_drafts=0)
    assert expected != answered(sequoia_max_drafts=0)
    server.wait_until_idle()
    [before] = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert answered(without_last=3) == expected
    server.wait_until_idle()
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total")[0] > before
