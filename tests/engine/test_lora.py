"""Adapters on the target, on both runners: every request's tokens are those of plain vLLM."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.adapters import RANK, two_adapters
from tests.support.engines import lookup_trees, metric, running, sequoia, tokens_of
from tests.support.heads import EAGLE3
from tests.support.interpreted import call_on_v2
from tests.support.models import prompts

pytestmark = pytest.mark.engine

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def generate_with_adapters(folder: str, max_tokens: int, **others: Any) -> dict[str, Any]:
    """Plain vLLM without adapters; and plain, and trees with a draft and of ``others``.

    Requests have no adapter, one and another in turn.

    Greedy and seeded. The second time the prefix cache has each adapter's prompts.
    """
    first, second = two_adapters(Path(folder))

    def generate(llm: Any, adapters: list | None, seed: int) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=0.0 if row % 2 else 0.8, seed=seed + row, max_tokens=max_tokens,
                ignore_eos=True,
            )
            for row in range(6)
        ]  # fmt: skip
        found = llm.generate(prompts(6), params, lora_request=adapters, use_tqdm=False)
        return tokens_of(found)

    answers: dict[str, Any] = {}
    mixed, all_adapted = [None, first, second] * 2, [first, second] * 3
    for name, config in {"plain": None, "trees": sequoia(), **others}.items():
        # The others' requests end in another order, see `check`.
        batches = {"plain": (mixed, all_adapted), "trees": (mixed,)}.get(name, (all_adapted,))
        with running(config, **LORA) as llm:
            answers[name] = [
                generate(llm, adapters, seed) for adapters in batches for seed in (0, 0, 7)
            ]
            if config is None:
                answers["without"] = generate(llm, None, 0)
            accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
            answers[f"accepted by {name}"] = accepted
    return answers


def check(answers: dict[str, Any], max_tokens: int) -> None:
    # On CPUs, vLLM's kernels give a request without an adapter the last one of the batch. So its
    # tokens depend on who runs beside it.
    assert all(answers["plain"][0][row] != answers["without"][row] for row in (1, 2, 4, 5))
    assert answers["trees"] == answers["plain"][:3]
    for name in answers.keys() & {"lookup", "dynamic", "head"}:
        assert answers[name] == answers["plain"][3:], name
        assert answers[f"accepted by {name}"] > max_tokens, name
    assert answers["accepted by trees"] > max_tokens


def test_adapters_and_none_in_one_batch(tmp_path):
    others = {"lookup": lookup_trees(), "dynamic": sequoia(dynamic_tree=True)}
    check(generate_with_adapters(str(tmp_path), 24, **others), 24)


@pytest.mark.slow
@pytest.mark.sharded
def test_adapters_and_none_in_one_batch_on_v2(tmp_path):
    """Heads draft for the target without adapters; the target verifies with them."""
    others = {"lookup": lookup_trees(), "head": sequoia(draft=EAGLE3)}
    given = {"folder": str(tmp_path), "max_tokens": 12, **others}
    check(call_on_v2(generate_with_adapters, tmp_path, **given), 12)
