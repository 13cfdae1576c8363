"""The measuring tools on the GPU engine: `bench`, `tune` and `benchmarks.gpu.kinds`."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import kinds
from tests.support.calling import called_once
from tests.support.generating import save_related_pair
from tests.support.interpreted import call_on_gpu
from tests.support.models import save_word_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

NODES = 4
CHAIN = "2:probabilistic:block"


def measure_pair(models: str) -> dict[str, Any]:
    from sequoia_vllm.bench.measure import BenchSettings, measure
    from sequoia_vllm.bench.methods import methods
    from sequoia_vllm.calibration.measure_profile import ProfileSettings, measure_profile
    from sequoia_vllm.measuring.engines import EngineSpec

    target, draft = save_related_pair(Path(models))
    for model in (target, draft):
        save_word_tokenizer(Path(model))
    pair = EngineSpec(target, draft, dtype="float32", kv_cache_gib=0.02)
    settings = BenchSettings(
        pair, methods=tuple(methods(draft, [CHAIN], [f"{NODES}x2"])), prompts=([5, 7, 9, 11],),
        temperatures=(0.0, 1.0), max_tokens=24, rounds=1,
    )  # fmt: skip
    runs, sampled = measure(settings).runs.values()
    profile = measure_profile(
        ProfileSettings(
            pair, batch_sizes=(1,), tokens=(1, NODES), contexts=(32,), max_tokens=12, rounds=1
        )
    )
    return {
        "outputs": [run.rounds[0].token_ids for run in runs],
        "parts": [run.rounds[0].parts for run in runs],
        "sampled_chain": sampled[1].rounds[0].steady.tokens_per_step,
        "profile": profile.to_dict(),
    }


measured = called_once(call_on_gpu, measure_pair)


def test_bench_and_profile_time_the_parts_of_steps_and_outputs_are_plain(measured):
    """`bench` refuses block verification where the runner would ignore it: here it does not."""
    plain, chain, trees = measured["outputs"]
    assert plain == chain == trees
    assert all(parts["target"] > 0 for parts in measured["parts"])
    assert all(parts["draft"] > 0 for parts in measured["parts"][1:])
    assert 1 < measured["sampled_chain"] <= 3
    [target], [draft] = (measured["profile"][name] for name in ("target_forward", "draft_level"))
    assert target["tokens"] == [1, NODES]
    assert min(target["seconds"] + draft["seconds"]) > 0


def compare(kind: str, folder: str) -> dict[str, Any]:
    kinds.TOKENS = 8
    return kinds.compare_kind(kind, Path(folder))


@pytest.mark.parametrize("kind", ["draft-float32", "lookup-float32", "gemma4-float32"])
def test_kinds_give_plain_vllms_tokens(kind, tmp_path):
    found = call_on_gpu(compare, tmp_path, kind=kind, folder=str(tmp_path))
    assert all(found["greedy"] + found["seeded"] + found["alone"])
    assert found["tokens_per_tree"] > 1
    assert max(found["worst_gap"]) == 0
