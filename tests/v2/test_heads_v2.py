"""Trees drafted by heads and MTP layers: tokens as plain V2's, drafts as in vLLM's own chains.

The embedded target with its trained heads; tiny targets with random heads that draft blocks; and
tiny ones, among them mixtures of experts, whose own layer drafts. In CI `test_sampled_trees_v2.py`
has DFlash, and `tests/gpu_rehearsal/test_heads.py` EAGLE-3, each from graphs.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams

from sequoia_vllm.bench.report import BenchReport
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.hardware.step_profile import Profile
from sequoia_vllm.library.pair_key import PairKey
from sequoia_vllm.library.tree_library import TreeLibrary
from sequoia_vllm.library.user_files import USER_DIRECTORY_VARIABLE
from tests.oracles.dflash import dflash_drafts, target_layers
from tests.support.block_heads import save_dflash2, save_dspark, save_lilicorr
from tests.support.calling import called_once
from tests.support.commands import command, in_words
from tests.support.engines import chain_of, running, sequoia, whole_trees
from tests.support.expert_layers import KINDS, save_experts
from tests.support.generating import (
    SPEC_DECODE,
    TINY,
    completions,
    generate,
    generate_on,
    generate_speculating,
    random_prompts,
)
from tests.support.heads import DFLASH, EAGLE3, save_dflash, save_mimo
from tests.support.interpreted import call_on_v2
from tests.support.latents import LATENT_KINDS, save_latent_layer
from tests.support.models import MODELS, prompts, save_llama, save_word_tokenizer
from tests.support.recurrent import run_chains, run_in_float32
from tests.support.train_drafter import script_modules

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.sharded]

DEPTH, TOKENS = 4, 24
HEADS = {"eagle3": EAGLE3, "dflash": DFLASH}


def greedy(count: int, tokens: int = TOKENS) -> list[Any]:
    return [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)] * count


def mixed() -> list[Any]:
    """Greedy, with seeds and truncations, without drafts, with a capped tree, ending early."""
    common = {"max_tokens": 16, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=3, **common),
        SamplingParams(temperature=0, **common, extra_args={MOST_DRAFTS: 0}),
        SamplingParams(temperature=0.7, seed=5, top_p=0.9, **common),
        SamplingParams(temperature=0, **common, extra_args={MOST_DRAFTS: 2}),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, repetition_penalty=1.3, **common),
    ]


def trees_of(head: str) -> dict[str, Any]:
    return whole_trees(size=12, depth=DEPTH, draft=head)


def check_chain(ours: dict[str, Any], vllms: dict[str, Any], least: int) -> None:
    """The same drafts from the same states: as many steps, as much accepted."""
    assert {name: ours["counts"][name] for name in SPEC_DECODE} == vllms["counts"]
    assert least < ours["counts"]["accepted_tokens"] < ours["counts"]["draft_tokens"]


# -- the embedded target's heads ---------------------------------------------------------


def generate_in_tiers(head: str, texts: list[str]) -> list[dict[str, Any]]:
    """Whole trees of one request, small ones of two, none of three: the head reads all the same.

    First it ends with keys and values where nothing is drafted, then it computes its whole layer.
    """
    from sequoia_vllm.engine.v2.drafting import committed_reader

    lengths = [greedy(1, TOKENS - 8 * index)[0] for index in range(3)]
    steps = {"num_speculative_tokens_per_batch_size": [[1, 1, 11], [2, 2, 3], [3, 8, 0]]}
    with running(sequoia(size=12, depth=DEPTH, draft=head, **steps)) as llm:
        ending_early = generate_on(llm, texts, lengths)
        llm.reset_prefix_cache()
        with patch.object(committed_reader, "patched", lambda *_: nullcontext()):
            return [ending_early, generate_on(llm, texts, lengths)]


def generate_of(kind: str) -> dict[str, Any]:
    """Answers of plain V2, and of this head."""
    texts, params, head = prompts(3), greedy(3), HEADS[kind]
    special, long = (prompts(len(mixed())), mixed()), (prompts(6), greedy(6, 64))
    with running(None) as llm:
        plain, plain_special, plain_long = (
            {"tokens": completions(llm.generate(*requests, use_tqdm=False))}
            for requests in ((texts, params), special, long)
        )
    with running(trees_of(head)) as llm:  # from a cache that is empty, and then has the prompts
        twice = [generate_on(llm, texts, params) for _ in range(2)]
    # Room for two requests and a half.
    small = {"kv_cache_memory_bytes": 4 << 20, "block_size": 32, "max_model_len": 256}
    return {
        "plain": plain,
        "plain special": plain_special,
        "plain long": plain_long,
        "vLLM's chain": generate_speculating(
            {"method": kind, "model": head, "num_speculative_tokens": DEPTH}, texts, params
        ),
        "chain": generate(chain_of(head, DEPTH), texts, params),
        "twice": twice,
        "tiers": generate_in_tiers(head, texts),
        "special": generate(trees_of(head), *special, max_num_batched_tokens=64),
        "synchronous": generate(trees_of(head), texts, params, async_scheduling=False),
        "preempted": generate(trees_of(head), *long, **small),
    }


@pytest.fixture(scope="module", params=HEADS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def answers(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return call_on_v2(generate_of, tmp_path_factory.mktemp("heads"), kind=kind)


def test_tokens_are_those_of_plain_vllm(answers, kind):
    """Of requests of every kind, with prompts in chunks beside trees, and where some are preempted.

    What the prefix cache keeps the head has read, but for the last block, as that comes with a
    later token: vLLM computes it anew.
    """
    for name in ("vLLM's chain", "chain", "synchronous"):
        assert answers[name]["tokens"] == answers["plain"]["tokens"], name
    first, second = answers["twice"]
    assert first["tokens"] == second["tokens"] == answers["plain"]["tokens"]
    assert first["counts"]["tokens_per_tree"] == second["counts"]["tokens_per_tree"]
    assert answers["special"]["tokens"] == answers["plain special"]["tokens"]
    assert answers["special"]["counts"]["tokens_per_tree"] > 1.2
    assert answers["preempted"]["tokens"] == answers["plain long"]["tokens"]
    if kind != "dflash":  # from 3 to 4 MiB none of its requests was preempted; less does not start
        assert answers["preempted"]["counts"]["preemptions"] > 0


def test_a_chain_is_accepted_as_vllms_own_is_and_a_tree_more(answers):
    chain = answers["chain"]
    check_chain(chain, answers["vLLM's chain"], least=15)
    tree = answers["twice"][0]["counts"]
    assert tree["tokens_per_tree"] > 1.1 * chain["counts"]["tokens_per_tree"]


def test_the_head_reads_while_nothing_is_drafted(answers):
    tiers, whole = answers["tiers"]
    for [tokens], [found] in zip(answers["plain"]["tokens"], tiers["tokens"], strict=True):
        assert found == tokens[: len(found)]
    assert tiers["counts"]["tokens_per_tree"] > 1.3
    for what in ("tree_steps", "tokens_per_tree"):
        assert tiers["counts"][what] == whole["counts"][what]


# -- by torch alone ---------------------------------------------------


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with script_modules() as modules:
        yield modules


def expected(kind: str, scripts: Any) -> dict[str, Any]:
    """Tokens, steps and accepted drafts; every chain is of the target's own greedy text."""
    if kind == "eagle3":
        head, target = scripts.heads.load_head(MODELS / kind, MODELS / "target", "cpu")
    else:
        layers = target_layers(MODELS / kind)
        target = scripts.eagle3.FrozenTarget(MODELS / "target", layers, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    found: dict[str, Any] = {"tokens": [], "steps": 0, "accepted": 0}
    for prompt in prompts(3):
        beginning = torch.tensor([tokenizer(prompt).input_ids])
        [text] = target._model.generate(
            beginning, max_new_tokens=TOKENS + DEPTH + 1, do_sample=False, eos_token_id=None,
            attention_mask=torch.ones_like(beginning),
        )  # fmt: skip
        if kind == "eagle3":
            drafts, _ = head.draft(target, text, DEPTH)
        else:
            drafts = dflash_drafts(MODELS / kind, target, text, DEPTH)
        right = drafts[:-DEPTH] == text[2:].unfold(0, DEPTH, 1)
        lengths = right.long().cumprod(-1).sum(-1)
        start, end = beginning.shape[1] - 1, beginning.shape[1] + TOKENS - 2
        while start < end:
            found["steps"] += 1
            found["accepted"] += int(lengths[start])
            start += int(lengths[start]) + 1
        found["tokens"].append(text[beginning.shape[1] :][:TOKENS].tolist())
    return found


def test_vllms_chain_accepts_what_torch_says(kind, answers, scripts):
    """The script that trains EAGLE-3 heads, and an oracle, read the checkpoints for themselves.

    The two agree if layers, norms, residuals, positions and masks are those that vLLM serves
    the head with.
    """
    chain, wanted = answers["vLLM's chain"], expected(kind, scripts)
    assert [tokens for [tokens] in chain["tokens"]] == wanted["tokens"]
    counts = chain["counts"]
    # Two most likely tokens may be as good as equal, and rounding differ.
    assert counts["drafts"] == pytest.approx(wanted["steps"], abs=2)
    assert counts["accepted_tokens"] == pytest.approx(wanted["accepted"], abs=2)


# -- tiny heads that draft blocks ----------------------------------------------------------

# Few tokens, so that drafts are often accepted by chance.
VOCAB = 6
TYPES = ["full_attention", "sliding_attention"]
WINDOWS = {"mask_token_id": 0, "target_layer_ids": [0], "swa_window_size": 8}
JETSPEC = {"mask_token_id": 0, "target_layer_ids": [0], "causal_head": True}
BLOCK_HEADS: dict[str, Callable[[Path, str], str]] = {
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


def generate_blocks(place: str) -> dict[str, Any]:
    """Answers of plain V2, and of each head in vLLM's chains and in ours."""
    config = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 128}
    target = str(save_llama(Path(place) / "target", seed=3, scale=1.5, **config))
    options = {"model": target, "max_model_len": 64, **TINY}
    given = random_prompts([3, 12, 20, 31] * 2, VOCAB), greedy(8)
    found: dict[str, Any] = {"plain": generate(None, *given, **options)}
    for name, save in BLOCK_HEADS.items():
        head = save(Path(place) / name.replace(" ", "-"), target)
        method = "dspark" if name.startswith("DSpark") else "dflash"
        vllms = {"method": method, "model": head, "num_speculative_tokens": DEPTH}
        if name == "JetSpec":  # vLLM's chains know another word for it
            own = {**JETSPEC, "causal": True}
            vllms["model"] = save_dflash(Path(place) / "causal", target, dflash_config=own)
        found[name] = {
            "vLLM's": generate_speculating(vllms, *given, **options),
            "ours": generate(chain_of(head, DEPTH), *given, **options),
        }
    return found


blocks = called_once(call_on_v2, generate_blocks)


@pytest.mark.parametrize("head", BLOCK_HEADS)
def test_block_heads_draft_as_in_vllms_chains(head, blocks):
    assert blocks[head]["ours"]["tokens"] == blocks["plain"]["tokens"]
    check_chain(blocks[head]["ours"], blocks[head]["vLLM's"], least=5)


# -- MTP layers ----------------------------------------------------------------------------

MTP_DEPTH, MTP_TOKENS = 3, 20


def generate_by_layer(target: str, is_hybrid: bool) -> dict[str, Any]:
    """Answers of plain V2, of chains, and of trees: greedy, again from the cache, and sampled."""
    if is_hybrid:
        run_in_float32()
        run_chains()
    texts, params = random_prompts([9, 20, 70]), greedy(3, MTP_TOKENS)
    sampled = [
        SamplingParams(temperature=0.8, seed=index, max_tokens=MTP_TOKENS, ignore_eos=True)
        for index in range(3)
    ]
    vllms = {"method": "mtp", "num_speculative_tokens": MTP_DEPTH}
    options = {"model": target, "max_num_batched_tokens": 64, **TINY}
    found = {
        "plain": generate(None, texts, params, **options),
        "chain": generate(chain_of(target, MTP_DEPTH, drafter="mtp"), texts, params, **options),
        "vLLM's chain": generate_speculating(
            vllms, texts, params, **options, enable_prefix_caching=False
        ),
    }
    with running(whole_trees(12, depth=MTP_DEPTH, draft=target, drafter="mtp"), **options) as llm:
        found["tree"], found["again"] = (generate_on(llm, texts, params) for _ in range(2))
        found["sampled"] = generate_on(llm, texts, sampled)
    return found


OTHER_LAYERS = {
    "MiMo": save_mimo,
    **{kind: partial(save_latent_layer, vocab=256, kind=kind) for kind in LATENT_KINDS},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*OTHER_LAYERS, *KINDS])
def test_mtp_layers_draft_as_in_vllms_chain(kind, tmp_path):
    """What the prefix cache keeps the layer has read."""
    folder, is_hybrid = tmp_path / "target", kind == "Qwen3Next"
    save = OTHER_LAYERS.get(kind, partial(save_experts, kind=kind))
    given = {"target": save(folder), "is_hybrid": is_hybrid}
    as_on_gpus = kind in ("Qwen3Next", "MiMoV2Flash", *LATENT_KINDS)
    found = call_on_v2(generate_by_layer, tmp_path, gpu_attention=as_on_gpus, **given)
    for name in ("vLLM's chain", "chain", "tree", "again"):
        assert found[name]["tokens"] == found["plain"]["tokens"], name
    check_chain(found["chain"], found["vLLM's chain"], least=0)
    per_tree = {
        name: found[name]["counts"]["tokens_per_tree"]
        for name in ("chain", "tree", "again", "sampled")
    }
    assert per_tree["tree"] == per_tree["again"] >= per_tree["chain"] > 1.2
    assert per_tree["sampled"] > 1.1


def measure_by_layer(target: str, name: str, *options: str) -> dict[str, Any]:
    """What one of the commands that measure says of a target, with little to do."""
    done = command(
        name, "--model", target, "--prompts", Path(target, "prompts.txt"), "--eager", "--dtype",
        "float32", "--kv-cache-gib", "0.03125", "--batch-sizes", "1", "--max-tokens", "12",
        "--json", *options,
    )  # fmt: skip
    return {"said": done.stderr, **json.loads(done.stdout)}


def bench_by_layer(target: str) -> dict[str, Any]:
    return measure_by_layer(
        target, "bench", "--rounds", "1", "--temperature", "0", "--chain", "2", "--trees", "4x2",
        "--num-prompts", "1",
    )  # fmt: skip


def tune_by_layer(target: str) -> dict[str, Any]:
    return measure_by_layer(
        target, "tune", "--draft-model", "mtp", "--quick", "--max-tokens-total", "40",
        "--tokens", "1,4", "--context", "16",
    )  # fmt: skip


@pytest.fixture
def drafts_itself(tmp_path) -> str:
    """A target with an MTP layer, a tokenizer and prompts."""
    target = save_mimo(tmp_path / "target")
    save_word_tokenizer(Path(target))
    words = (" ".join(f"w{(7 * i + k) % 250}" for i in range(9)) for k in range(4))
    Path(target, "prompts.txt").write_text("\n".join(words), "utf-8")
    return target


def test_bench_measures_the_targets_own_layer(drafts_itself, tmp_path):
    """Without a name, as no draft is known; vLLM's chain of the same layer beside it."""
    found = call_on_v2(bench_by_layer, tmp_path, target=drafts_itself)
    assert f"measuring mtp, {drafter('mtp').name} of its own" in in_words(found.pop("said"))
    report = BenchReport.model_validate(found)
    plain, chain, tree = report.results
    assert [one.method for one in report.results] == ["plain vLLM", "chain of 2", "Sequoia 4x2"]
    assert report.draft.name == "mtp"
    assert report.greedy.identical == report.greedy.compared > 0
    assert (plain.drafts, chain.drafts, tree.drafts, tree.depth) == (0, 2, 3, 2)
    assert plain.tokens_per_step == 1
    assert all(one.tokens_per_step > 1 and one.split.draft > 0 for one in (chain, tree))


def test_tune_measures_the_targets_own_layer(drafts_itself, tmp_path, monkeypatch):
    """An engine that drafts with it finds the tree: by the target's name."""
    monkeypatch.setenv(USER_DIRECTORY_VARIABLE, str(tmp_path / "trees"))
    tuned = call_on_v2(tune_by_layer, tmp_path, target=drafts_itself)
    assert (tuned["target"], tuned["draft"]) == (drafts_itself, "mtp")
    assert "tuned here" in tuned["now_used"]
    assert '"drafter": "mtp"' in tuned["command"]
    pair = PairKey(tuned["device"], drafts_itself, drafts_itself, "float32")
    assert TreeLibrary().tuned(pair).entry.tree.size == tuned["tree"]["size"]
    assert Profile.load(TreeLibrary().measurements(pair).profile).head.kind == "mtp"
