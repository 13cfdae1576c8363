"""vLLM's own V2 runner on this CPU: the ground the tree's V2 tests stand on."""

from typing import Any

import pytest

from tests.engine.models import DRAFT, TARGET
from tests.v2.conftest import call_on_v2

pytestmark = pytest.mark.engine

PROMPTS = ["def fibonacci(n):", "import numpy as np\n", "class Stack:\n    def push(self, item):"]
DRAFT_TOKENS = 3


def generate_plain() -> dict[str, Any]:
    """Greedy tokens of each prompt alone and of all together; what ran them."""
    from tests.engine.conftest import running

    with running() as llm:
        return {"runner": _runner(llm), "scheduler": _scheduler(llm), **_generate(llm)}


def generate_with_chain(draft: str, **options: Any) -> dict[str, Any]:
    """As `generate_plain`, with vLLM's own chain of drafts, and what it accepted."""
    from tests.engine.conftest import metric, running

    chain = {"method": "draft_model", "model": draft, "num_speculative_tokens": DRAFT_TOKENS}
    with running(chain, **options) as llm:
        tokens = _generate(llm)
        counts = {
            name: metric(llm, f"vllm:spec_decode_num_{name}")
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        }
        return {"runner": _runner(llm), "scheduler": _scheduler(llm), **tokens, **counts}


def count_accepted_sampled(draft: str) -> dict[str, list[int]]:
    """[accepted, drafted] tokens of sampled requests: untruncated, truncated, penalised."""
    from vllm import SamplingParams

    from tests.engine.conftest import metric, running

    chain = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": DRAFT_TOKENS,
        "draft_sample_method": "probabilistic",
    }
    settings: dict[str, dict] = {
        "untruncated": {},
        "truncated": {"top_k": 20, "top_p": 0.9},
        "penalised": {"repetition_penalty": 1.1},
    }
    names = ("accepted_tokens", "draft_tokens")
    counts: dict[str, list[int]] = {}
    with running(chain) as llm:
        for setting, keys in settings.items():
            before = [int(metric(llm, f"vllm:spec_decode_num_{name}")) for name in names]
            params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, **keys)
            llm.generate(PROMPTS, params, use_tqdm=False)
            after = [int(metric(llm, f"vllm:spec_decode_num_{name}")) for name in names]
            counts[setting] = [now - then for now, then in zip(after, before, strict=True)]
    return counts


def _generate(llm: Any) -> dict[str, list[list[int]]]:
    from vllm import SamplingParams

    from tests.engine.conftest import tokens_of

    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    together = tokens_of(llm.generate(PROMPTS, greedy, use_tqdm=False))
    alone = [tokens_of(llm.generate([prompt], greedy, use_tqdm=False))[0] for prompt in PROMPTS]
    return {"together": together, "alone": alone}


def _runner(llm: Any) -> str:
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return f"{type(runner).__module__}.{type(runner).__name__}"


def _scheduler(llm: Any) -> str:
    return type(llm.llm_engine.engine_core.engine_core.scheduler).__name__


@pytest.fixture(scope="module")
def tokens_on_v1() -> list[list[int]]:
    plain = generate_plain()
    assert plain["runner"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert plain["together"] == plain["alone"]
    return plain["together"]


def test_plain_generation_is_v1s(tokens_on_v1, tmp_path):
    plain = call_on_v2(generate_plain, tmp_path)

    assert plain["runner"] == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert plain["scheduler"] == "AsyncScheduler"
    assert plain["together"] == plain["alone"] == tokens_on_v1


@pytest.mark.parametrize(
    ("async_scheduling", "scheduler"), [(True, "AsyncScheduler"), (False, "Scheduler")]
)
def test_a_chain_generates_what_v1_does(async_scheduling, scheduler, tokens_on_v1, tmp_path):
    chain = call_on_v2(
        generate_with_chain, tmp_path, draft=DRAFT, async_scheduling=async_scheduling
    )

    assert chain["scheduler"] == scheduler
    assert chain["together"] == chain["alone"] == tokens_on_v1
    assert chain["draft_tokens"] == DRAFT_TOKENS * chain["drafts"]
    assert 0 < chain["accepted_tokens"] < chain["draft_tokens"]


def test_a_sampled_chain_accepts_all_that_the_target_drafts_itself(tmp_path):
    """Draft and target are then the same distribution: a rejection is a kernel run wrongly."""
    counts = call_on_v2(count_accepted_sampled, tmp_path, draft=TARGET)

    for setting, (accepted, drafted) in counts.items():
        assert accepted == drafted > 0, setting


def test_a_sampled_chain_accepts_some_of_what_a_draft_says(tmp_path):
    counts = call_on_v2(count_accepted_sampled, tmp_path, draft=DRAFT)

    for setting, (accepted, drafted) in counts.items():
        assert 0 < accepted < drafted, setting
