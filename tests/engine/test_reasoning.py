"""Requests that think first have plain vLLM's answers, with trees, and grammars behind thoughts.

Also those whose rows are watched besides: logprobs of chosen tokens.
"""

import pytest

from tests.support.generating import check_logprobs
from tests.support.interpreted import call_on_v2
from tests.support.thinking import CHOSEN, CLOSING, KINDS, both_answers

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SIZES = {"V1": {"count": 6, "max_tokens": 48}, "V2": {"count": 2, "max_tokens": 28}}
# Interpreted kernels take their time.
ON_V2 = [
    "json after thinking", "json while it thinks", "chosen logprobs", "budget of 11", "no budget",
    "budget, then json",
]  # fmt: skip


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=pytest.mark.sharded)])
def answered(request, tmp_path_factory):
    if request.param == "V1":
        return both_answers(list(KINDS), **SIZES["V1"])
    return call_on_v2(both_answers, tmp_path_factory.mktemp("v2"), kinds=ON_V2, **SIZES["V2"])


@pytest.mark.parametrize("name", [*KINDS, "all"])
def test_answers_are_plain_vllms(name, answered):
    if name not in answered["plain"]:
        return  # asked on the other runner
    plain, trees = answered["plain"][name], answered["trees"][name]
    for what in ("tokens", "texts", "ends"):
        assert trees[what] == plain[what]
    check_logprobs(trees["logprobs"], plain["logprobs"])
    accepted = trees["counts"]["tokens"] - trees["counts"]["tree_steps"]
    assert accepted > 0.1 * trees["counts"]["tree_steps"] > 0, trees["counts"]
    assert answered["trees"]["undrafted"] == {}


def test_requests_think_and_then_follow_their_grammars(answered):
    """Else the test above would see nothing."""
    trees = answered["trees"]
    assert any('){"name":"' in text for text in trees["json after thinking"]["texts"])
    for tokens in trees["json while it thinks"]["tokens"]:
        assert CLOSING not in tokens
    for position in trees["chosen logprobs"]["logprobs"][0]:
        assert set(map(str, CHOSEN)) <= position.keys()
