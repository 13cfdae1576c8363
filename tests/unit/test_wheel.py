"""The demo: its models in an installed wheel, and what it prints into files."""

import io
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("torch")
from sequoia_vllm.bench.report import Result, Spread
from sequoia_vllm.cli.demo import MODELS, disagreeing, shipped_models, shown_completion, summary

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


def test_in_a_file_a_completion_is_no_wider_than_its_text():
    """Where nothing limits lines, a table's must not be broken; a frame takes what there is."""
    file = io.StringIO()
    Console(file=file, width=10_000).print(shown_completion("def f(x):", "\n    return x[0]\n"))
    lines = file.getvalue().splitlines()
    assert any("return x[0]" in line for line in lines)
    assert max(map(len, lines)) < 100


def measured(method: str, low: float, median: float, high: float) -> Result:
    return Result.model_construct(method=method, speedup=Spread(low=low, median=median, high=high))


def test_one_disturbed_round_is_told_of():
    quiet, disturbed = measured("chain of 4", 0.95, 1.0, 1.09), measured("tree", 0.7, 0.71, 2.78)
    assert disagreeing([quiet, disturbed]) == ["tree: 0.70x to 2.78x"]


@pytest.mark.parametrize(
    ("speed", "identical", "dtype", "words"),
    [
        (1.5, True, "float32", "1.50x as fast as plain vLLM (1.40x to 1.60x in 3 rounds), and"),
        (0.8, True, "float32", "which is slower, and its greedy output is identical"),
        (1.5, False, "float32", "which is an error"),
        (1.5, False, "bfloat16", "as rounding in bfloat16 allows"),
    ],
)
def test_the_last_sentence_says_what_was_gained(speed, identical, dtype, words):
    tree = measured("tree", speed - 0.1, speed, speed + 0.1)
    assert words in summary(tree, 3, identical, dtype)


def test_everything_that_is_included_is_there():
    assert all((ROOT / source).exists() for source in INCLUDED)
    for name in ("target", "draft"):
        assert (ROOT / "examples" / "models" / name / "model.safetensors").is_file()


def test_the_heads_are_not_in_the_wheel():
    """The demo has no use for them."""
    assert "examples/models" not in INCLUDED
    assert not any("eagle3" in source or "dflash" in source for source in INCLUDED)


@pytest.mark.parametrize(
    "file", [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.*")]
)
def test_documents_install_what_pip_finds(file):
    """Until it is published."""
    assert "pip install 'sequoia-vllm" not in file.read_text(encoding="utf-8")
