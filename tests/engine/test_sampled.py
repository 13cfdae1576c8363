"""Sampled output follows the target's own law, through the real engine.

A target with six tokens: the exact probability of every continuation of four
tokens can be computed, and 10,000 completions are compared with it, or of three
tokens with 4,000 completions, twice as many for each continuation (chi-square, false-alarm
rate 1e-6 per law; the engine's seed makes a verdict repeatable). An engine that gave
3.2 % of all tokens by the draft's law instead of the target's would be found with
probability 0.99, with three tokens one that gave 5.1 %, and 11 % where top-k and min-p leave
few continuations (from the non-central chi-square law of the statistic, for these two models).
"""

import itertools
from functools import partial
from math import inf

import numpy as np
import pytest
from torch import Tensor
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sequoia_vllm.adaptation.told_branches import ToldBranches
from sequoia_vllm.engine.core.prediction_option import PREDICTION
from sequoia_vllm.engine.v1 import foretelling
from sequoia_vllm.step import grow, verify
from sequoia_vllm.verification import methods
from tests.oracles.laws import assert_same_law
from tests.support import brackets, processors, target_only
from tests.support.chessboard import chessboard
from tests.support.engines import (
    generated,
    lookup_trees,
    metric,
    plain_outputs,
    running,
    sequoia,
    tokens_of,
)
from tests.support.histories import Histories, penalised
from tests.support.models import (
    next_probabilities,
    save_broken,
    save_llama,
    save_word_tokenizer,
)
from tests.support.target_only import TARGET_ONLY

pytestmark = pytest.mark.engine

VOCAB = 6
COMPLETIONS = {3: 4_000, 4: 10_000}  # by length
PROMPT = [2, 5, 3, 2, 5]  # its end occurred before: the text says what comes next
FALSE_ALARM = 1e-6
TINY = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 256}


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory):
    """Target and draft: unrelated weights, so that rejections are frequent."""
    paths = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    for path, seed, scale in zip(paths, (3, 4), (1.5, 1.0), strict=True):
        save_llama(path, seed=seed, scale=scale, vocab_size=VOCAB, max_position_embeddings=64)
        save_word_tokenizer(path)
    return paths


def exact_law(path, length: int, setting: dict) -> np.ndarray:
    """Probability of every continuation of so many tokens, ``[VOCAB] * length``."""
    law = np.ones(())
    own = {name: value for name, value in setting.items() if name not in EDITS}
    for place in range(length):
        prefixes = [list(tokens) for tokens in itertools.product(range(VOCAB), repeat=place)]
        contexts = [PROMPT + prefix for prefix in prefixes]
        edit = partial(edited, prefixes=prefixes, setting={**EDITS, **setting})
        rows = next_probabilities(path, contexts, **own, edit=edit)[:, -1]
        law = law[..., None] * rows.reshape([VOCAB] * (place + 1))
    return law


def edited(logits: Tensor, prefixes: list[list[int]], setting: dict) -> Tensor:
    """The logits ``[rows, places, V]``, of which the last place's are edited by these histories."""
    rows = list(range(len(prefixes)))
    histories = Histories([PROMPT for _ in rows], prefixes, rows, [], [], [[] for _ in rows])
    found = logits.clone()
    for token, bias in setting["logit_bias"].items():
        found[:, -1, token] += bias
    for row, prefix in enumerate(prefixes):
        found[
            row, -1, [token for token in range(VOCAB) if not may_follow(prefix, token, setting)]
        ] = -inf
        if last := (setting["extra_args"] or {}).get("without_last"):
            found[row, -1, prefix[-last:]] = -inf
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    penalties = ([setting[name]] * len(rows) for name in names)
    found[:, -1] = penalised(found[:, -1], histories, *penalties)
    return found


def count(outputs, length: int) -> np.ndarray:
    counts = np.zeros([VOCAB] * length)
    for tokens in tokens_of(outputs):
        counts[tuple(tokens[:length])] += 1
    return counts


PLAIN = [{"temperature": 1.0}]


# Requests of both in one batch: drafted within nuclei of their own.
def pairs(prefix: list[int], token: int) -> bool:
    """Whether `GRAMMAR` lets this token follow, where it may not end."""
    if len(prefix) % 2 == 0:
        return token in (2, 3)
    return token in ((3, 4, 5) if prefix[-1] == 2 else (0, 2))


def may_follow(prefix: list[int], token: int, setting: dict) -> bool:
    """Whether a budget and a grammar let this token follow, which begins where thoughts end.

    Requests think from the start on in engines with a reasoning parser, as `PROMPT` says so.
    """
    if token == END and len(prefix) < setting["min_tokens"]:
        return False
    ended = not setting["reasoning"] or THOUGHT in prefix
    budget = setting["thinking_token_budget"]
    if not ended and budget is not None and len(prefix) >= budget:
        return token == THOUGHT
    if not ended or not setting["structured_outputs"]:
        return True
    return pairs(prefix[prefix.index(THOUGHT) + 1 :] if setting["reasoning"] else prefix, token)


END, THOUGHT = 1, 4  # tokens that end the text, and reasoning

# What a token allows depends on the one before. It may not end before its least tokens.
GRAMMAR = {
    "structured_outputs": StructuredOutputsParams(regex="(w2(w3|w4|w5)|w3(w0|w2))+"),
    "min_tokens": 4,
}
EDITS = {
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {},
    "structured_outputs": None, "min_tokens": 0, "thinking_token_budget": None, "extra_args": None,
    "reasoning": False,
}  # fmt: skip
GRAMMARS = [
    {"temperature": 1.0, **GRAMMAR},
    {"temperature": 0.7, "presence_penalty": 0.9, **GRAMMAR},
]
# In an engine with a reasoning parser.
THOUGHTS = [
    {"temperature": 1.0, **GRAMMAR},
    {"temperature": 0.8, "thinking_token_budget": 1},
    {"temperature": 1.2, "thinking_token_budget": 2, **GRAMMAR},
]
REASONING = {
    "structured_outputs_config": {
        "reasoning_parser": "words", "reasoning_parser_plugin": brackets.__file__
    },
    "reasoning_config": {"reasoning_parser": "words"},
}  # fmt: skip
PROCESSED = [{"temperature": 1.0, "extra_args": {"without_last": 2}}]
# By what was generated, so that nodes of one tree differ by their paths.
EDITED = [
    {"temperature": 1.0, "repetition_penalty": 1.7, "frequency_penalty": 0.8},
    {"temperature": 0.8, "presence_penalty": -1.2, "logit_bias": {1: 0.8, 4: -1.0}},
]
CUT = [{"temperature": 0.6, "top_p": 0.8}, {"temperature": 1.2, "top_k": 4, "min_p": 0.15}]


@pytest.mark.parametrize(
    ("length", "mixed", "seeded", "verification", "drafter"),
    [
        (4, PLAIN, False, "sequoia", "model"),
        (3, CUT, False, "sequoia", "model"),
        (3, EDITED, False, "sequoia", "model"),
        pytest.param(3, GRAMMARS, False, "sequoia", "model", marks=pytest.mark.sharded),
        (3, THOUGHTS, False, "sequoia", "model"),
        pytest.param(3, PROCESSED, False, "sequoia", "model", marks=pytest.mark.sharded),
        # Each seed's own tokens are compared with plain vLLM's in `test_requests.py`.
        pytest.param(3, PLAIN, True, "sequoia", "model", marks=pytest.mark.sharded),
        (4, PLAIN, False, "traversal", "model"),
        # From a table that changes while others of the batch are verified.
        (3, [*PLAIN, CUT[0]], False, "sequoia", "lookup"),
    ],
)
def test_completions_follow_the_exact_law(
    tiny_pair, length, mixed, seeded, verification, drafter, monkeypatch
):
    target, draft = tiny_pair
    replaced = accepted_stand_ins(monkeypatch)
    config = sequoia(12, 3, draft, verification=verification, retrieval=True)
    if drafter == "lookup":
        config = lookup_trees(size=12, verification=verification)
    options = {**TINY, "skip_tokenizer_init": "structured_outputs" not in mixed[0]}
    options |= REASONING if mixed is THOUGHTS else {}
    options |= {"logits_processors": processors.FOR_TREES} if mixed is PROCESSED else {}
    with running(config, model=target, **options) as llm:
        completions = check_law(llm, target, length, mixed, seeded)
        accepted = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    assert accepted > completions / 2  # trees were at work, with rejections among them
    if mixed in (GRAMMARS, THOUGHTS):  # whose forbidden drafts were replaced
        assert sum(replaced) > completions / (10 if mixed is GRAMMARS else 100)
    else:
        assert replaced == []


@pytest.mark.parametrize(
    ("said_by", "verification"),
    chessboard(
        ["a prediction", "the text", "a prediction, with a grammar"], ["sequoia", "traversal"]
    ),
)
def test_branches_below_the_trees_last_level_keep_the_law(
    tiny_pair, said_by, verification, monkeypatch
):
    """Trees of one level, and branches of all told tokens wherever there are two or more."""
    target, draft = tiny_pair
    lengths = []

    def deepest(self, source, run, most, *tree) -> int:
        lengths.append(most if most > 1 else 0)
        return lengths[-1]

    monkeypatch.setattr(ToldBranches, "depth", deepest)
    monkeypatch.setattr(foretelling, "longest", lambda told, run, credit: told)
    config = sequoia(3, 1, draft, verification=verification, retrieval=True)
    foretold, fewest, length, has_grammar = [{"temperature": 1.0}], 0.3, 4, "grammar" in said_by
    if said_by != "the text":
        foretold[0]["extra_args"], fewest = {PREDICTION: [2, 5, 4, 3, 2]}, 1
    if has_grammar:  # which forbids the third token, or allows what was foretold again
        foretold, length = [foretold[0] | GRAMMAR, GRAMMARS[1] | foretold[0]], 3
        fewest = 0.5
    with running(config, model=target, **{**TINY, "skip_tokenizer_init": not has_grammar}) as llm:
        completions = check_law(llm, target, length, foretold)
    assert sum(length > 0 for length in lengths) > fewest * completions
    assert max(lengths) > length - 2


def check_law(llm, target, length: int, mixed: list[dict] = PLAIN, seeded: bool = False) -> int:
    """Compares completions of so many tokens with the exact law, of each setting in one batch.

    Returns:
        How many completions there were.
    """
    completions = COMPLETIONS[length] * len(mixed)
    params = [
        SamplingParams(
            **mixed[index % len(mixed)], max_tokens=length + 1, ignore_eos=True,
            detokenize=False, seed=index if seeded else None,
        )
        for index in range(completions)
    ]  # fmt: skip
    requests = [{"prompt_token_ids": PROMPT}] * completions
    outputs = llm.generate(requests, params, use_tqdm=False)
    for which, setting in enumerate(mixed):
        counts = count(outputs[which :: len(mixed)], length)
        setting = {**setting, "reasoning": mixed is THOUGHTS}
        assert_same_law(counts, exact_law(target, length, setting), FALSE_ALARM, fewest=5)
    return completions


def accepted_stand_ins(monkeypatch) -> list[int]:
    """How many nodes that replaced drafts each step accepts whose sampled requests have any."""
    found = []
    original = verify.verify_replaced

    def counted(verify, target_at, draft_at, drawn, scored, topology):
        result = original(verify, target_at, draft_at, drawn, scored, topology)
        on_path = (drawn != scored).gather(1, result.accepted_nodes.clamp(min=0))
        found.append(int((on_path & (result.accepted_nodes >= 0)).sum()))
        return result

    monkeypatch.setattr(verify, "verify_replaced", counted)
    return found


@pytest.mark.parametrize("verification", ["sequoia", "traversal"])
def test_a_draft_that_gives_nan_changes_no_law(tiny_pair, tmp_path, monkeypatch, verification):
    """Whatever comes after token 4 is NaN: some nodes of a tree have a Q, and others none."""
    target, draft = tiny_pair
    broken, warnings = save_broken(tmp_path / "draft", draft, 4), []
    monkeypatch.setattr(grow.logger, "warning", warnings.append)
    grow._say_that_it_is_broken.cache_clear()
    config = sequoia(size=12, depth=3, draft=broken, verification=verification)
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    plain = plain_outputs([{"prompt_token_ids": PROMPT}], greedy, model=target, **TINY)
    with running(config, model=target, **TINY) as llm:
        check_law(llm, target, 3)
        assert generated(llm, [{"prompt_token_ids": PROMPT}], greedy) == plain
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 100
    [warning] = warnings  # once, however many nodes there were
    assert "NaN or infinite logits" in warning


def test_a_method_that_was_registered_here_verifies(tiny_pair, monkeypatch):
    """One token per step where it does; greedy requests do not go by it."""
    target, draft = tiny_pair
    monkeypatch.setattr(methods, "_METHODS", dict(methods._METHODS))
    methods.register(TARGET_ONLY)
    monkeypatch.setattr(target_only, "called", [])
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    plain = plain_outputs([{"prompt_token_ids": PROMPT}], greedy, model=target, **TINY)
    config = sequoia(size=12, depth=3, draft=draft, verification="target-only")
    with running(config, model=target, **TINY) as llm:
        assert target_only.called == ["compiled"]
        check_law(llm, target, 3)
        assert metric(llm, "vllm:spec_decode_num_draft_tokens") > COMPLETIONS[3]
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") == 0
        assert generated(llm, [{"prompt_token_ids": PROMPT}], greedy) == plain
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    assert set(target_only.called) == {"compiled", "host"}
