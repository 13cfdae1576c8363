"""Workflows of `.github` run nowhere here: their steps are shell that names what exists."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from sequoia_vllm.cli import app

ROOT = Path(__file__).parents[2]
STEPS = {
    f"{file.stem}-{job}-{number}": step["run"]
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    for job, found in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].items()
    for number, step in enumerate(found["steps"])
    if "run" in step
}
OURS = {name: script for name, script in STEPS.items() if "bin/sequoia-vllm " in script}
# What the steps make themselves.
MADE = ("files.txt", "report.txt", "body.md")
FILE = re.compile(
    r"(?<![\w/$.{}-])[\w.-]+(?:/[\w.-]+)*(?:\.(?:cpp|py|toml|md|json|txt|safetensors)|/run)\b"
)


@pytest.mark.parametrize("script", STEPS.values(), ids=STEPS)
def test_steps_name_what_exists(script):
    """Files of the checkout, or of the package within the wheel; targets of the Makefile."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([\w-]+)", script):
        assert f"\n{target}:" in makefile
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
