"""``vllm serve`` with Sequoia refuses nonsense; `test_serve.py` has its start and end."""

import subprocess

import pytest

from tests.support.serving import OPTIONS, ROOT, TARGET, VLLM, environment

pytestmark = pytest.mark.engine


def refusal(*arguments: str) -> str:
    """What ``vllm serve`` writes to stderr when it will not start."""
    done = subprocess.run(
        [str(VLLM), "serve", *arguments, *OPTIONS],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode not in (0, None)
    return done.stderr


def test_misspelt_key_is_refused_with_the_right_one():
    config = '{"method": "sequoia", "treee": 1}'
    message = refusal(TARGET, "--speculative-config", config)
    assert "unknown key 'treee'" in message
    assert "did you mean 'tree'" in message
