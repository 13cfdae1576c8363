"""Sampled output of trees on Model Runner V2: a seed's tokens, and the target's law."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from sequoia_vllm.drafting import dynamic_levels
from sequoia_vllm.engine.core.eligibility import MOST_DRAFTS
from sequoia_vllm.engine.core.prediction_option import PREDICTION
from sequoia_vllm.kernels import begin_drafting, predictions
from sequoia_vllm.verification import prediction
from sequoia_vllm.verification.methods import register
from sequoia_vllm.verification.prediction import Prediction
from tests.oracles.laws import assert_same_law
from tests.support import target_only
from tests.support.block_heads import save_dflash2, save_dspark
from tests.support.calling import called_once
from tests.support.editing import SIBLINGS_FIRST, edited_params
from tests.support.engines import generated, running, sequoia, tree_metrics
from tests.support.expert_layers import save_experts
from tests.support.generating import (
    TINY,
    VOCAB,
    answered,
    check_logprobs,
    completions,
    counted,
    generate,
    generate_with_trees,
    processed_chunks,
    random_prompts,
    save_related_pair,
)
from tests.support.heads import save_dflash, save_eagle3, save_mimo
from tests.support.interpreted import call_on_gpu, call_on_v2
from tests.support.latents import rehearse_on_gpus, save_latent_pair
from tests.support.mamba import rehearse_as_on_gpus, save_mamba_pair
from tests.support.memory_checks import VARIABLE
from tests.support.models import (
    next_probabilities,
    save_broken,
    save_llama,
    save_word_tokenizer,
)
from tests.support.recurrent import rehearse_in_float32
from tests.support.rehearsing import generate_with_trees as rehearse
from tests.support.rehearsing import rehearsing
from tests.support.target_only import TARGET_ONLY
from tests.support.vocabularies import save_words

pytestmark = [pytest.mark.engine, pytest.mark.slow]


# -- seeds -------------------------------------------------------------------------------

TRUNCATIONS = [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02}]


def seeded_params(count: int, max_tokens: int) -> list[Any]:
    """Seeds and truncations of their own; the second has two completions."""
    return [
        SamplingParams(
            temperature=0.8, seed=7 + index, max_tokens=max_tokens, ignore_eos=True,
            n=1 + (index == 1), **TRUNCATIONS[index % 3],
        )
        for index in range(count)
    ]  # fmt: skip


def generate_seeded(models: str) -> dict[str, Any]:
    """Answers of plain V2, of trees, and of trees by a broken draft: two more without a seed."""
    target, draft = save_related_pair(Path(models))
    tiny = random_prompts([12, 30, 5, 41, 8, 20]), seeded_params(6, 16)
    broken = save_broken(Path(models) / "broken", draft, slice(None, None, 16))
    unseeded = [SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False)] * 2
    mixed = [*tiny[0], *tiny[0][:2]], [*tiny[1], *unseeded]
    return {
        "plain": generate(None, *tiny, model=target, **TINY),
        "trees": generate_with_trees(draft, *tiny, model=target, **TINY),
        "broken": generate_with_trees(broken, *mixed, model=target, **TINY),
    }


def generate_with_a_tiny_pair(models: str) -> dict[str, Any]:
    """What each of the functions with its name gives; metrics first, as they are the process's."""
    return {
        "from itself": generate_from_itself(models),
        "seeded": generate_seeded(models),
        "beside": generate_beside(models),
        "edited": generate_edited(models),
    }


tiny_pair = called_once(call_on_v2, generate_with_a_tiny_pair)


def test_a_seed_gives_the_tokens_of_plain_vllm(tiny_pair):
    seeded = tiny_pair["seeded"]
    plain, trees = seeded["plain"], seeded["trees"]
    assert trees["tokens"] == plain["tokens"]
    assert trees["counts"]["tokens_per_tree"] > 1.2
    [first, second] = plain["tokens"][1]
    assert first != second


def test_a_draft_that_gives_nan_changes_nothing(tiny_pair):
    """Its trees are drawn uniformly where it has no law. (Their verification: `tests/kernels`.)"""
    plain, broken = (tiny_pair["seeded"][which] for which in ("plain", "broken"))
    assert broken["tokens"][: len(plain["tokens"])] == plain["tokens"]
    assert all(0 <= token < VOCAB for [tokens] in broken["tokens"][-2:] for token in tokens)
    whole = tiny_pair["seeded"]["trees"]["counts"]
    assert 1 < broken["counts"]["tokens_per_tree"] < whole["tokens_per_tree"]


# -- who applies temperatures -------------------------------------------------------------

# Parameters of one request each, beside one that is sampled at 0.7 and runs longer.
BESIDE = {
    "nothing": {"temperature": 1.3},
    "greedy": {"temperature": 0, "top_p": 0.9},
    "seed at temperature 1": {"temperature": 1.0, "seed": 5},
    "seed": {"temperature": 0.8, "seed": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "top_k": 20},
    "min_p": {"temperature": 0.7, "min_p": 0.05},
    "penalty": {"temperature": 0.7, "repetition_penalty": 1.2},
    "greedy with a penalty": {"temperature": 0, "repetition_penalty": 1.2},
}
LEFT_TO_THE_WALK = ["nothing", "greedy", "seed at temperature 1"]
DETERMINED = ["greedy", "seed at temperature 1", "seed", "greedy with a penalty"]


def generate_beside(models: str) -> dict[str, Any]:
    """By name: tokens of plain V2 and of trees, and which chunks of a batch were processed."""
    target, draft = save_related_pair(Path(models))
    requests = random_prompts([9, 20])
    short, long = (
        {"max_tokens": most, "ignore_eos": True, "detokenize": False} for most in (9, 22)
    )
    beside = {name: SamplingParams(**short, **settings) for name, settings in BESIDE.items()}
    answers = {}
    with running(None, model=target, **TINY) as llm:
        for name, params in beside.items():
            answers[name] = {"plain": generated(llm, requests[:1], params)}
    config = sequoia(size=8, depth=3, draft=draft)
    with running(config, model=target, **TINY) as llm, processed_chunks() as chunks:
        for name, params in beside.items():
            chunks.clear()
            both = [params, SamplingParams(temperature=0.7, **long)]
            tokens, _ = generated(llm, requests, both)
            answers[name] |= {"trees": [tokens], "processed": list(chunks)}
    return answers


@pytest.mark.parametrize("name", BESIDE)
def test_temperatures_alone_are_left_to_the_walk(name, tiny_pair):
    """Anything else that one request of a batch needs is vLLM's work, for all of them."""
    processed = tiny_pair["beside"][name]["processed"]
    assert len(processed) > 4
    assert any(processed) == (name not in LEFT_TO_THE_WALK)
    assert not all(processed)  # when that request was at its end


@pytest.mark.parametrize("name", DETERMINED)
def test_tokens_are_those_of_plain_vllm_whoever_applies_temperatures(name, tiny_pair):
    found = tiny_pair["beside"][name]
    assert found["trees"] == found["plain"]


# -- edited logits --------------------------------------------------------------------------


def generate_edited(models: str) -> dict[str, Any]:
    target, draft = save_related_pair(Path(models))
    [prompt] = random_prompts([14])
    unedited = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    # Edits show in these logprobs.
    options = {**TINY, "logprobs_mode": "processed_logprobs"}
    with running(None, model=target, **options) as llm:
        [tokens] = generated(llm, [prompt], unedited)
        params = edited_params(tokens, 12, VOCAB)
        prompts = [prompt] * len(params)
        plain = answered(llm.generate(prompts, list(params.values()), use_tqdm=False))
    config = {**sequoia(draft=draft), "tree": {"parents": SIBLINGS_FIRST}}
    with running(config, model=target, **options) as llm:
        trees = answered(llm.generate(prompts, list(params.values()), use_tqdm=False))
        trees["counts"] = counted(llm)
        unedited.extra_args = {MOST_DRAFTS: 2}
        [capped] = generated(llm, [prompt], unedited)
        trees |= {"capped": capped, "capped counts": counted(llm)}
    return {"names": list(params), "unedited": tokens, "plain": plain, "trees": trees}


def test_edits_are_by_path_and_tokens_those_of_plain_vllm(tiny_pair):
    found = tiny_pair["edited"]
    both = (found[which]["tokens"] for which in ("trees", "plain"))
    by_name = zip(found["names"], *both, strict=True)
    assert [name for name, trees, plain in by_name if trees != plain] == []
    assert found["trees"]["counts"]["tokens_per_tree"] > 1.3


def test_a_request_may_cap_its_tree(tiny_pair):
    """Its root has three children, and two may be drafted."""
    found = tiny_pair["edited"]
    assert found["trees"]["capped"] == found["unedited"]
    counts = found["trees"]["capped counts"]
    assert counts["offered"][0][1] > 0
    assert counts["offered"][0][2] == sum(counts["offered"][1]) == 0


def test_processed_logprobs_are_those_of_plain_vllm(tiny_pair):
    found = tiny_pair["edited"]
    assert check_logprobs(found["trees"]["logprobs"], found["plain"]["logprobs"]) > 200


def test_edits_change_what_requests_give(tiny_pair):
    """Else the test above would see nothing."""
    found = tiny_pair["edited"]
    pairs = zip(found["names"], found["plain"]["tokens"], strict=True)
    same = [n for n, plain in pairs if plain == found["unedited"] and "greedy" in n]
    assert same == []


# -- draft == target, and the counters ---------------------------------------------------

TEMPERATURES = [1.0, 0.6, 1.3]


def generate_from_itself(models: str) -> dict[str, Any]:
    """What became of trees that the target drafted; as the worker and the metrics say."""
    target, _ = save_related_pair(Path(models))
    params = [
        SamplingParams(temperature=temperature, max_tokens=25, ignore_eos=True, detokenize=False)
        for temperature in TEMPERATURES
    ]
    with running(sequoia(size=8, depth=3, draft=target), model=target, **TINY) as llm:
        requests = random_prompts([9, 30, 17])
        llm.generate(requests, params, use_tqdm=False)
        # A step that was scheduled before the last requests' ends is reported by the next.
        llm.generate(requests[0], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        return {**counted(llm), "metrics": tree_metrics(llm)}


@pytest.fixture(scope="module")
def from_itself(tiny_pair) -> dict[str, Any]:
    return tiny_pair["from itself"]


def test_all_that_the_target_drafts_itself_is_accepted(from_itself):
    """Unseeded: every first child has the probability it was drawn with."""
    offered, accepted = (np.array(from_itself[name]) for name in ("offered", "accepted"))
    assert from_itself["tree_steps"] > 12
    assert accepted[:, 0].tolist() == offered[:, 0].tolist()
    assert accepted[:, 1:].sum() == 0
    # All but a request's last trees, which its end may cut short.
    assert from_itself["depth_counts"][-1] >= from_itself["tree_steps"] - 3


def test_metrics_show_what_the_worker_counted(from_itself):
    """Less the trees that were scheduled before a request's end was seen, as vLLM does."""
    shown = from_itself["metrics"]
    assert shown["drafted_nodes"] == 0  # for the last request, which has one token
    assert shown["trees"] == from_itself["drafts"]
    behind_ends = from_itself["tree_steps"] - shown["trees"]
    assert 0 <= behind_ends <= len(TEMPERATURES)
    depths = [shown[f"accepted_depth/{d}"] for d in range(len(from_itself["depth_counts"]))]
    assert sum(depths) == shown["trees"]
    assert sum(d * trees for d, trees in enumerate(depths, 1)) == shown["emitted_tokens"]
    for counted_trees, shown_trees in zip(from_itself["depth_counts"], depths, strict=True):
        assert 0 <= counted_trees - shown_trees <= behind_ends
    for name in ("offered", "accepted"):
        for depth, children in enumerate(from_itself[name], start=1):
            for child, value in enumerate(children, start=1):
                seen = shown.get(f"{name}_children/{depth}/{child}", 0)
                assert 0 <= value - seen <= behind_ends


# -- the law -----------------------------------------------------------------------------
#
# Given all tokens before it, every token has a probability that the target itself
# can be asked for. Tokens are lined up by how much likelier the target finds them
# than the draft does (of a head: those first that it cannot draft); then a uniform number
# from the interval that a token takes up is uniform over [0, 1), and independent of all
# others, exactly if the engine follows the target's law. Too many drafts accepted show as
# small numbers: were 33 % of all tokens by the draft's law, cut off alike, the 576 numbers
# would show it with probability 0.99, at a false-alarm rate of 1e-6 (computed for these
# models and settings).
# Smaller errors are for `tests/kernels`, and for the V1 engine's `tests/engine/test_sampled.py`.

LAW_VOCAB, LAW_REQUESTS = 6, 24
HEAD_TOKENS = [0, 1, 2, 4]
# Tokens per request. `tests/kernels` compares every decision of either method.
LAW_TOKENS = {"sequoia": 24, "traversal": 12}
# Temperature, top_p, top_k, min_p; the second half of the requests needs only temperatures.
LAW_SETTINGS = ([(1.2, 0.9, 4, 0.1), (0.7, 0.8, 0, 0.0)], [(0.6, 1.0, 0, 0.0), (1.3, 1.0, 0, 0.0)])
FALSE_ALARM = 1e-6


# Among others its prefix of 3 drafts is drawn, where node 1 has lost its child and node 2 has one.
# (Batches once kept the Q of such prefixes in rows of their next request's.)
LAW_TREE = {
    "tree": {"parents": [-1, 0, 0, 2, 1]},
    "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 3]],
}


def law_settings(index: int) -> tuple[float, float, int, float]:
    return LAW_SETTINGS[2 * index // LAW_REQUESTS][index % 2]


def foretold_for_law(method: str) -> list[list[int]]:
    """A text for each request, any one."""
    texts = random_prompts([LAW_TOKENS[method]] * LAW_REQUESTS, LAW_VOCAB)
    return [text["prompt_token_ids"] for text in texts]


def generate_for_law(
    target: str, draft: str | None, method: str, tree: dict[str, Any] | None = None,
    states: str = "", foretells: bool = False, branches: bool = False, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Unseeded completions of many requests at once, as users' engines make them: from graphs.

    Without a draft the target's own layer drafts. `states`: those of the target's layers.
    `foretells`: the users of two requests of three foretell a text, any one. With `branches` one
    token that matches is enough for a branch.
    """
    if branches:
        begin_drafting._BRANCH_RUN, begin_drafting._BRANCH_GROWTH = 1, 9
        predictions._LEAST_TRUST = 0.0  # however often a text was wrong
        dynamic_levels.CHILDREN = 4  # of six tokens
    os.environ[VARIABLE] = "0"  # other tests of the rehearsal check the kernels' memory
    if states:
        run = {"deltas": rehearse_in_float32, "mamba": rehearse_as_on_gpus}
        run.get(states, rehearse_on_gpus)()
    requests, foretold = random_prompts([4] * LAW_REQUESTS, LAW_VOCAB), foretold_for_law(method)
    params = [
        SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
            max_tokens=LAW_TOKENS[method], ignore_eos=True, detokenize=False,
            extra_args={PREDICTION: foretold[index]} if foretells and index % 3 else None,
        )
        for index, (temperature, top_p, top_k, min_p) in enumerate(
            map(law_settings, range(LAW_REQUESTS))
        )
    ]  # fmt: skip
    config = sequoia(4, 2, draft, verification=method, retrieval=not branches, **(tree or {}))
    if draft is None:
        config = config | {"model": None, "drafter": "mtp"}
    options = {
        "model": target, "max_model_len": 64, "max_num_seqs": 8,
        # Graphs of whole passes are all that is replayed here: nothing needs to be traced.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, **more,
    }  # fmt: skip
    with rehearsing(config, **options) as llm, processed_chunks() as chunks:
        return {**rehearse(llm, requests, params), "processed": chunks}


def uniforms(
    prompt: list[int], generated: list[int], paths: tuple[str, str | list[int]],
    setting: tuple[float, float, int, float], generator: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """One number per generated token; uniform if it follows the target's law.

    Target and draft are at ``paths``; of a head the tokens that it drafts are given instead.
    """
    tokens = prompt + generated
    target, draft = (
        next_probabilities(path, [tokens[:-1]], *setting)[0] if isinstance(path, str)
        else _uniform_among(path, len(tokens) - 1)
        for path in paths
    )  # fmt: skip
    first = len(prompt) - 1
    numbers = []
    for p, q, token in zip(target[first:], draft[first:], generated, strict=True):
        assert p[token] > 0  # nothing impossible happened
        order = np.argsort(p / np.maximum(q, 1e-9))
        before = p[order[: list(order).index(token)]].sum()
        numbers.append(min(before + p[token] * generator.random(), 1 - 1e-9))
    return np.array(numbers)


def _uniform_among(tokens: list[int], length: int) -> np.ndarray:
    one = np.isin(np.arange(LAW_VOCAB), tokens) / len(tokens)
    return np.tile(one, (length, 1))


def assert_uniform(cells: np.ndarray) -> None:
    """Chi-square against equal probabilities of all cells."""
    assert_same_law(cells, np.full(cells.shape, 1 / cells.size), FALSE_ALARM, fewest=0)


def save_for_law(path: Path, seed: int, scale: float = 1.0, **config: Any) -> str:
    given = {"vocab_size": LAW_VOCAB, "max_position_embeddings": 64, **config}
    return str(save_llama(path, seed=seed, scale=scale, **given))


def check_law(
    folder: Path, target: str, draft: str | None, likely: str | list[int] | None = None,
    method: str = "traversal", **more: Any,
) -> list[list[int]]:  # fmt: skip
    """Returns answers. It checks each token given the tokens before, and independently of the
    number before.

    `likely`: another model that says what is likely drafted; of a head, the tokens that it drafts.
    """
    answer = call_on_gpu(
        generate_for_law, folder, target=target, draft=draft, method=method, **more
    )
    share = LAW_TOKENS[method] / 24  # of the usual number of tokens
    paths = target, likely or draft
    assert answer["graphs"]["DraftGraphs"] > 25 * share
    assert answer["eager growth"] == []
    # A branch needs final logits: of each batch some requests may have one.
    counts = answer["counts"]
    kinds = (True,) if more.get("branches") else (True, False)
    branches = counts["tree_steps"] - sum(counts["depth_counts"])
    least, most = (100, math.inf) if more.get("branches") else (0, 0)
    assert least <= branches <= most
    assert min(answer["processed"].count(processed) for processed in kinds) > 13 * share

    generator = np.random.default_rng(1)
    numbers = np.stack([
        uniforms(request["prompt_token_ids"], tokens, paths, law_settings(index), generator)
        for index, (request, [tokens]) in enumerate(
            zip(random_prompts([4] * LAW_REQUESTS, LAW_VOCAB), answer["tokens"], strict=True)
        )
    ])  # fmt: skip
    assert answer["counts"]["tokens_per_tree"] > 1.3  # trees were at work
    assert answer["counts"]["depth_counts"][0] > 44 * share  # with rejections among them
    assert_uniform(np.histogram(numbers, bins=8, range=(0, 1))[0])
    for apart in (1, 2):
        first, second = numbers[:, :-apart].ravel(), numbers[:, apart:].ravel()
        pairs = np.histogram2d(first, second, bins=5, range=[(0, 1)] * 2)[0]
        assert_uniform(pairs)
    for neighbours in (numbers[:-2:2], numbers[2::2]), (numbers[:-1], numbers[1:]):
        pairs = np.histogram2d(*(part.ravel() for part in neighbours), bins=5, range=[(0, 1)] * 2)
        assert_uniform(pairs[0])
    return [tokens for [tokens] in answer["tokens"]]


SHARDED = pytest.mark.sharded


@pytest.mark.parametrize("method", ["sequoia", pytest.param("traversal", marks=SHARDED)])
def test_unseeded_tokens_follow_the_targets_law(method, tmp_path):
    target, draft = save_for_law(tmp_path / "target", 3, 1.5), save_for_law(tmp_path / "draft", 4)
    check_law(tmp_path, target, draft, method=method, tree=LAW_TREE, foretells=True)


@pytest.mark.sharded
def test_branches_of_told_tokens_leave_the_law(tmp_path, monkeypatch):
    """And told tokens come as often as the target says. Verified by the Q of the tree's rows, they
    came twice as often, nine standard deviations away."""
    target, draft = save_for_law(tmp_path / "target", 3, 1.5), save_for_law(tmp_path / "draft", 4)
    tree = {**LAW_TREE, "dynamic_tree": True}
    answers = check_law(
        tmp_path, target, draft, method="sequoia", tree=tree, foretells=True, branches=True
    )
    monkeypatch.setattr(prediction, "LEAST_TRUST", 0.0)  # as in the engine
    expected, came = [], 0
    for index, tokens in enumerate(answers):
        if index % 3 == 0:  # nothing is foretold
            continue
        prompt = random_prompts([4] * LAW_REQUESTS, LAW_VOCAB)[index]["prompt_token_ids"]
        text = Prediction(foretold_for_law("sequoia")[index])
        p = next_probabilities(target, [[*prompt, *tokens[:-1]]], *law_settings(index))[0]
        for place, token in enumerate(tokens):
            text.follow(np.array(tokens[:place], dtype=np.int32))
            [told] = text.told(1)
            if told >= 0:
                expected.append(p[len(prompt) - 1 + place, told])
                came += token == told
    deviation = np.sqrt(sum(one * (1 - one) for one in expected))
    assert len(expected) > 200
    assert abs(came - sum(expected)) < 5 * deviation  # 6e-7


# The draft's words by its own numbers, of the target's w0 to w5.
LAW_WORDS = {"w3": 0, "other": 1, "w5": 2, "more": 3, "w0": 6, "w1": 7}


@pytest.mark.sharded
def test_a_draft_with_another_vocabulary_leaves_the_law(tmp_path):
    """Two of six tokens are never drafted; ids and logits are mapped in the graphs."""
    target, drafts = save_for_law(tmp_path / "target", 3, 1.5), save_for_law(tmp_path / "draft", 4)
    save_word_tokenizer(tmp_path / "target")
    other = save_for_law(tmp_path / "other", 5, vocab_size=9)
    save_words(Path(other), LAW_WORDS, {})
    check_law(tmp_path, target, other, likely=drafts, skip_tokenizer_init=False)


OF_ITS_KIND = ("eagle3", "mtp", "dspark", "dflash2", "hybrid's mtp")


@pytest.mark.parametrize("kind", ["dflash", *(pytest.param(k, marks=SHARDED) for k in OF_ITS_KIND)])
def test_a_head_leaves_the_law(kind, tmp_path):
    """Two draft a part of the vocabulary only; all nodes of a level of another have one Q.

    DFlash2 has two candidates at each level, and "mtp" is a layer of the target's checkpoint.
    """
    path, is_hybrid = tmp_path / "head", kind.startswith("hybrid")
    if is_hybrid:
        target = save_experts(tmp_path / "hybrid", "Qwen3Next", vocab=LAW_VOCAB)
    elif kind == "mtp":
        target = save_mimo(tmp_path / "mimo", vocab=LAW_VOCAB)
    else:
        target = save_for_law(tmp_path / "target", 3, 0.6, num_hidden_layers=2)
    head = {
        "eagle3": lambda: save_eagle3(path, target, HEAD_TOKENS, scale=0.3),
        "dflash": lambda: save_dflash(path, target, scale=0.5),
        "dspark": lambda: save_dspark(path, target, HEAD_TOKENS, scale=0.3),
        "dflash2": lambda: save_dflash2(path, target, top_k=2, scale=0.3),
    }.get(kind, lambda: None)()
    drafts = HEAD_TOKENS if kind in ("eagle3", "dspark") else list(range(LAW_VOCAB))
    check_law(tmp_path, target, head, drafts, states="deltas" if is_hybrid else "")


@pytest.mark.sharded
@pytest.mark.parametrize("name", ["GraniteMoeHybrid", "NemotronH", "Lfm2", "DeepseekV3"])
def test_a_target_with_states_or_latents_keeps_its_law(name, tmp_path):
    has_latents = name == "DeepseekV3"
    if has_latents:
        paths = save_latent_pair(tmp_path, LAW_VOCAB)
    else:
        paths = save_mamba_pair(tmp_path, name, scale=1.0, vocab=LAW_VOCAB)
    check_law(tmp_path, *paths, states="latents" if has_latents else "mamba")


# -- another method of verification ------------------------------------------------------


def generate_target_only(models: str) -> dict[str, Any]:
    """Sampled requests, then greedy ones, by a method that is registered here."""
    register(TARGET_ONLY)
    target, draft = f"{models}/target", f"{models}/draft"
    requests = random_prompts([5, 9])
    common = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    greedy = SamplingParams(temperature=0, **common)
    answers = {}
    with running(None, model=target, **TINY) as llm:
        answers["plain"] = completions(llm.generate(requests, greedy, use_tqdm=False))
    config = sequoia(size=8, depth=3, draft=draft, verification="target-only")
    with running(config, model=target, **TINY) as llm:
        counted(llm)
        llm.generate(requests, SamplingParams(temperature=1.0, **common), use_tqdm=False)
        answers["sampled"] = counted(llm)
        answers["called"] = sorted(set(target_only.called))
        answers["tokens"] = completions(llm.generate(requests, greedy, use_tqdm=False))
        answers["greedy"] = counted(llm)
    return answers


@pytest.mark.sharded
def test_a_method_that_was_registered_there_verifies(tmp_path):
    """One token per step where it does; greedy requests do not go by it."""
    save_related_pair(tmp_path)
    answer = call_on_v2(generate_target_only, tmp_path, models=str(tmp_path))
    assert answer["called"] == ["kernel"]
    assert answer["sampled"]["tree_steps"] > 10
    assert answer["sampled"]["tokens_per_tree"] == 1
    assert answer["tokens"] == answer["plain"]
    assert answer["greedy"]["tokens_per_tree"] > 1.3
