"""vLLM's OffloadingConnector: blocks stored beside trees hold what plain decoding reads."""

from typing import Any

import pytest

from tests.support.engines import metric, sequoia
from tests.support.generating import completions, random_prompts, save_related_pair
from tests.support.on_gpu import call_on_gpu
from tests.support.rehearsing import rehearsing

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def start_and_generate(models: str) -> dict[str, Any]:
    """Answers, and answers to prompts that end with these once the GPU has forgotten them."""
    from pathlib import Path

    from vllm import SamplingParams

    target, draft = save_related_pair(Path(models))
    common = {"ignore_eos": True, "detokenize": False}
    first = SamplingParams(temperature=0, max_tokens=60, **common)
    again = [
        SamplingParams(temperature=0, max_tokens=8, logprobs=3, **common),
        SamplingParams(temperature=0.8, seed=3, max_tokens=8, **common),
        SamplingParams(temperature=0, max_tokens=8, **common),
    ]
    texts, answers = random_prompts([40, 9, 20]), {}
    for name, config in (("plain", None), ("trees", sequoia(size=8, depth=3, draft=draft))):
        with rehearsing(
            config, model=target, kv_offloading_size=0.1, enable_prefix_caching=True
        ) as llm:
            told = completions(llm.generate(texts, first, use_tqdm=False))
            llm.generate(texts[:1], first, use_tqdm=False)  # what is stored late is stored now
            assert llm.reset_prefix_cache()
            longer = [
                {"prompt_token_ids": [*text["prompt_token_ids"], *tokens[0]]}
                for text, tokens in zip(texts, told, strict=True)
            ]
            found = llm.generate(longer, again, use_tqdm=False)
            answers[name] = {
                "tokens": [told, completions(found)],
                "logprobs": [
                    sorted((token, one.logprob) for token, one in position.items())
                    for position in found[0].outputs[0].logprobs
                ],
                "reloaded": metric(llm, "vllm:external_prefix_cache_hits"),
            }
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("kv_offloading")
    return call_on_gpu(start_and_generate, directory, models=str(directory / "models"))


def test_tokens_are_those_of_plain_vllm(answers):
    assert answers["trees"]["tokens"] == answers["plain"]["tokens"]


def test_logprobs_after_reloading_are_those_of_plain_vllm(answers):
    """Of a prefix that was stored while trees were scored beside it."""
    for found, expected in zip(
        answers["trees"]["logprobs"], answers["plain"]["logprobs"], strict=True
    ):
        assert [token for token, _ in found] == [token for token, _ in expected]
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in expected], abs=1e-4
        )


def test_blocks_were_reloaded(answers):
    assert answers["trees"]["reloaded"] >= 60
    assert answers["plain"]["reloaded"] >= 60
