"""Trees drafted by trained heads: tokens as plain V2's, drafts as in vLLM's own chains.

The embedded target with its embedded heads, in one process. In CI `test_sampled_trees_v2.py` has
DFlash, and `tests/gpu_rehearsal/test_heads.py` EAGLE-3, each from graphs.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm import SamplingParams

from sequoia_vllm.engine.common.request_options import MOST_DRAFTS
from tests.oracles.dflash import dflash_drafts, target_layers
from tests.support.engines import running, sequoia, whole_trees
from tests.support.generating import SPEC_DECODE, completions, generate, generate_chain, generate_on
from tests.support.heads import DFLASH, EAGLE3
from tests.support.models import MODELS, prompts
from tests.support.on_v2 import call_on_v2
from tests.support.train_drafter import script_modules

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

DEPTH, TOKENS = 4, 24
HEADS = {"eagle3": EAGLE3, "dflash": DFLASH}


def greedy(count: int) -> list[Any]:
    return [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)] * count


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


def chain_of(head: str) -> dict[str, Any]:
    return trees_of(head) | {
        "tree": {"parents": list(range(-1, DEPTH))},
        "num_speculative_tokens_per_batch_size": [[1, 1, DEPTH]],
    }


def generate_twice(head: str, texts: list[str], params: list[Any]) -> list[dict[str, Any]]:
    """From a cache that is empty, and then has the prompts."""
    with running(trees_of(head)) as llm:
        return [generate_on(llm, texts, params) for _ in range(2)]


def generate_in_tiers(head: str, texts: list[str]) -> list[dict[str, Any]]:
    """Whole trees of one request, small ones of two, none of three: the head reads all the same.

    First it ends with keys and values where nothing is drafted, then it computes its whole layer.
    """
    from sequoia_vllm.engine.v2.drafting.drafter import TreeDrafter

    lengths = greedy(3)
    lengths = [param.clone() for param in lengths]
    for index, param in enumerate(lengths):
        param.max_tokens = TOKENS - 8 * index
    steps = {"num_speculative_tokens_per_batch_size": [[1, 1, 11], [2, 2, 3], [3, 8, 0]]}
    with running(sequoia(size=12, depth=DEPTH, draft=head, **steps)) as llm:
        ending_early = generate_on(llm, texts, lengths)
        llm.reset_prefix_cache()
        with patch.object(TreeDrafter, "reading_for_keys", lambda _: nullcontext()):
            return [ending_early, generate_on(llm, texts, lengths)]


def generate_of(kind: str) -> dict[str, Any]:
    """Answers of plain V2, and of this head."""
    texts, params, head = prompts(3), greedy(3), HEADS[kind]
    special = prompts(len(mixed())), mixed()
    with running(None) as llm:
        plain, plain_special = (
            {"tokens": completions(llm.generate(*requests, use_tqdm=False))}
            for requests in ((texts, params), special)
        )
    # Room for two requests and a half.
    small = {"kv_cache_memory_bytes": 4 << 20, "block_size": 32, "max_model_len": 256}
    return {
        "plain": plain,
        "plain special": plain_special,
        "vLLM's chain": generate_chain(
            {"method": kind, "model": head, "num_speculative_tokens": DEPTH}, texts, params
        ),
        "chain": generate(chain_of(head), texts, params),
        "twice": generate_twice(head, texts, params),
        "tiers": generate_in_tiers(head, texts),
        "special": generate(trees_of(head), *special, max_num_batched_tokens=64),
        "synchronous": generate(trees_of(head), texts, params, async_scheduling=False),
        "preempted": generate(trees_of(head), texts, params, **small),
    }


@pytest.fixture(scope="module", params=HEADS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def answers(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return call_on_v2(generate_of, tmp_path_factory.mktemp("heads"), kind=kind)


def test_greedy_tokens_are_those_of_plain_vllm(answers):
    for name in ("vLLM's chain", "chain", "synchronous", "preempted"):
        assert answers[name]["tokens"] == answers["plain"]["tokens"], name


def test_a_chain_is_accepted_as_vllms_own_is(answers):
    """The same drafts from the same states, token for token: as many steps, as much accepted."""
    ours, vllms = (answers[name]["counts"] for name in ("chain", "vLLM's chain"))
    assert {name: ours[name] for name in SPEC_DECODE} == vllms
    assert ours["accepted_tokens"] > 15


def test_a_tree_accepts_more_than_a_chain(answers):
    tree, chain = answers["twice"][0]["counts"], answers["chain"]["counts"]
    assert tree["tokens_per_tree"] > 1.1 * chain["tokens_per_tree"]


def test_what_the_prefix_cache_keeps_the_head_has_read(answers):
    """Only its last block is unread, as that comes with a later token: vLLM computes it anew."""
    first, second = answers["twice"]
    assert first["tokens"] == second["tokens"] == answers["plain"]["tokens"]
    assert first["counts"]["tokens_per_tree"] == second["counts"]["tokens_per_tree"]


def test_the_head_reads_while_nothing_is_drafted(answers):
    tiers, whole = answers["tiers"]
    for [tokens], [found] in zip(answers["plain"]["tokens"], tiers["tokens"], strict=True):
        assert found == tokens[: len(found)]
    assert tiers["counts"]["tokens_per_tree"] > 1.3
    for what in ("tree_steps", "tokens_per_tree"):
        assert tiers["counts"][what] == whole["counts"][what]


def test_requests_of_every_kind(answers):
    """Prompts come in chunks, beside trees."""
    assert answers["special"]["tokens"] == answers["plain special"]["tokens"]
    assert answers["special"]["counts"]["tokens_per_tree"] > 1.2


def test_requests_are_preempted(answers):
    assert answers["preempted"]["counts"]["preemptions"] > 0


# -- by torch alone ---------------------------------------------------


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with script_modules() as modules:
        yield modules


def expected(kind: str, scripts: Any) -> dict[str, Any]:
    """Tokens, steps and accepted drafts; every chain is of the target's own greedy text."""
    from transformers import AutoTokenizer

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
