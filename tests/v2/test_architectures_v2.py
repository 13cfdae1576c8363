"""Sinks, experts, chunks and resting drafts on Model Runner V2: greedy tokens are plain vLLM's.

Windows and soft caps are the rehearsal's (`tests/gpu_rehearsal/test_architectures.py`).

As `tests/engine/test_architectures.py` asks it of V1: windows are of 40 tokens, prompts and
completions go beyond, and a model that drafts for itself is right in every draft, unless
attention over its own trees is wrong. The attention is that of GPUs: V1's tests have the CPU's.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.architectures import VOCABULARY, save_architecture
from tests.support.calling import called_once
from tests.support.engines import runner_of, running, sequoia
from tests.support.generating import generate, generate_on, random_prompts
from tests.support.interpreted import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

LENGTHS = [37, 90]
TOKENS = 16
SIZE, DEPTH = 8, 4
OPTIONS = {"skip_tokenizer_init": True, "max_num_seqs": 2}


def generate_with_sinks(models: str) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = random_prompts(LENGTHS, VOCABULARY)
    model = save_architecture(Path(models) / "gpt_oss", "gpt_oss", layers=2)
    options = {"model": str(model), "block_size": 16, **OPTIONS}
    plain = generate(None, prompts, params, **options)
    with running(sequoia(SIZE, DEPTH, draft=str(model)), **options) as llm:
        trees = generate_on(llm, prompts, params)
        return {"plain": plain, "trees": trees, "groups": groups_of(llm)}


def groups_of(llm: Any) -> list[list[Any]]:
    """Each KV cache group: its kind, and how many layers of the target and of the draft it has."""
    runner = runner_of(llm)
    drafts = runner.speculator.draft_attn_layer_names
    return [
        [type(group.kv_cache_spec).__name__, *(
            sum((name in drafts) == of_draft for name in group.layer_names)
            for of_draft in (False, True)
        )]
        for group in runner.kv_cache_config.kv_cache_groups
    ]  # fmt: skip


answers = called_once(call_on_v2, generate_with_sinks, gpu_attention=True)


def test_a_model_that_drafts_for_itself(answers):
    plain, trees = answers["plain"], answers["trees"]
    assert trees["attention"] == "TritonTreeImpl"
    assert trees["tokens"] == plain["tokens"]
    # The first token of each request is its prompt's; then five at a time.
    assert trees["counts"]["drafts"] == len(LENGTHS) * (TOKENS - 1) / (DEPTH + 1)
    assert trees["counts"]["accepted_tokens"] == trees["counts"]["drafts"] * DEPTH


def test_drafts_lie_in_several_cache_groups(answers):
    """With windows in every other layer; each group has its own blocks."""
    kinds = {kind for kind, *_ in answers["groups"]}
    assert kinds == {"FullAttentionSpec", "SlidingWindowSpec"}
    assert [sum(group[1:]) for group in answers["groups"]].count(4) == 0
    assert sum(group[2] for group in answers["groups"]) == 2


def generate_in_chunks(models: str) -> dict[str, Any]:
    """Answers of plain vLLM, of trees, and of trees that rest while there are two requests."""
    target = save_architecture(Path(models) / "target", "llama4")
    draft = save_architecture(Path(models) / "draft", "llama4")
    described = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(described | {"attention_chunk_size": None}))
    prompts = random_prompts([30, 90], VOCABULARY)
    params = [
        SamplingParams(
            temperature=0.8 * at, seed=7, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        for at, tokens in enumerate((40, 20))
    ]
    # The second prompt is read beside the first one's trees.
    options = {"model": str(target), "block_size": 16, "max_num_batched_tokens": 48, **OPTIONS}
    found = {"plain": generate(None, prompts, params, **options)}
    for name, at_two in (("trees", SIZE - 1), ("rested", 0)):
        config = sequoia(SIZE, DEPTH, draft=str(draft))
        config["num_speculative_tokens_per_batch_size"] = [[1, 1, SIZE - 1], [2, 2, at_two]]
        with running(config, **options) as llm:
            found[name] = generate_on(llm, prompts, params)
            found[f"{name} again"] = generate_on(llm, prompts, params)
            found["groups"] = groups_of(llm)
    return found


def test_nodes_see_their_own_chunk(tmp_path):
    """Chunks end within prompts and within trees; then prompts come from the prefix cache."""
    found = call_on_v2(generate_in_chunks, tmp_path, gpu_attention=True, models=str(tmp_path))
    for name in ("trees", "trees again", "rested", "rested again"):
        assert found[name]["tokens"] == found["plain"]["tokens"], name
        assert found[name]["counts"]["drafts"] > 3
    assert found["trees"]["attention"] == "ChunkedTreeImpl"
    assert found["trees"]["counts"]["tokens_per_tree"] > 1.5
    assert ["ChunkedLocalAttentionSpec", 1, 0] in found["groups"]


def generate_after_a_rest(models: str) -> dict[str, Any]:
    """Answers where two requests outlive the others, with drafts only then; and plain vLLM's."""
    # A block of the draft's windowed layer is in the memory of one of the target's layers.
    target = save_architecture(Path(models) / "target", "gemma2", layers=4, full=[3])
    draft = save_architecture(Path(models) / "draft", "gemma2", layers=2, full=[1])
    prompts = random_prompts([90, 60, 30, 33], VOCABULARY)
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for tokens in (110, 120, 70, 72)
    ]
    options = {
        "model": str(target), **OPTIONS, "block_size": 32, "max_num_seqs": 4,
        "max_model_len": 192,
    }  # fmt: skip
    # Just as much as these requests need, if what lies before windows is given away.
    small = {**options, "kv_cache_memory_bytes": 11 << 16}
    config = sequoia(SIZE, DEPTH, draft=str(draft))
    config["num_speculative_tokens_per_batch_size"] = [[1, 2, SIZE - 1], [3, 4, 0]]
    plain = generate(None, prompts, params, **options)
    with running(config, **small) as llm:
        return {
            "plain": plain["tokens"], "trees": generate_on(llm, prompts, params),
            "groups": groups_of(llm),
        }  # fmt: skip


def test_a_draft_that_rested_writes_to_no_block_of_others(tmp_path):
    """vLLM gives away what lies before windows; the blocks may be those of the target's layers."""
    answers = call_on_v2(generate_after_a_rest, tmp_path, models=str(tmp_path))
    assert answers["trees"]["tokens"] == answers["plain"]
    assert answers["trees"]["counts"]["drafts"] > 10
    assert ["SlidingWindowSpec", 1, 1] in answers["groups"]
