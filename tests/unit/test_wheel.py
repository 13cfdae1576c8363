"""The demo: its models in an installed wheel or a clone, and what it prints."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("torch")
from sequoia_vllm import checkout
from sequoia_vllm.bench.measure import EngineCase, RoundRun, Steady
from sequoia_vllm.bench.methods import SERVED, plain, sequoia
from sequoia_vllm.bench.report import Result, Spread
from sequoia_vllm.cli import app, demo
from sequoia_vllm.cli.demo import MODELS, answers_shown, chat_pair, shipped_models, summary

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INCLUDED = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]


def test_the_demos_models_are_in_the_wheel_where_it_looks_for_them(tmp_path):
    assert ROOT / "examples" / "models" == MODELS
    package = tmp_path / "site-packages" / "sequoia_vllm"
    [place] = {
        (package.parent / INCLUDED[f"examples/models/{name}"]).parent
        for name in ("target", "draft", "prompts.jsonl")
    }
    assert shipped_models(package) != place
    place.mkdir(parents=True)
    assert shipped_models(package) == place


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone with a draft for SmolLM2, in which an installed package is run."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "sequoia-vllm"\n', "utf-8")
    monkeypatch.setattr(checkout, "_PACKAGE", Path("/nowhere/sequoia_vllm"))
    monkeypatch.chdir(tmp_path)
    draft = tmp_path / "examples" / "models" / "smollm2-draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(demo.platformdirs, "user_cache_dir", lambda *_, **__: tmp_path)
    return tmp_path


def fetching(code: int, error: str = ""):
    def run(command, cwd, **_):
        target = Path(command[command.index("--out") + 1])
        if code == 0:
            target.mkdir()
            (target / "origin.json").write_text("{}", encoding="utf-8")
        return subprocess.CompletedProcess(command, code, "", error)

    return run


def test_a_checkout_is_found_from_below_it_and_from_within(clone, monkeypatch):
    assert checkout.find_checkout() == clone
    monkeypatch.chdir(clone / "examples" / "models")
    assert checkout.find_checkout() == clone
    monkeypatch.chdir("/")
    assert checkout.find_checkout() is None
    monkeypatch.undo()
    monkeypatch.chdir("/")
    assert checkout.find_checkout() == ROOT


def test_another_project_is_no_checkout(clone):
    (clone / "pyproject.toml").write_text('[project]\nname = "other"\n', "utf-8")
    assert checkout.find_checkout() is None


def test_what_only_a_checkout_has_says_so(clone, monkeypatch):
    monkeypatch.chdir("/")
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert "in a checkout of" in done.stderr
    assert done.stderr.count("\n") == 1


class TestChatPair:
    def test_the_model_is_fetched_once(self, clone, monkeypatch, capsys):
        monkeypatch.setattr(demo.subprocess, "run", fetching(0))
        first = chat_pair()
        assert first.target == str(clone / "smollm2-135m-instruct")
        assert first.draft == str(clone / "examples" / "models" / "smollm2-draft")
        assert (first.prompts, first.tree) == (None, SERVED)
        assert "once: 93 MB" in capsys.readouterr().err
        monkeypatch.setattr(demo.subprocess, "run", None)
        assert chat_pair() == first
        assert capsys.readouterr().err == ""

    def test_offline_one_line_says_why_and_what_else_there_is(self, clone, monkeypatch, capsys):
        error = "downloading\nerror: offline: no index answers;\n  name the file with --source\n"
        monkeypatch.setattr(demo.subprocess, "run", fetching(1, error))
        with pytest.raises(typer.Exit):
            chat_pair()
        last = capsys.readouterr().err.splitlines()[-1]
        assert "cannot be had (offline: no index answers; name the file with --source)" in last
        assert "--small-pair" in last


def test_answers_are_shown_while_others_are_measured(capsys):
    """Once for each engine, greedy; markup in them is text."""
    show, greedy = answers_shown(["Why?", "How?"]), EngineCase(1, 0.0)
    steady = Steady([1], 1, 0.5, 1)
    one = RoundRun(steady, [[1], [2]], ["\nA fox [bold] swims.", "So."], {}, None)
    for method, case in (
        (plain(), greedy), (plain(), greedy), (sequoia("d", SERVED), greedy),
        (plain(), EngineCase(1, 0.7)),
    ):  # fmt: skip
        show(method, case, one)
    assert capsys.readouterr().err.splitlines() == [
        "plain vLLM, 2 tokens/s: Why? A fox [bold] swims.",
        "Sequoia, 2 tokens/s: Why? A fox [bold] swims.",
        "Sequoia, 2 tokens/s: How? So.",
    ]


def measured(method: str, low: float, median: float, high: float, drafted=1.0) -> Result:
    spread = Spread(low=low, median=median, high=high)
    return Result.model_construct(
        method=method, speedup=spread, best_chain="chain" in method, drafted=drafted
    )


@pytest.mark.parametrize(
    ("speed", "identical", "words"),
    [
        (1.5, True, "1.50x as fast as plain vLLM (1.40x to 1.60x), vLLM's best chain "),
        (1.5, True, "chain of 2 1.20x, and its greedy answers are plain vLLM's, token"),
        (0.8, True, "which is slower, vLLM's best chain of 2 1.20x"),
        (1.5, False, "which is an error"),
    ],
)
def test_the_last_sentence_says_what_was_gained(speed, identical, words):
    chain = measured("chain of 2", 1.2, 1.2, 1.2)
    slower = chain.model_copy(update={"method": "chain of 4", "best_chain": False})
    tree = measured("tree", speed - 0.1, speed, speed + 0.1)
    said = summary([slower, chain, tree], identical)
    assert words in said
    assert "chain of 4" not in said


def test_a_demo_without_drafts_claims_no_gain():
    said = summary([measured("tree", 1.1, 1.19, 1.3, drafted=0.0)], True)
    assert "as fast as plain vLLM, as it drafted nothing" in said
    assert "1.19x" not in said


def test_everything_that_is_included_is_there():
    assert all((ROOT / source).exists() for source in INCLUDED)
    for name in ("target", "draft"):
        assert (ROOT / "examples" / "models" / name / "model.safetensors").is_file()
