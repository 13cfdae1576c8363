"""`benchmarks.gpu.kinds` on vLLM's GPU engine without a GPU."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import kinds
from tests.support.on_gpu import call_on_gpu

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def compare(kind: str, folder: str) -> dict[str, Any]:
    kinds.TOKENS = 8
    return kinds.compare_kind(kind, Path(folder))


@pytest.mark.parametrize("kind", ["draft-float32", "lookup-float32", "gemma4-float32"])
def test_tokens_are_plain_vllms(kind, tmp_path):
    found = call_on_gpu(compare, tmp_path, kind=kind, folder=str(tmp_path))
    assert all(found["greedy"] + found["seeded"] + found["alone"])
    assert found["tokens_per_tree"] > 1
    assert max(found["worst_gap"]) == 0
