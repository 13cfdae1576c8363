"""Every family once: tokens of tiny models of vLLM's classes are plain vLLM's, greedy and seeded.

A draft is the same model with noise, so trees are right at some nodes alone. Where the class is
refused as a draft, trees are what followed before.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import generated, metric, running
from tests.support.family_recipes import RECIPES, VOCABULARY
from tests.support.generating import greedy_and_seeded, random_prompts
from tests.support.tiny_families import OPTIONS, save_family

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

LENGTHS, TOKENS = [5, 37, 60, 20], 24


def check(folder: str, name: str) -> None:
    """Three requests at a time: a prompt is read beside trees. Windows end within answers."""
    target, trees = save_family(Path(folder), name)
    given = random_prompts(LENGTHS, VOCABULARY), greedy_and_seeded(len(LENGTHS), TOKENS)
    options: dict[str, Any] = {"model": target, **OPTIONS, "max_num_seqs": 3}
    with running(None, **options) as llm:
        plain = generated(llm, *given)
    assert len({token for tokens in plain for token in tokens}) > 20
    with running(trees, **options) as llm:
        assert generated(llm, *given) == plain
        drafts = metric(llm, "vllm:spec_decode_num_draft_tokens")
        assert drafts > metric(llm, "vllm:spec_decode_num_accepted_tokens") > 10


@pytest.mark.parametrize("name", RECIPES)
def test_tokens_are_those_of_plain_vllm(name, tmp_path):
    check(str(tmp_path), name)
