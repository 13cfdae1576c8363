"""``vllm serve`` with Sequoia, called with the openai client, answers as plain vLLM does.

It is started from the shorthand, and the last test ends it.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import openai
import pytest

from sequoia_vllm.adaptation.told_branches import MOST_TOLD
from tests.support.ending import wait_until
from tests.support.models import prompts
from tests.support.serving import DRAFT, ROOT, VLLM, Server, environment
from tests.support.soak.over_http import Tally, compare_all
from tests.support.soak.random_requests import CHOICE, REGEX, SCHEMA, random_requests

pytestmark = pytest.mark.engine

PROMPTS = prompts(8)
GREEDY = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 64}
SEEDED = {"prompt": PROMPTS[1], "temperature": 0.8, "seed": 7, "max_tokens": 64}
REQUESTS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "top_p": {**SEEDED, "top_p": 0.8, "extra_body": {"top_k": 40}},
    "min_p": {**SEEDED, "temperature": 1.0, "extra_body": {"min_p": 0.1}},
    "logit_bias": {**GREEDY, "logit_bias": {"300": 5, "330": -100}},
    "logit_bias_seeded": {**SEEDED, "logit_bias": {"300": 5, "330": -100}},
    "penalties": {
        **SEEDED, "frequency_penalty": 0.5, "presence_penalty": 0.3,
        "extra_body": {"repetition_penalty": 1.1},
    },
    "two_answers": {**SEEDED, "n": 2},
    "several_prompts": {**GREEDY, "prompt": PROMPTS[2:6]},
    "stop_strings": {**GREEDY, "prompt": PROMPTS[6], "stop": ["\n\n", "self"], "max_tokens": 120},
    "ends": {**GREEDY, "max_tokens": 400, "extra_body": {"stop_token_ids": list(range(300, 330))}},
    "to_the_limit": {**GREEDY, "max_tokens": 450, "extra_body": {"ignore_eos": True}},
    "no_drafts": {**GREEDY, "extra_body": {"vllm_xargs": {"sequoia_max_drafts": 0}}},
    "few_drafts": {**SEEDED, "extra_body": {"vllm_xargs": {"sequoia_max_drafts": 3}}},
    "logprobs": {**GREEDY, "logprobs": 3},
    "logprobs_seeded": {**SEEDED, "logprobs": 1},
    "regex": {**GREEDY, "extra_body": {"structured_outputs": {"regex": REGEX}}},
    "choice": {**SEEDED, "extra_body": {"structured_outputs": {"choice": CHOICE}}},
    "json_schema": {
        **GREEDY,
        "extra_body": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA},
            }
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    """Sequoia's server and a plain one, otherwise with the same options."""
    folder = tmp_path_factory.mktemp("servers")
    template = folder / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    common = (
        f"--chat-template={template}",
        # The embedded target would fill its answers with spaces where JSON allows them.
        '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
    )
    # With a worker's process to be ended.
    ending = ("--shutdown-timeout=120", "--distributed-executor-backend=mp")
    # As the word sequoia alone, but counted trees are to go on: here they do not pay.
    config = '--speculative-config={"method": "sequoia", "adapt": false}'
    ours = Server(folder / "sequoia.log", *common, *ending, config)
    # Plain vLLM stops on CPUs where a seeded prompt is read in chunks.
    plain = Server(folder / "plain.log", *common, "--max-num-batched-tokens=8192", forks=True)
    with ours, plain:
        yield ours, plain


@pytest.fixture(scope="module")
def server(servers) -> Server:
    return servers[0]


@pytest.fixture(scope="module")
def plain_answer(servers) -> Callable:
    """Plain vLLM's answer to the request of this name, asked for once."""
    known: dict[str, dict] = {}

    def answered(name: str) -> dict:
        if name not in known:
            known[name] = answer(servers[1], REQUESTS[name])
        return known[name]

    return answered


def answer(server: Server, request: dict) -> dict:
    """Everything in the answer that does not name the request: texts, tokens, ends, usage."""
    body = {**request.get("extra_body", {}), "return_token_ids": True}
    completion = server.complete(**{**request, "extra_body": body})
    return completion.model_dump(include={"choices", "usage"})


def texts(answered: dict) -> list[str]:
    return [choice["text"] for choice in answered["choices"]]


def assert_same(found: dict, expected: dict) -> None:
    """Equal, but for the rounding of log-probabilities."""
    assert found["usage"] == expected["usage"]
    for ours, plain in zip(found["choices"], expected["choices"], strict=True):
        assert ours["token_ids"] == plain["token_ids"]
        assert {**ours, "logprobs": None} == {**plain, "logprobs": None}
        assert (ours["logprobs"] is None) == (plain["logprobs"] is None)
        if plain["logprobs"] is not None:
            for key in ("tokens", "text_offset"):
                assert ours["logprobs"][key] == plain["logprobs"][key]
            close = pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
            assert ours["logprobs"]["token_logprobs"] == close
            tops = (ours["logprobs"]["top_logprobs"], plain["logprobs"]["top_logprobs"])
            for our_top, plain_top in zip(*tops, strict=True):
                assert our_top == pytest.approx(plain_top, abs=1e-4)


@pytest.mark.parametrize("name", REQUESTS)
def test_answer_is_plain_vllms(name, server, plain_answer):
    assert_same(answer(server, REQUESTS[name]), plain_answer(name))


def test_requests_that_should_differ_do(server):
    """The options compared above are no mere decoration: each changes the answer."""
    greedy = texts(answer(server, GREEDY))
    for name in ("logit_bias", "regex", "json_schema"):
        assert texts(answer(server, REQUESTS[name])) != greedy
    seeded = texts(answer(server, SEEDED))
    assert texts(answer(server, {**SEEDED, "seed": 8})) != seeded
    first, second = texts(answer(server, REQUESTS["two_answers"]))
    assert first != second


@pytest.mark.parametrize("name", ["greedy", "seeded", "stop_strings", "two_answers", "regex"])
def test_stream_adds_up_to_the_answer(name, server, plain_answer):
    request = REQUESTS[name]
    expected = plain_answer(name)
    streamed = [""] * len(expected["choices"])
    ends: list[str | None] = [None] * len(streamed)
    pieces = 0
    usage = None
    options = {"include_usage": True}
    for chunk in server.complete(**request, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
            pieces += 1
    assert streamed == texts(expected)
    assert ends == [choice["finish_reason"] for choice in expected["choices"]]
    assert usage.completion_tokens == expected["usage"]["completion_tokens"]
    assert pieces > 1


def test_many_at_once(server, plain_answer):
    """Twice every request, between unseeded ones, more than fit in a batch: the same answers."""
    noise = {"prompt": PROMPTS[7], "temperature": 1.0, "max_tokens": 48}
    expected = {name: plain_answer(name) for name in REQUESTS}
    names = [*REQUESTS, *reversed(REQUESTS)]
    with ThreadPoolExecutor(max_workers=12) as pool:
        jobs = []
        for name in names:
            jobs.append(pool.submit(answer, server, REQUESTS[name]))
            jobs.append(pool.submit(answer, server, noise))
        answers = [job.result() for job in jobs]
    for name, found in zip(names, answers[::2], strict=True):
        assert_same(found, expected[name])
    assert len({texts(found)[0] for found in answers[1::2]}) > 1


def test_chat(servers):
    messages = [{"role": "user", "content": PROMPTS[0]}]
    ours, plain = (
        server.client.chat.completions.create(
            model=server.model, messages=messages, temperature=0, max_tokens=48
        )
        for server in servers
    )
    assert ours.choices[0].message.content
    assert ours.choices[0].message.content == plain.choices[0].message.content
    assert ours.usage == plain.usage


def test_metrics_count_drafts_and_accepted_tokens(servers):
    server, plain = servers

    def counts(what: str) -> list[float]:
        return server.metric(f"vllm:spec_decode_num_{what}_total")

    server.wait_until_idle()
    sums = ("drafts", "draft_tokens", "accepted_tokens")
    before = [counts(what)[0] for what in sums]
    levels_before = counts("accepted_tokens_per_pos")
    request = {**GREEDY, "max_tokens": 65, "extra_body": {"ignore_eos": True}}
    assert answer(server, request)["usage"]["completion_tokens"] == 65
    server.wait_until_idle()

    drafts, draft_tokens, accepted = np.subtract([counts(what)[0] for what in sums], before)
    levels = np.subtract(counts("accepted_tokens_per_pos"), levels_before).tolist()
    # The prefill brings the first token, a step one more than it accepts; the
    # last step may accept past the end.
    assert 64 <= drafts + accepted <= 64 + len(levels)
    assert accepted > drafts  # 1.7 per step measured
    [info] = [s for s in server.samples() if s.name == "sequoia:tree_info"]
    depth = int(info.labels["depth"])
    assert len(levels) == depth
    assert drafts < draft_tokens <= max(int(info.labels["size"]) - 1, MOST_TOLD) * drafts
    # The answer repeats itself: tokens of a branch below the tree's last level have none of their
    # own.
    assert 0 <= accepted - sum(levels) <= levels[-1] * (MOST_TOLD - depth)
    assert levels == sorted(levels, reverse=True)  # a path has a node on each level
    assert 0 < levels[0] <= drafts
    assert plain.metric("vllm:spec_decode_num_drafts_total") == []
    assert server.metric("sequoia:trees_total") == counts("drafts")
    assert not any(sample.name.startswith("sequoia:") for sample in plain.samples())
    assert "Sequoia" not in plain.log


def test_latency_between_tokens_counts_steps_and_time_per_token_tokens(server):
    """As docs/metrics.md says: what to compare with plain vLLM is the time per output token."""
    steps, per_token = "vllm:inter_token_latency", "vllm:request_time_per_output_token"
    names = [f"{name}_seconds_{what}" for name in (steps, per_token) for what in ("count", "sum")]
    names.append("vllm:spec_decode_num_drafts_total")

    def values() -> list[float]:
        server.wait_until_idle()
        return [sum(server.metric(name)) for name in names]

    before = values()
    answer(server, {**GREEDY, "max_tokens": 65, "extra_body": {"ignore_eos": True}})
    count, seconds, requests, each, drafts = np.subtract(values(), before)
    assert 1 < drafts <= count < 40
    assert requests == 1
    assert each * 64 == pytest.approx(seconds)


def test_interval_line_is_in_the_log(server):
    """Beside vLLM's own, at its interval."""
    answer(server, GREEDY)
    pattern = (
        r"Sequoia: engine 000: up to \d+ drafts, depth \d+.*; \d\.\d\d tokens per step; accepted"
    )
    wait_until(lambda: re.search(pattern, server.log), 20, "a line about trees in the log")
    rates = re.findall(
        r"SpecDecoding metrics: .* Per-position acceptance rate: (.*), Avg", server.log
    )
    [info] = [s for s in server.samples() if s.name == "sequoia:tree_info"]
    assert {len(each.split(", ")) for each in rates} == {int(info.labels["depth"])}


def test_random_requests(servers):
    """More than fit in a batch; all tokens are counted, and nothing of the requests stays."""
    ours, plain = servers
    ours.wait_until_idle()
    count = int(os.environ.get("SEQUOIA_VLLM_SOAK", "80"))
    requests = random_requests(prompts(32), count, seed=7, vocabulary=4096)
    requests = [replace(request, leaves=None) for request in requests]
    # What a stop string cuts off a step's tokens, vLLM counts, and does not return.
    cut = [request for request in requests if "stop" in request.parameters]
    whole = [request for request in requests if "stop" not in request.parameters]
    [before] = ours.metric("vllm:generation_tokens_total")
    tally = Tally()
    compare_all(ours, plain, whole, tally)
    [after] = ours.metric("vllm:generation_tokens_total")
    assert after - before == tally.tokens > 1000
    leaving = [replace(request, leaves=2) for request in whole[:12]]
    compare_all(ours, plain, [*cut, *leaving], tally)
    assert (tally.answered, tally.left) == (len(requests), len(leaving))
    assert tally.failed == tally.hung == []
    assert not tally.different, "\n".join(map(str, tally.different))


def test_vllms_benchmark_of_servers(server, tmp_path):
    """It counts every token, and reads what it shows of drafts from the server's metrics."""
    command = (
        f"bench serve --backend=openai --base-url={server.url} --endpoint=/v1/completions "
        f"--model={server.model} --dataset-name=random --random-input-len=32 "
        "--random-output-len=24 --num-prompts=20 --request-rate=50 --ignore-eos "
        f"--save-result --result-filename={tmp_path / 'result.json'}"
    )
    done = subprocess.run(
        [str(VLLM), *command.split()], env=environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (20, 0)
    assert result["total_output_tokens"] == 20 * 24
    assert result["spec_decode_num_drafts"] > 0
    assert 1 < result["spec_decode_acceptance_length"] <= 24


def test_client_that_leaves_does_no_harm(server, plain_answer):
    """A request aborted between two trees gives back its place and its cache."""
    server.wait_until_idle()
    # Many at once, so that they are not done before anyone has looked.
    leaving = {**REQUESTS["to_the_limit"], "prompt": PROMPTS[:8] * 4}
    running = 0.0
    for _ in range(5):  # on a busy machine they may be done before this process looks
        [before] = server.metric("vllm:generation_tokens_total")
        with server.complete(**leaving, stream=True) as stream:
            for _ in range(8):
                next(stream)
            [running] = server.metric("vllm:num_requests_running")
        server.wait_until_idle()
        if running > 0:
            break
    assert running > 0
    assert server.metric("vllm:kv_cache_usage_perc") == [0]
    [after] = server.metric("vllm:generation_tokens_total")
    assert after - before < 32 * leaving["max_tokens"]  # they were cut short
    assert_same(answer(server, GREEDY), plain_answer("greedy"))


def test_a_request_without_drafts_has_no_trees(server):
    before = server.metric("sequoia:trees_total")
    answer(server, REQUESTS["no_drafts"])
    server.wait_until_idle()
    assert server.metric("sequoia:trees_total") == before
    counted = {
        sample.labels["reason"]: sample.value
        for sample in server.samples()
        if sample.name == "sequoia:undrafted_requests_total"
    }
    assert counted["asked"] >= 1


def test_requests_that_the_pages_show_are_answered(server):
    def block(page: str, language: str) -> str:
        found = re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
        assert len(found) == 1
        return found[0]

    code = block("examples/README.md", "py")
    assert "http://localhost:8000" in code
    exec(code.replace("http://localhost:8000", server.url), {})  # it raises where it is refused
    request = json.loads(block("docs/requests.md", "json"))
    assert texts(server.complete(prompt=request.pop("prompt"), extra_body=request).model_dump())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"vllm_xargs": {"sequoia_max_drafts": -1}}, "sequoia_max_drafts"),
        ({"vllm_xargs": {"sequoia_maxdrafts": 2}}, "sequoia_max_drafts"),
    ],
)
def test_bad_request_is_refused_by_name_and_the_server_goes_on(server, plain_answer, wrong, named):
    with pytest.raises(openai.BadRequestError, match=named):
        server.complete(**{**GREEDY, "extra_body": wrong})
    assert_same(answer(server, GREEDY), plain_answer("greedy"))


def test_log_names_the_draft_and_the_tree(server):
    [line] = [line for line in server.log.splitlines() if "Sequoia: draft model" in line]
    assert DRAFT in line
    assert re.search(r"up to \d+ drafts, depth \d+", line)


def test_sigterm_with_a_request_under_way(servers):
    """The answer that is being streamed is still completed, token for token as plain vLLM's."""
    server, plain = servers
    request = {**REQUESTS["to_the_limit"], "max_tokens": 400}
    [expected] = texts(answer(plain, request))
    server.wait_until_idle()
    family = server.process.children(recursive=True)
    [accepted_before] = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    for _ in range(5):  # on a busy machine it may be done before this process looks
        stream = server.complete(**request, stream=True)
        text = "".join(next(stream).choices[0].text for _ in range(8))
        running_now = server.metric("vllm:num_requests_running")
        if running_now == [1]:
            break
    [accepted] = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    server.process.send_signal(signal.SIGTERM)
    text += "".join(chunk.choices[0].text for chunk in stream)
    server.check_clean_end(family)
    assert text == expected
    assert running_now == [1]  # it was under way, indeed
    assert accepted > accepted_before
