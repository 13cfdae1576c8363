"""DFlash heads with windows and causal layers, and their kin: drafts as in vLLM's own chains.

Tiny heads with random weights, of a target with few tokens, so that drafts are often accepted by
chance; in one process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.block_heads import save_dflash2, save_dspark, save_lilicorr
from tests.support.calling import called_once
from tests.support.engines import whole_trees
from tests.support.generating import SPEC_DECODE, TINY, generate, generate_chain, random_prompts
from tests.support.heads import save_dflash
from tests.support.models import save_llama
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

VOCAB, DEPTH, TOKENS = 6, 4, 24
TYPES = ["full_attention", "sliding_attention"]
WINDOWS = {"mask_token_id": 0, "target_layer_ids": [0], "swa_window_size": 8}
JETSPEC = {"mask_token_id": 0, "target_layer_ids": [0], "causal_head": True}
HEADS: dict[str, Callable[[Path, str], str]] = {
    # By vLLM's rules layers with windows are causal, unless it is said otherwise.
    "causal with windows": lambda path, target: save_dflash(
        path, target, layers=2, layer_types=TYPES, dflash_config=WINDOWS
    ),
    "windows": lambda path, target: save_dflash(
        path, target, layers=2, layer_types=TYPES, dflash_config={**WINDOWS, "causal": False}
    ),
    "JetSpec": lambda path, target: save_dflash(path, target, dflash_config=JETSPEC),
    "DSpark": save_dspark,
    "DSpark of some tokens": lambda path, target: save_dspark(
        path, target, tokens=[1, 2, 3, 4, 5], root_predicts=False
    ),
    "DFlash2": save_dflash2,
    "LiLiCorr": save_lilicorr,
}  # fmt: skip


def greedy(count: int) -> list[Any]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    return [params] * count


def generate_all(place: str) -> dict[str, Any]:
    """Answers of plain V2, and of each head in vLLM's chains and in ours."""
    target = str(
        save_llama(
            Path(place) / "target", seed=3, scale=1.5, vocab_size=VOCAB, num_hidden_layers=2,
            max_position_embeddings=128,
        )
    )  # fmt: skip
    options = {"model": target, "max_model_len": 64, **TINY}
    prompts = random_prompts([3, 12, 20, 31] * 2, VOCAB)
    params = greedy(len(prompts))
    answers: dict[str, Any] = {"plain": generate(None, prompts, params, **options)}
    for name, save in HEADS.items():
        head = save(Path(place) / name.replace(" ", "-"), target)
        method = "dspark" if name.startswith("DSpark") else "dflash"
        config = {"method": method, "model": head, "num_speculative_tokens": DEPTH}
        if name == "JetSpec":  # vLLM's chains know another word for it
            own = {**JETSPEC, "causal": True}
            config["model"] = save_dflash(Path(place) / "causal", target, dflash_config=own)
        vllms = generate_chain(config, prompts, params, **options)
        chain = whole_trees(size=DEPTH + 1, depth=DEPTH, draft=head) | {
            "tree": {"parents": list(range(-1, DEPTH))},
        }  # fmt: skip
        answers[name] = {"vLLM's": vllms, "ours": generate(chain, prompts, params, **options)}
    return answers


answers = called_once(call_on_v2, generate_all)


of_each = pytest.mark.parametrize("head", HEADS)


@of_each
def test_greedy_tokens_are_those_of_plain_vllm(head, answers):
    assert answers[head]["ours"]["tokens"] == answers["plain"]["tokens"]


@of_each
def test_a_chain_is_accepted_as_vllms_own_is(head, answers):
    """The same drafts from the same states: as many steps, as much accepted."""
    ours, vllms = (answers[head][whose]["counts"] for whose in ("ours", "vLLM's"))
    assert {name: ours[name] for name in SPEC_DECODE} == vllms
    assert ours["accepted_tokens"] > 5
