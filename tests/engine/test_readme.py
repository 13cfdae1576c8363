"""The README and docs/ are true: their code runs, their commands work, links lead somewhere."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
import vllm
from typer.testing import CliRunner
from vllm import AsyncEngineArgs
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks.gpu import command as command_of_gpu
from examples import smollm2
from sequoia_vllm.cli import app
from sequoia_vllm.config import SequoiaConfig
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.offload import offload_of
from sequoia_vllm.hardware.roofline import Assumptions
from tests.engine.test_refusals import parsed
from tests.support.models import TARGET
from tests.support.train_drafter import SCRIPT, script_modules

ROOT = Path(__file__).parents[2]
NAMES = """
README.md CONTRIBUTING.md SECURITY.md THIRD_PARTY.md benchmarks/gpu/README.md
benchmarks/predictions.md examples/README.md examples/models/README.md
examples/models/smollm2-draft/README.md examples/observability/README.md
examples/smollm2/README.md examples/train_drafter/README.md trees/README.md
"""
FILES = [*(ROOT / name for name in NAMES.split()), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {file.relative_to(ROOT): file.read_text(encoding="utf-8") for file in FILES}
# History: its links lead somewhere, its commands are not run again.
NOTEBOOK = sorted((ROOT / "docs" / "notebook").glob("*.md"))
LINKED = TEXTS | {
    file.relative_to(ROOT): file.read_text(encoding="utf-8")
    for file in (*NOTEBOOK, ROOT / "examples" / "cluster.md")  # whose commands Ray's tests know
}
PREDICTIONS = TEXTS[Path("benchmarks/predictions.md")]
SCRIPTS = Path(sys.executable).parent
# Setting up is what CI itself does; the demo and the tests are not run within a test.
NOT_RUN = ("make ", "pip install")
# Commands that run engines, with less to do: a repeated option's last value counts.
_TUNE = "--max-tokens-total 300 --batch-sizes 1 --tokens 1,4 --context 64"
_BENCH = "--batch-sizes 1 --temperature 0 --trees 4x2 --chain 2 --num-prompts 1 --rounds 1"
SMALLER = {
    "tune": f"{_TUNE} --eager --kv-cache-gib 0.0625",
    "bench": f"{_BENCH} --max-tokens 16 --eager --kv-cache-gib 0.0625",
    "benchmarks.synthetic_target": "--params 30M",
}


def blocks(language: str) -> list[str]:
    found = [re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) for text in TEXTS.values()]
    return [block for of_text in found for block in of_text]


def commands() -> list[str]:
    joined = (re.sub(r"\\\n\s*", "", block) for block in blocks("console"))
    lines = [line for block in joined for line in block.splitlines()]
    return [line.removeprefix("$ ").split("  #")[0].split("   #")[0].strip() for line in lines]


def commands_to_run() -> list[str]:
    """Without those that a longer one has in it, and those of which output is compared below."""
    found, compared = commands(), "python -m benchmarks.scaling --class 70b-8b --acc"
    longer = [one for one in found if any(other.startswith(f"{one} ") for other in found)]
    return [one for one in found if one not in longer and not one.startswith(compared)]


def long_commands(*starts: str) -> list[str]:
    """Those that need a GPU, a download or half an hour: shown as text, and parsed here."""
    shown = "\n".join(blocks("text") + blocks("bash")).replace("\\\n", " ")
    return [x.split("   #")[0] for x in shown.splitlines() if x.startswith(starts)]


TRAINS, COMPARES = "python examples/train_drafter ", "examples/ab.sh "
PARSED = ("sequoia-vllm ", "python -m benchmarks.")
# A download that other tests make, and what CI's own set-up runs.
OTHERS = ("python -m examples.smollm2", "pip install ", "uv ", "pipx ", "make demo", "git clone ")


def test_every_command_is_checked():
    tools = ("python ", "vllm ", "curl ", "guidellm ", "pip ", "pipx ", "uv ", "docker ", "ray ",
             "sequoia-vllm ", "examples/", "make ", "git ")  # fmt: skip
    checked = long_commands("vllm serve ", TRAINS, COMPARES, *PARSED, *OTHERS)
    assert set(long_commands(*tools)) <= set(checked)


@pytest.fixture
def folder(tmp_path):
    """Looks like the checkout's root, and may be written to."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.engine
@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(code, folder, monkeypatch, capsys):
    """In this process and not compiled: test_tensor_parallel.py has an engine as users start it."""
    start, started = vllm.LLM, []

    def start_eagerly(**options):
        started.append(start(**options, enforce_eager=True))
        return started[-1]

    monkeypatch.setattr(vllm, "LLM", start_eagerly)
    monkeypatch.chdir(folder)
    if not smollm2.is_cached(smollm2.cached_folder()):  # where nobody fetched it
        monkeypatch.setattr(smollm2, "cached_folder", lambda: TARGET)
    example = {"__name__": "__main__"}
    try:
        exec(compile(code, "example", "exec"), example)
    finally:
        for llm in started:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    assert started
    assert capsys.readouterr().out.strip()


def _runs_engines(command: str) -> bool:
    return command.startswith(("sequoia-vllm tune", "sequoia-vllm bench"))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.engine if _runs_engines(command) else ())
        for command in commands_to_run()
    ],
)
def test_commands_work(command, folder, monkeypatch):
    if command.startswith(NOT_RUN):
        assert command.split()[0] == "pip" or f"\n{command.split()[1]}:" in (
            ROOT / "Makefile"
        ).read_text(encoding="utf-8")
        return
    if command.startswith("vllm serve"):
        words = shlex.split(command)
        monkeypatch.chdir(ROOT)
        config = parsed("--model", words[2], *words[3:]).create_engine_config()
        assert SequoiaSettings.enabled(config) or offload_of(config.additional_config)
        return
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SEQUOIA_VLLM_TREES", str(folder / "trees"))  # where no other test finds it
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[:2] == ["python", "-m"]:
            words += shlex.split(SMALLER.get(words[2], ""))
            run_tool(words[2:], monkeypatch)
            continue
        assert words[0] == "sequoia-vllm"
        assert (SCRIPTS / words[0]).exists()
        words += shlex.split(SMALLER.get(words[1], ""))
        done = CliRunner().invoke(app, words[1:])
        if _runs_engines(command):
            cleanup_dist_env_and_memory()
        assert done.exit_code == 0, done.output[-2000:]


@pytest.mark.parametrize("command", long_commands("vllm serve"))
def test_commands_for_gpus_are_understood(command):
    """By vLLM's parser and by our settings; nothing is started."""
    _, _, model, *options = shlex.split(command)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--model", model, *options]).speculative_config
    assert SequoiaConfig.parse(given)


@pytest.mark.parametrize("load", ["vllm", "guidellm"])
def test_two_servers_are_compared_in_one_command(load, tmp_path):
    """Their options are parsed by vLLM; nothing is started."""
    from vllm.benchmarks.serve import add_cli_args

    ready = tmp_path / "ready"  # a server is ready once it has said how it was called
    tools = {
        "vllm": f'[ "$1" != serve ] || {{ touch {ready}; exec sleep 60; }}',
        "guidellm": ":",
        "curl": f"rm {ready}",
    }
    for tool, then in tools.items():
        file = tmp_path / tool
        file.write_text(f'#!/bin/sh\necho "{tool} $@" >> "$0.log"\n{then}\n')
        file.chmod(0o755)
    [command] = long_commands(COMPARES)
    subprocess.run(
        ["bash", *shlex.split(command)], cwd=ROOT, check=True, capture_output=True, timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "LOAD": load},
    )  # fmt: skip
    said = [shlex.split(x) for x in (tmp_path / "vllm.log").read_text().splitlines()]
    model = command.split()[1]
    plain, served = (words for words in said if words[1] == "serve")
    assert plain == ["vllm", "serve", model, "--port", "8000"]
    assert served == [*plain, "--speculative-config", "sequoia"]
    if load == "guidellm":
        assert (tmp_path / "guidellm.log").read_text().count(f"openai_http,model={model}") == 2
    for sent in (words[3:] for words in said if words[1] == "bench"):
        add_cli_args(parser := FlexibleArgumentParser())
        found = parser.parse_args(sent)
        assert (found.request_rate, found.model) == (4, model)


@pytest.mark.parametrize("command", long_commands(TRAINS))
def test_commands_that_train_are_understood(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name in ("answers", "my-model", "my-draft"):
        Path(name).mkdir()
    Path("beginnings.jsonl").write_text("")
    words = shlex.split(re.sub(r"\$\w+", "my-model", command.replace("$cache/", "")))[2:]
    with script_modules():
        parser = typer.main.get_command(runpy.run_path(str(SCRIPT / "__main__.py"))["app"])
        parser.get_command(None, words[0]).make_context("it", words[1:])


@pytest.mark.parametrize("command", long_commands(*PARSED))
def test_long_commands_are_understood(command, folder, monkeypatch):
    """By their own parsers; nothing is run."""
    monkeypatch.chdir(folder)
    Path("PROMPTS").write_text("")
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "benchmarks.gpu"]:
        command_of_gpu._parsed(words[3:])
        return
    tool = app if words[0] == "sequoia-vllm" else app_of(words[2])
    options = words[1:] if tool is app else words[3:]
    parser = typer.main.get_command(tool)
    if isinstance(parser, typer.core.TyperGroup):
        parser, options = parser.get_command(None, options[0]), options[1:]
    parser.make_context("it", options)


def app_of(module: str) -> typer.Typer:
    found = getattr(import_module(module), "app", None)
    return found or import_module(f"{module}.__main__").app


def run_tool(words: list[str], monkeypatch) -> None:
    """Runs `python -m WORDS` in this process, which has loaded torch."""
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    assert not end.value.code


@pytest.fixture
def printed(monkeypatch, capsys):
    def run(*words: str) -> str:
        capsys.readouterr()
        run_tool([f"benchmarks.{words[0]}", *words[1:]], monkeypatch)
        return capsys.readouterr().out

    return run


def test_predictions_are_the_roofline_models(printed):
    """The scaling table and what is said around it are what the tools print now."""

    def cells_of(size: int, *options: str) -> list[str]:
        table = printed("scaling", "--devices", "h100-sxm", *options).splitlines()
        return next(line for line in table if line.startswith(f"| h100-sxm | {size} | 1 |")).split()

    assert f"\n\n{printed('scaling')}\n" in PREDICTIONS
    plain = 1e3 * Assumptions().plain_step_seconds
    shares = [
        f"{100 * float(row[9]) / (float(row[7]) - plain):.0f} %" for row in map(cells_of, (2, 8))
    ]
    text = " ".join(PREDICTIONS.split())
    assert f"from {shares[0]} of the target's to {shares[1]}" in text
    row = cells_of(8, "--interconnect-gb-s", "64", "--interconnect-kind", "bus")
    assert f"On PCIe, 8 H100 would do {row[17]} with {row[11]} nodes, {row[13]} deep" in text


@pytest.mark.slow
def test_predictions_of_offloaded_targets_are_the_models(printed):
    start = "python -m benchmarks."
    shown = [line for line in commands() if line.startswith(f"{start}scaling --class 70b-8b --acc")]
    assert len(shown) == 2
    for line in shown:
        assert f"\n\n{printed(*shlex.split(line.removeprefix(start)))}" in PREDICTIONS


def test_the_readme_is_short():
    lines = TEXTS[Path("README.md")].splitlines()
    assert len(lines) <= 150
    assert all(len(line) <= 100 or line.startswith("|") for line in lines)


def anchors(text: str) -> set[str]:
    """What links may name: a document's headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("document", "link"),
    [
        (document, link)
        for document, text in LINKED.items()
        for link in sorted(set(re.findall(r"\]\((?!https?:)([^)]+)\)", text)))
    ],
)
def test_links_lead_somewhere(document, link):
    path, _, anchor = link.partition("#")
    file = ROOT / document.parent / path if path else ROOT / document
    assert file.exists()
    if anchor:
        assert anchor in anchors(file.read_text(encoding="utf-8"))


def test_the_notebook_lists_its_pages():
    index = LINKED[Path("docs/notebook/README.md")]
    assert all(f"]({page.name})" in index for page in NOTEBOOK if page.name != "README.md")
