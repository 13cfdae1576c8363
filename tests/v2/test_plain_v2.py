"""vLLM's own V2 runner on this CPU: the ground the tree's V2 tests stand on."""

from typing import Any

import pytest

from tests.support.models import DRAFT
from tests.support.on_v2 import call_on_v2

pytestmark = pytest.mark.engine

PROMPTS = ["def fibonacci(n):", "import numpy as np\n", "class Stack:\n    def push(self, item):"]
DRAFT_TOKENS = 3


def generate_plain() -> dict[str, Any]:
    """Greedy tokens of each prompt alone and of all together; what ran them."""
    from tests.support.engines import running

    with running() as llm:
        return {"runner": _runner(llm), "scheduler": _scheduler(llm), **_generate(llm)}


def generate_with_chain(draft: str, **options: Any) -> dict[str, Any]:
    """As `generate_plain`, with vLLM's own chain of drafts, and what it accepted."""
    from tests.support.engines import metric, running

    chain = {"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFT_TOKENS}
    with running(chain, **options) as llm:
        tokens = _generate(llm)
        counts = {
            name: metric(llm, f"vllm:spec_decode_num_{name}")
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        }
        return {"runner": _runner(llm), "scheduler": _scheduler(llm), **tokens, **counts}


def _generate(llm: Any) -> dict[str, list[list[int]]]:
    from vllm import SamplingParams

    from tests.support.engines import tokens_of

    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    together = tokens_of(llm.generate(PROMPTS, greedy, use_tqdm=False))
    alone = [tokens_of(llm.generate([prompt], greedy, use_tqdm=False))[0] for prompt in PROMPTS]
    return {"together": together, "alone": alone}


def _runner(llm: Any) -> str:
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return f"{type(runner).__module__}.{type(runner).__name__}"


def _scheduler(llm: Any) -> str:
    return type(llm.llm_engine.engine_core.engine_core.scheduler).__name__


def generate_on_v2(draft: str) -> dict[str, Any]:
    """Of plain vLLM, and with a chain."""
    return {"plain": generate_plain(), "chain": generate_with_chain(draft)}


@pytest.fixture(scope="module")
def on_v2(tmp_path_factory) -> dict[str, Any]:
    return call_on_v2(generate_on_v2, tmp_path_factory.mktemp("plain"), draft=DRAFT)


@pytest.fixture(scope="module")
def tokens_on_v1() -> list[list[int]]:
    plain = generate_plain()
    assert plain["runner"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert plain["together"] == plain["alone"]
    return plain["together"]


def test_plain_generation_is_v1s(tokens_on_v1, on_v2):
    plain = on_v2["plain"]
    assert plain["runner"] == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert plain["scheduler"] == "AsyncScheduler"
    assert plain["together"] == plain["alone"] == tokens_on_v1


def test_a_chain_generates_what_v1_does(tokens_on_v1, on_v2):
    chain = on_v2["chain"]
    assert chain["scheduler"] == "AsyncScheduler"
    assert chain["together"] == chain["alone"] == tokens_on_v1
    assert chain["draft_tokens"] == DRAFT_TOKENS * chain["drafts"]
    assert 0 < chain["accepted_tokens"] < chain["draft_tokens"]
