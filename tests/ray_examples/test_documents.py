"""What is said about the examples fits them: options in commands exist."""

import re
import subprocess
import sys

import pytest

from tests.ray_examples.cluster import EXAMPLES
from tests.support.serving import environment

CLUSTER = (EXAMPLES / "cluster.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"python examples/(ray_\w+\.py)((?:[^\n]*\\\n)*[^\n]*)")


def commands(script: str) -> list[str]:
    """The options of each command that runs this example, in the guide and in the example."""
    own = (EXAMPLES / script).read_text(encoding="utf-8").partition("import json")[0]
    return [options for name, options in COMMAND.findall(CLUSTER + own) if name == script]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ray_serve.py", "ray_batch.py"])
def test_options_in_commands_exist(script):
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, "--help"],
        env={**environment(), "COLUMNS": "200"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    known = set(re.findall(r"--[a-z-]+", done.stdout))
    found = commands(script)
    assert len(found) == 2
    for options in found:
        assert set(re.findall(r"--[a-z-]+", options)) <= known
