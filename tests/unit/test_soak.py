"""The soak's requests are the same for the same seed, and what is wrong with answers is said."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from random import Random
from types import SimpleNamespace

import httpx
import openai
import pytest

import benchmarks.soak
from benchmarks.soak import Sample, Soaking, refused_request
from tests.support.soak.over_http import Tally, compare
from tests.support.soak.random_requests import STRUCTURED, random_requests
from tests.support.soak.server_errors import logged_errors

TEXTS = [f"def f{number}(" for number in range(8)]
FAULTS = {
    "max_tokens", "temperature", "prompt", "model", "structured_outputs", "vllm_xargs",
}  # fmt: skip
LOG = """(APIServer pid=7) INFO 11-30 08:12:01 [loggers.py:259] Engine 000: Running: 3 reqs
(EngineCore pid=9) ERROR 11-30 08:12:02 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-30 08:12:02 [core.py:1100] ValueError: 3 masks of grammars
(APIServer pid=7) INFO:     127.0.0.1:5112 - "POST /v1/completions HTTP/1.1" 500
(EngineCore pid=9) Traceback (most recent call last):
(EngineCore pid=9)   File "core.py", line 8, in run
(EngineCore pid=9) ValueError: 3 masks of grammars
(APIServer pid=7) INFO 11-30 08:12:03 [launcher.py:9] Shutting down
"""


def test_requests_are_those_of_their_seed_and_of_every_kind():
    found = random_requests(TEXTS, 400, seed=5, vocabulary=4096)
    assert found == random_requests(TEXTS, 400, seed=5, vocabulary=4096)
    assert found != random_requests(TEXTS, 400, seed=6, vocabulary=4096)
    assert {str(one.structured) for one in found} == {"None", *map(str, STRUCTURED)}
    assert {one.parameters["temperature"] > 0 for one in found} == {True, False}
    assert {one.most_drafts for one in found} == {None, 0, 1, 3, 7}
    assert 5 < sum(one.leaves is not None for one in found) < 40
    assert all(a.arrives <= b.arrives for a, b in pairwise(found))
    allowed = [len(one.parameters.get("allowed_token_ids", [])) for one in found]
    assert max(allowed) == 1024


def test_a_wrong_request_names_what_is_wrong_in_it():
    right = {"model": "some", "prompt": "def f("}
    source, seen = Random(1), set()
    for _ in range(200):
        fault, body = refused_request(source, "some")
        assert body[fault] != right.get(fault)
        assert {**body, fault: None} == {**right, fault: None}
        seen.add(fault)
    assert seen == FAULTS


ASKED = httpx.Request("POST", "http://some/v1/completions")


class Answering:
    """An endpoint that gives some requests other tokens the first time, or each time, or none.

    Some requests end with an error of the server's, or of the connection.
    """

    def __init__(self, once=(), always=(), silent=(), failing=(), lost=()) -> None:
        self.once, self.always, self.silent = set(once), always, silent
        self.failing, self.lost = failing, lost
        self.left = []

    async def answer(self, request):
        if request.number in self.silent:
            raise openai.APITimeoutError(ASKED)
        if request.number in self.failing:
            response = httpx.Response(500, request=ASKED)
            raise openai.InternalServerError("no engine", response=response, body=None)
        if request.number in self.lost:
            raise httpx.RemoteProtocolError("cut off")
        differs = request.number in self.always or request.number in self.once
        self.once.discard(request.number)
        return [([request.number, int(differs)], "text", "stop", None)]

    async def leave(self, request):
        self.left.append(request.number)


def test_answers_that_differ_again_when_alone_are_told():
    requests = [replace(r, leaves=None) for r in random_requests(TEXTS, 12, 1, 4096)]
    requests[3] = replace(requests[3], leaves=2)
    ours, tally = Answering(once=[5], always=[7, 9], silent=[11]), Tally()
    asyncio.run(compare(ours, Answering(), requests, tally))
    assert [one.number for one in tally.different] == [7, 9]
    assert [one.number for one in tally.hung] == [11]
    assert (tally.answered, tally.left, ours.left) == (10, 1, [3])
    assert tally.tokens == 2 * (10 + 3)  # three were asked for again


@pytest.mark.parametrize(("status", "is_wrong"), [(400, False), (404, False), (200, True)])
def test_its_report_has_requests_that_were_not_refused_and_what_grew(
    status, is_wrong, monkeypatch, tmp_path
):
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json={}))
    monkeypatch.setattr("benchmarks.soak.httpx.Client", partial(httpx.Client, transport=transport))
    server = SimpleNamespace(url="http://some", model="some", metric=lambda _: [3.0])
    soaking = Soaking(server, server, tmp_path, Random(2))
    for _ in range(60):
        soaking._be_refused()
    for place in range(30):
        same = Sample(place, 100.0, 50, 9, 2.0)
        soaking.samples["plain"].append(same)
        soaking.samples["ours"].append(replace(same, handles=50 + place))
    report = soaking.report()
    *others, grew = report["wrong"]
    assert grew.startswith("handles grew by 60.0 an hour")
    expected = {f"a wrong {fault} gave {status}, not 400" for fault in FAULTS}
    assert set(others) == (expected if is_wrong else set())
    assert report["refused"] == 60


def test_requests_that_fail_are_told_and_the_others_still_sent():
    requests = [replace(r, leaves=None) for r in random_requests(TEXTS, 12, 1, 4096)]
    ours, tally = Answering(always=[7], failing=[2], lost=[4]), Tally()
    asyncio.run(compare(ours, Answering(failing=[9]), requests, tally))
    assert tally.answered == 9
    assert len(tally.different) == 1
    found = sorted(tally.failed)
    failed = "http://some/v1/completions: InternalServerError: no engine"
    assert [one.partition(": {")[0] for one in found] == [
        "a stream: RemoteProtocolError: cut off", failed, failed,
    ]  # fmt: skip
    assert str(requests[2]) in "".join(found)


def test_errors_are_read_from_a_log_with_their_tracebacks():
    lines = LOG.splitlines()
    assert logged_errors(LOG) == [*lines[1:3], *lines[4:7]]
    assert logged_errors("") == []


@pytest.mark.parametrize("ends", [False, True])
def test_of_a_round_that_went_wrong_the_report_has_what_the_server_logged(
    ends, monkeypatch, tmp_path
):
    """And only of this round; a server that ended ends the soak, and the report is still made."""
    ours = SimpleNamespace(url="http://some", model="some", log="ERROR of an earlier round\n")
    plain = SimpleNamespace(url="http://other", model="some", log="")
    soaking, rounds = Soaking(ours, plain, tmp_path, Random(2)), []

    def fail(self):
        rounds.append(len(rounds))
        if len(rounds) < 2:
            return
        ours.log += LOG
        self._tally.failed.append("http://some/v1: InternalServerError: no engine: {}")
        if ends:
            raise httpx.ConnectError("refused")

    monkeypatch.setattr(Soaking, "round", fail)
    assert [soaking.checked_round() for _ in range(2)] == [True, not ends]
    report = soaking.report()
    about, *logged = report["logged where something went wrong"]
    assert "MiB free" in about
    assert logged == [f"ours: {line}" for line in logged_errors(LOG)]
    failed = "failed: ours/v1: InternalServerError: no engine: {}"
    ended = ["it ended early: ConnectError: refused"] * ends
    assert report["wrong"] == [*ended, failed]
    assert report["failed"] == 1


def test_a_soak_that_is_stopped_has_written_what_it_saw(monkeypatch, tmp_path):
    """After the second round, amid the third."""
    server = SimpleNamespace(url="http://some", model="some", log="")
    same, number = Sample(1.0, 100.0, 50, 9, 2.0), count()

    def sample_or_stop(self):
        if next(number) == 2:
            raise KeyboardInterrupt
        for rows in self.samples.values():
            rows.append(same)

    monkeypatch.setattr(Soaking, "round", sample_or_stop)
    servers = nullcontext((server, server))
    monkeypatch.setattr(benchmarks.soak, "both_servers", lambda *_: servers)
    out = tmp_path / "soak.json"
    with pytest.raises(KeyboardInterrupt):
        benchmarks.soak.soak(9.0, pause=0, rehearse=False, seed=0, out=out, logs=tmp_path)
    found = json.loads(out.read_text("utf-8"))
    assert [len(rows) for rows in found["samples"].values()] == [2, 2]
    assert found["wrong"] == []
    assert "git" in found["provenance"]
    assert not list(tmp_path.glob("*.partial"))
