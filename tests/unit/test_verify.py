"""What `verify` concludes, without engines: answers, the law's test, the report, its options."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from sequoia_vllm.bench.methods import PLAIN
from sequoia_vllm.bench.verify import Verification, VerifySettings, _shown
from sequoia_vllm.cli.verify import _config, _vllm_options
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.verifying import report as reports
from sequoia_vllm.verifying.answers import Scored, compare, first_difference, measure_rounding
from sequoia_vllm.verifying.law import BY_DRAFT, FALSE_ALARM, chance_of, check_law, place_of
from sequoia_vllm.verifying.report import Outcome, Trees, VerifyReport
from tests.support.commands import command, in_words
from tests.support.models import DRAFT, TARGET

ROOT = Path(__file__).parents[2]
A, B = {1: -0.1, 2: -2.0}, {3: -0.2, 4: -1.7}


def test_rounding_is_of_margins_over_one_text():
    alone = Scored([1, 3, 5], [A, B, {5: -0.1, 6: -0.11}])
    # At the first difference the text before is the same; after it no more.
    batch = Scored([1, 4, 5], [{1: -0.1, 2: -2.25}, {4: -0.9, 3: -1.0}, {5: -0.1, 6: -9.0}])
    found = measure_rounding({"alone": [alone], "batch": [batch]})
    assert found.places == 2
    assert found.largest == pytest.approx(1.5 + 0.1)
    assert found.bound == pytest.approx(3.2)
    own = measure_rounding({"alone": [alone], "scored": [Scored([1], [A], [5.0])]})
    assert own.bound == 10.0


def test_every_token_counts_also_after_the_first_difference():
    plain = [Scored([1, 2, 3, 4], []), Scored([5, 6, 7, 8], [])]
    given = [Scored([1, 2, 3, 4], [], [0.0] * 4), Scored([5, 9, 9, 9], [], [0, 0.01, 0, 0.7])]
    found = compare("x", given, plain, 4)
    assert (found.answers, found.identical, found.tokens) == (2, 1, 8)
    assert found.first_differences == [0.01]
    assert found.largest_gap == 0.7
    assert found.passes(0.7)
    assert not found.passes(0.69)
    short = compare("x", [Scored([1, 2], [], [0.0, 0.0])], plain[:1], 4)
    assert not short.passes(9.0)
    assert not compare("x", [], [], 4).passes(9.0)
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_point_lies_within_its_tokens_length():
    likeliest = {7: math.log(0.5), 3: math.log(0.3)}
    assert place_of(7, likeliest, 0.5) == pytest.approx(0.25)
    assert place_of(3, likeliest, 0.5) == pytest.approx(0.65)
    assert place_of(99, likeliest, 0.5) == pytest.approx(0.9)  # of all others together


def test_chances_are_those_of_scipy():
    from scipy.special import chdtrc

    for freedom, statistic in ((19, 30.1), (24, 90.0), (1, 0.0)):
        assert chance_of(statistic, freedom) == pytest.approx(float(chdtrc(freedom, statistic)))


def drawn(law, rows: int, length: int, seed: int, how="right"):
    """Answers by a law over tokens, and by ways to draw wrongly."""
    chance, answers = random.Random(seed), []
    for row in range(rows):
        tokens = chance.choices(range(len(law)), law, k=length)
        if how == "twice":  # randomness is used again
            tokens = [token for token in tokens[: length // 2] for _ in range(2)]
        if how == "alike" and row % 2:
            tokens = answers[-1]
        answers.append(tokens)
    return answers


LAW, OTHER = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04], [0.36, 0.3, 0.15, 0.1, 0.05, 0.04]
SAID = {token: math.log(p) for token, p in enumerate(LAW[:4])}  # the others are one piece


def test_the_law_passes_as_often_as_stated():
    """And its p-values are uniform: a tenth of the runs are below 0.1 in each test."""
    low = 0
    for seed in range(200):
        answers = drawn(LAW, 64, 16, seed)
        found = check_law("x", answers, [[SAID] * 16] * 64, 2)
        assert [test.cells for test in found.tests] == [20, 25, 25]  # no draft to ask
        assert found.passed
        low += sum(test.p_value < 0.1 for test in found.tests)
    assert 30 <= low <= 90  # 60 are expected, with a standard deviation of 7.3


@pytest.mark.parametrize(("law", "how", "rows"), [
    (OTHER, "right", 1024), (LAW, "twice", 64), (LAW, "alike", 64),
])  # fmt: skip
def test_other_laws_fail(law, how, rows):
    answers = drawn(law, rows, 16, 1, how)
    found = check_law("x", answers, [[SAID] * 16] * rows, 2)
    assert found.p_value < FALSE_ALARM
    assert not found.passed


@pytest.mark.parametrize("lean", [0.0, 0.15])
def test_what_leans_to_the_draft_fails(lean):
    """Also where it is now to the likelier tokens, and now to the others: ranks do not show it."""
    said = {0: math.log(0.3), 1: math.log(0.3), 2: math.log(0.2), 3: math.log(0.2)}
    likes = [{0: -0.8, 1: -0.8}, {2: -0.8, 3: -0.8}]  # of drafts in two kinds of contexts
    answers, half = [], lean / 2
    for row in range(256):
        up = half if row % 4 < 2 else -half
        answers += drawn([0.3 + up, 0.3 + up, 0.2 - up, 0.2 - up], 1, 16, row)
    drafted = [
        [{**dict.fromkeys(range(4), -3.0), **likes[row % 4 // 2]}] * 16 for row in range(256)
    ]
    found = check_law("x", answers, [[said] * 16] * 256, 2, drafted)
    chances = {test.what: test.p_value for test in found.tests}
    assert chances["tokens by probability"] > 1e-3
    assert (chances[BY_DRAFT] < 1e-9) == (lean > 0)
    assert found.passed == (lean == 0)


def test_too_few_tokens_tell_nothing():
    found = check_law("x", drawn(LAW, 2, 4, 1), [[SAID] * 4] * 2, 2)
    assert found.tests == []
    assert not found.passed


# -- checks -------------------------------------------------------------------------------------


def test_checks_fail_where_they_should():
    rounding = measure_rounding({"a": [Scored([1], [A])], "b": [Scored([1], [A])]})
    wrong = compare("x", [Scored([2], [], [0.5])], [Scored([1], [])], 1)
    [check] = reports.check_answers(rounding, [wrong])
    assert check.outcome is Outcome.FAILED
    loud = rounding.model_copy(update={"largest": 0.9})
    [check] = reports.check_answers(loud, [wrong])
    assert check.outcome is Outcome.UNTOLD  # plain vLLM is as far from itself

    right, bad = (
        check_law(name, drawn(law, 512, 16, 3), [[SAID] * 16] * 512, 2)
        for name, law in (("right", LAW), ("bad", [0.2, 0.3, 0.2, 0.1, 0.1, 0.1]))
    )
    assert reports.check_laws(right, right).outcome is Outcome.PASSED
    assert reports.check_laws(bad, right).outcome is Outcome.FAILED
    assert reports.check_laws(bad, bad).outcome is Outcome.UNTOLD  # the control fails, too

    good, stale = Trees(trees=200, tokens=600), Trees(trees=200, tokens=500)
    assert reports.check_graphs(good, good).outcome is Outcome.PASSED
    assert reports.check_graphs(stale, good).outcome is Outcome.FAILED
    assert reports.check_graphs(stale, None).outcome is Outcome.OFF
    few = Trees(trees=9, tokens=20)
    assert reports.check_graphs(few, good).outcome is Outcome.UNTOLD
    assert reports.check_drafted({"a": good}).outcome is Outcome.PASSED
    assert reports.check_drafted({"a": Trees(trees=9, tokens=9)}).outcome is Outcome.UNTOLD
    grown = {"device": [1 << 33, (1 << 33) + (1 << 29)]}
    assert reports.check_memory(grown).outcome is Outcome.FAILED
    assert reports.check_memory({"device": [1 << 33, (1 << 33) + 9]}).outcome is Outcome.PASSED


def test_reports_of_users_are_in_the_table():
    text = (ROOT / "docs" / "supported.md").read_text(encoding="utf-8")
    rows = reports.table(ROOT / "docs" / "verified")
    assert rows in text
    assert ("No report was sent yet" in text) == (not rows)


def report(**changed) -> VerifyReport:
    fields = {
        "date": "2026-11-29", "device": "H100", "devices": 2,
        "target": {"name": "t", "hashes": {}}, "draft": {"name": "d", "hashes": {}},
        "options": {"dtype": "bfloat16"}, "rounding": {"largest": 0, "places": 1, "largest_gap": 0},
        "verdict": "failed",
        "checks": [{"name": "a", "outcome": "passed", "said": "x"},
                   {"name": "b", "outcome": "failed", "said": "x"},
                   {"name": "c", "outcome": "not told", "said": "x"}],
        "answers": [], "law": [], "speed": [], "memory": {}, "seconds": {},
        "provenance": {"versions": {"vllm": "0.33.0"}},
    }  # fmt: skip
    return VerifyReport.model_validate({**fields, **changed})


def test_a_file_becomes_a_row(tmp_path):
    report().save(tmp_path / "one.json")
    assert reports.table(tmp_path).splitlines()[2] == (
        "| t | d | 2 x H100 | bfloat16 | 0.33.0 | 2026-11-29 | 1 of 3 checks passed, failed: b, "
        "not told: c |"
    )
    (tmp_path / "two.json").write_text('{"schema": "other"}')
    with pytest.raises(reports.VerifyError, match="schema"):
        reports.table(tmp_path)


@pytest.mark.parametrize(("outcomes", "verdict", "code"), [
    (["passed", "does not apply"], "passed", 0),
    (["passed", "not told", "does not apply"], "not told", 3),
    (["not told", "failed"], "failed", 1),
])  # fmt: skip
def test_what_could_not_tell_is_no_success(outcomes, verdict, code, monkeypatch):
    checks = [
        {"name": f"check {row}", "outcome": outcome, "said": "x"}
        for row, outcome in enumerate(outcomes)
    ]
    given = report(checks=checks)
    given = given.model_copy(update={"verdict": reports.verdict_of(given.checks)})
    monkeypatch.setattr("sequoia_vllm.cli.verify.Verification.run", lambda _: given)
    words = ("verify", TARGET, "--draft-model", DRAFT)
    assert json.loads(command(*words, "--json", code=code).stdout)["verdict"] == verdict
    said = in_words(command(*words, code=code).stderr)
    assert ("could not tell: check 1" in said) == (code == 3)


@pytest.mark.parametrize(("limit", "prompts", "sizes"), [
    (64, 12, [1, 8]), (3, 12, [1, 3]), (64, 2, [1, 2]), (1, 12, [1]),
])  # fmt: skip
def test_speed_is_of_no_more_requests_than_run_at_once(limit, prompts, sizes, monkeypatch):
    """More would wait for others to end, and be timed with them."""
    settings = VerifySettings(
        TARGET, DRAFT, config={}, options={}, chain=None, prompts=([1, 2],) * prompts
    )
    warmed, timed = [], []
    engine = SimpleNamespace(
        method=PLAIN, tree=None, limits=lambda: {"max_num_seqs": limit}, drafts=lambda size: 0,
        generate=lambda batch, temperature, tokens: warmed.append(len(batch)),
    )  # fmt: skip
    monkeypatch.setattr(
        "sequoia_vllm.bench.verify.run_round",
        lambda engine, prompts, case, tokens: timed.append(case.batch_size),
    )
    verification = Verification(settings)
    verification._engine_name = "some"
    verification._time(engine)
    assert warmed == [case.batch_size for case in verification.found.runs] == sizes
    assert timed == [size for size in sizes for _ in range(settings.rounds)]


# -- options ------------------------------------------------------------------------------------


def test_options_are_vllms():
    words = "--tensor-parallel-size 2 --kv-cache-dtype fp8 --max-model-len 4k --enforce-eager"
    assert _vllm_options(words.split()) == {
        "tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "max_model_len": 4000,
        "enforce_eager": True,
    }  # fmt: skip
    done = command("verify", TARGET, "--draft-model", DRAFT, "--tensor-parallel", "x", code=2)
    assert "tensor-parallel" in in_words(done.stderr)


@pytest.mark.parametrize("given", ["sequoia", '{"method": "sequoia", "tree": "auto"}'])
def test_the_engine_under_test_drafts_whole_trees(given):
    options = _vllm_options(["--speculative-config", given])
    config = _config(TARGET, DRAFT, options)
    assert options == {}
    assert config["model"] == DRAFT
    settings = VerifySettings(
        TARGET, DRAFT, config=config, options={}, chain=None, prompts=([1, 2],)
    )
    whole = SequoiaConfig.parse(settings.whole_trees().speculative_config)
    assert (whole.tree, whole.adapts) == (None, False)
    assert whole.num_speculative_tokens_per_batch_size[0][:2] == (1, 1)
    served = SequoiaConfig.parse(settings.served().speculative_config)
    assert served.adapts
    # A tree of the user's is whole as it is: a longer schedule would be refused.
    own = VerifySettings(
        TARGET, DRAFT, config={**config, "tree": {"size": 4}}, options={}, chain=None,
        prompts=([1],),
    ).whole_trees().speculative_config  # fmt: skip
    assert "num_speculative_tokens_per_batch_size" not in own


def test_what_is_reported_has_no_folders():
    assert _shown({"a": [TARGET, 3, None], "b": "fp8"}) == {"a": ["target", 3, None], "b": "fp8"}
    assert json.dumps(_shown(TARGET)) == '"target"'
