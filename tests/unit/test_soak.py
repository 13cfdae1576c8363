"""The soak's requests are the same for the same seed, and what is wrong with answers is said."""

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import httpx
import openai
import pytest

from benchmarks.soak import Sample, Soaking, refused_request
from tests.support.soak.over_http import Tally, compare
from tests.support.soak.random_requests import STRUCTURED, random_requests

TEXTS = [f"def f{number}(" for number in range(8)]
FAULTS = {
    "max_tokens", "temperature", "prompt", "model", "structured_outputs", "vllm_xargs",
}  # fmt: skip


def test_requests_are_those_of_their_seed_and_of_every_kind():
    found = random_requests(TEXTS, 400, seed=5, vocabulary=4096)
    assert found == random_requests(TEXTS, 400, seed=5, vocabulary=4096)
    assert found != random_requests(TEXTS, 400, seed=6, vocabulary=4096)
    assert {str(one.structured) for one in found} == {"None", *map(str, STRUCTURED)}
    assert {one.parameters["temperature"] > 0 for one in found} == {True, False}
    assert {one.most_drafts for one in found} == {None, 0, 1, 3, 7}
    assert 5 < sum(one.leaves is not None for one in found) < 40
    assert all(a.arrives <= b.arrives for a, b in pairwise(found))


def test_a_wrong_request_names_what_is_wrong_in_it():
    right = {"model": "some", "prompt": "def f("}
    source, seen = Random(1), set()
    for _ in range(200):
        fault, body = refused_request(source, "some")
        assert body[fault] != right.get(fault)
        assert {**body, fault: None} == {**right, fault: None}
        seen.add(fault)
    assert seen == FAULTS


class Answering:
    """An endpoint that gives some requests other tokens the first time, or each time, or none."""

    def __init__(self, once=(), always=(), silent=()) -> None:
        self.once, self.always, self.silent = set(once), always, silent
        self.left = []

    async def answer(self, request):
        if request.number in self.silent:
            raise openai.APITimeoutError(httpx.Request("POST", "http://some"))
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
