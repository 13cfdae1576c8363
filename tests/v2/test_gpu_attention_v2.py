"""What trees use on GPUs, run by Triton's interpreter: attention, cache layout and commit.

Plain tokens are those of vLLM's TRITON_ATTN in the same process.
"""

import math
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from sequoia_vllm.engine.common.patched import patched
from tests.support.calling import called_once
from tests.support.engines import generated as tokens_of
from tests.support.engines import plain_outputs, runner_of, running, sequoia
from tests.support.generating import (
    generate,
    generate_on,
    greedy_and_seeded,
    random_prompts,
    save_related_pair,
)
from tests.support.interpreted import call_on_v2
from tests.support.models import prompts, save_spoilt_pair

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Two layers, and heads that share keys.
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
# Blocks as small as on GPUs: trees reach over their ends.
OPTIONS = {"skip_tokenizer_init": True, "block_size": 16}
LENGTHS = [9, 40, 23]
UNSEEN = 4000  # a token that answers lack
LAUNCHES = Path(__file__).parent / "LAUNCHES.md"


def params() -> list[Any]:
    """Greedy, with a seed, greedy."""
    return greedy_and_seeded(3, 14, 0.8)


def generate_as_on_gpus(models: str) -> dict[str, Any]:
    target, draft = save_related_pair(Path(models), **SHAPE)
    requests, options = random_prompts(LENGTHS), {"model": target, **OPTIONS}
    answers = {"plain": generate(None, requests, params(), **options)}
    with running(sequoia(10, 6, draft, retrieval=True), **options) as llm:
        answers["trees"] = generate_on(llm, requests, params())
        answers["launches"] = launches_of_a_step(llm)
    return answers | {"slots": slots_of_a_level(), "written": written_caches()}


def launches_of_a_step(llm: Any) -> dict[str, Any]:
    """Launches for a greedy and a sampled request with trees of depth 6 that were grown before."""
    from tests.v2.launches import DRAFT, GLUE, VERIFIER, WORK, counted_launches

    for index, request in enumerate(random_prompts([9, 14])):
        params = SamplingParams(temperature=0.8 * index, max_tokens=30, ignore_eos=True)
        llm.llm_engine.add_request(str(index), request, params)
    for _ in range(2):
        llm.llm_engine.step()
    with counted_launches() as launches:
        llm.llm_engine.step()
    return {
        "glue": launches.of(GLUE),
        "work": launches.of(WORK),
        "attention of the draft": launches.named("tree_attention_kernel", DRAFT),
        "table": launches.table(GLUE, WORK, VERIFIER),
    }


def slots_of_a_level() -> dict[str, list[list[int]]]:
    """Cache slots of three nodes of each of four requests, by us and by vLLM."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables

    device = torch.device("cpu")
    tables = BlockTables([16, 32], 4, 64, [6, 3], device)
    for request in range(4):
        first = 1 + 9 * request
        blocks = list(range(first, first + 6)), list(range(first + 6, first + 9))
        tables.append_block_ids(request, blocks, overwrite=True)
    tables.apply_staged_writes()
    requests = torch.tensor([2, 0, -1, 3])  # the third is a graph's padding
    tables.gather_block_tables(requests.clamp(min=0).int(), 4)
    roots = torch.tensor([13, 30, 0, 60], dtype=torch.int32)
    all_token_ids = torch.zeros(4, 96, dtype=torch.int32)
    paged = PagedTables.of(tables.input_block_tables, [16, 32])
    inputs = DraftInputs.empty(paged, 12, all_token_ids, longest=96)
    nodes = torch.tensor([1, 2, 5], dtype=torch.int32)
    level = SimpleNamespace(nodes=nodes, width=3, first=1, depth=1)
    batch = SimpleNamespace(slots=requests, contexts=roots)
    inputs.read_level(batch, 4, level, tokens=torch.zeros(4, 8, dtype=torch.int64))
    expected = tables.compute_slot_mappings(
        requests.int(),
        torch.arange(0, 15, 3, dtype=torch.int32),
        (roots[:, None] + torch.arange(1, 4)).flatten().long(),
        12,
    )
    return {"ours": inputs.slots[:, :12].tolist(), "vLLM's": expected.tolist()}


def written_caches() -> dict[str, list[Any]]:
    """What whole and fp8 caches hold after we have written keys and values, and after vLLM has."""
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as module

    from sequoia_vllm.kernels.write_cache import write_cache

    generator = torch.Generator().manual_seed(2)
    new = [torch.randn(7, 2, 80, generator=generator).mul(30).half() for _ in range(2)]
    slots, found = torch.tensor([3, 40, -1, 17, 16, 0, 63]), {}
    scales = torch.tensor([0.3]), torch.tensor([1.7])
    for kind, dtype in (("auto", torch.float16), ("fp8", torch.float8_e4m3fn)):
        ours, theirs = (torch.zeros(4, 2, 16, 160, dtype=dtype).transpose(1, 2) for _ in range(2))
        with patched(module, "_is_supported_kv_cache_dtype", lambda _: True):  # on a GPU
            module.triton_reshape_and_cache_flash(
                *new, *theirs.chunk(2, dim=-1), slots, kind, *scales
            )
        write_cache(*new, *ours.chunk(2, dim=-1), slots, *scales, divides_exactly=False)
        found[kind] = [one.float().tolist() for one in (ours, theirs)]
    return found


def generate_beside_nan(models: str) -> dict[str, Any]:
    """Answers while trees draft a token all the time that the target reads as NaN."""
    texts, greedy = prompts(8), SamplingParams(temperature=0, max_tokens=10)
    expected = plain_outputs(texts, greedy, block_size=16)
    frequent, *_ = Counter(chain.from_iterable(expected)).most_common(1)[0]
    target, draft = save_spoilt_pair(Path(models), UNSEEN, frequent, math.nan)
    answers: dict[str, Any] = {"plain": expected}
    for name, is_dynamic in (("static", False), ("dynamic", True)):
        config = sequoia(8, 3, draft, dynamic_tree=is_dynamic)
        with running(config, model=target, block_size=16) as llm:
            answers[name] = {"tokens": tokens_of(llm, texts, greedy)}
            found = [parts_of(cache) for cache in runner_of(llm).kv_caches]
            answers[name]["nan"] = [[bool(part.isnan().any()) for part in each] for each in found]
    return answers


def parts_of(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys and values."""
    return cache.chunk(2, dim=-1)


generated = called_once(call_on_v2, generate_as_on_gpus, gpu_attention=True)


def test_attention_is_that_of_gpus(generated):
    assert generated["plain"]["attention"] == "TritonAttentionImpl"
    assert generated["trees"]["attention"] == "TritonTreeImpl"


def test_tokens_are_those_of_plain_vllm(generated):
    assert generated["trees"]["tokens"] == generated["plain"]["tokens"]
    assert generated["trees"]["counts"]["tokens_per_tree"] > 1.5


def test_a_step_takes_few_launches(generated):
    """Bounds that stand for speed; as many as they are now is what the record says."""
    launches = generated["launches"]
    assert launches["glue"] <= 20
    assert launches["glue"] + launches["work"] <= 60
    # It was a step with all of retrieval, drawing, verification and commit, after six passes.
    assert launches["work"] == 1 + 6 * 5 + 3
    assert launches["attention of the draft"] == 6 * SHAPE["num_hidden_layers"]
    assert launches["table"] in LAUNCHES.read_text(encoding="utf-8")


def test_nodes_have_the_slots_that_vllm_would_give_them(generated):
    slots = generated["slots"]
    assert slots["ours"] == slots["vLLM's"]
    assert [group.count(-1) for group in slots["ours"]] == [3, 3]


def test_keys_and_values_are_written_as_vllm_writes_them(generated):
    for ours, theirs in generated["written"].values():
        assert ours == theirs
        assert torch.tensor(ours).count_nonzero() > 1800


@pytest.mark.sharded
def test_rejected_drafts_that_the_target_reads_as_nan(tmp_path):
    """Their slots keep keys of NaN, and values of 0, which later tokens' tiles read."""
    found = call_on_v2(generate_beside_nan, tmp_path, gpu_attention=True, models=str(tmp_path))
    for kind in ("static", "dynamic"):
        assert found[kind]["tokens"] == found["plain"]
        assert UNSEEN not in chain(*found["plain"])
        assert [True, False] in found[kind]["nan"]
        assert not any(values for _, values in found[kind]["nan"])
