"""One cluster for all examples, and what plain vLLM answers."""

from collections.abc import Iterator

import pytest
from vllm import SamplingParams

from tests.ray_examples.cluster import MAX_TOKENS, PROMPTS, TwoNodes
from tests.support.engines import running


@pytest.fixture(scope="session")
def plain_texts() -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with running() as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="package")
def cluster(tmp_path_factory) -> Iterator[TwoNodes]:
    cluster = TwoNodes(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.kill()
