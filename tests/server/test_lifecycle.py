"""``vllm serve`` with Sequoia starts from the shorthand, refuses nonsense and ends cleanly."""

import signal
import subprocess

import pytest
from vllm import SamplingParams

from tests.support.engines import running
from tests.support.models import prompts
from tests.support.serving import DRAFT, OPTIONS, ROOT, TARGET, VLLM, Server, environment

pytestmark = pytest.mark.engine

LENGTH = 400


@pytest.fixture
def shorthand_server(tmp_path):
    server = Server(
        tmp_path / "server.log", "--speculative-config", "sequoia", "--shutdown-timeout=120"
    )
    yield server
    server.kill()


def test_shorthand_and_sigterm_with_a_request_under_way(shorthand_server):
    """The answer that is being streamed is still completed, token for token as plain vLLM's."""
    server = shorthand_server
    [prompt] = prompts(1)
    with running(None) as llm:
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        [output] = llm.generate([prompt], params, use_tqdm=False)
    server.wait_until_healthy()
    family = server.process.children(recursive=True)
    for _ in range(5):  # on a busy machine it may be done before this process looks
        stream = server.complete(
            prompt=prompt, temperature=0, max_tokens=LENGTH, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = "".join(next(stream).choices[0].text for _ in range(8))
        running_now = server.metric("vllm:num_requests_running")
        if running_now == [1]:
            break
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    server.process.send_signal(signal.SIGTERM)
    text += "".join(chunk.choices[0].text for chunk in stream)
    server.check_clean_end(family)
    assert text == output.outputs[0].text
    assert f"draft model {DRAFT}" in server.log
    assert running_now == [1]  # it was under way, indeed
    assert accepted > [0]


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
