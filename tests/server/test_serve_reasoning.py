"""``vllm serve`` with a reasoning parser and tools streams what plain vLLM does, with trees."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models import prompts
from tests.support.serving import Server
from tests.support.soak.random_requests import SCHEMA

pytestmark = pytest.mark.engine

OPENED_BY, OPENED_BY_ID = "<s>", "1"  # what opens a thought, by its parser
TOOL = {
    "type": "function",
    "function": {"name": "note", "description": "Notes it.", "parameters": SCHEMA},
}
CALLED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "note"}}}
ANSWERED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
}
KINDS: dict[str, dict[str, Any]] = {
    "tool, short of thought": {**CALLED, "extra_body": {"thinking_token_budget": 3}},
    "answer, short of thought": {**ANSWERED, "extra_body": {"thinking_token_budget": 3}},
    "text, short of thought": {"extra_body": {"thinking_token_budget": 6}},
    "thought that never ends": {"logit_bias": {"11": -100}},
    "text, without a thought": {"extra_body": {"thinking_token_budget": 0}},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    """Sequoia's server and a plain one, otherwise with the same options."""
    folder = tmp_path_factory.mktemp("servers")
    template = folder / "chat.jinja"
    template.write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}" + OPENED_BY
    )
    common = (
        f"--chat-template={template}",
        "--reasoning-parser=opened",
        "--reasoning-parser-plugin=tests/support/brackets.py",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
    )
    config = '--speculative-config={"method": "sequoia", "adapt": false}'
    ours = Server(folder / "sequoia.log", *common, config, forks=True)
    plain = Server(folder / "plain.log", *common, forks=True)
    with ours, plain:
        yield ours, plain


def streamed(server: Server, text: str, seed: int | None, request: dict) -> dict[str, Any]:
    """What the pieces add up to, and the usage.

    No request may write what opens a thought: where it comes with other tokens in a piece, vLLM's
    parser takes characters of theirs for its text. Which come together goes by the clock.
    """
    request = {**request, "logit_bias": {OPENED_BY_ID: -100, **request.get("logit_bias", {})}}
    pieces = server.client.chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": text}], max_tokens=64,
        temperature=0 if seed is None else 0.8, seed=seed, stream=True,
        stream_options={"include_usage": True}, **request,
    )  # fmt: skip
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": "", "end": None}
    for piece in pieces:
        for choice in piece.choices:
            delta = choice.delta
            found["content"] += delta.content or ""
            found["reasoning"] += getattr(delta, "reasoning", None) or ""
            for call in delta.tool_calls or ():
                found["calls"] += (call.function.name or "") + (call.function.arguments or "")
            found["end"] = choice.finish_reason or found["end"]
        found["usage"] = piece.usage and piece.usage.model_dump()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_streams_are_plain_vllms(name, servers):
    """And no answer has more tokens of thought than tokens."""
    before, every = servers[0].metric("vllm:spec_decode_num_accepted_tokens_total")[0], []
    for place, text in enumerate(prompts(4)):
        seed = place if place % 2 else None
        ours, plain = (streamed(server, text, seed, KINDS[name]) for server in servers)
        assert ours == plain
        thought = ours["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thought <= ours["usage"]["completion_tokens"]
        assert thought <= KINDS[name].get("extra_body", {}).get("thinking_token_budget", 64)
        assert bool(thought) == bool(ours["reasoning"])
        every.append(ours)
    assert servers[0].metric("vllm:spec_decode_num_accepted_tokens_total")[0] > before
    assert any(one["reasoning"] for one in every) == ("without" not in name)
    if "tool" in name:
        assert any(one["calls"] for one in every)
