"""Drafts without a model, on both runners: one registration adds a kind of drafter.

A table tells which tokens follow which.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sequoia_vllm.drafters.registry import DRAFTERS, Drafter, register
from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.v1.proposer import DrafterV1
from sequoia_vllm.engine.v2.drafting.drafter import DraftPass, TreeDrafter
from tests.support.engines import whole_trees
from tests.support.generating import generate
from tests.support.models import prompts
from tests.support.on_v2 import call_on_v2

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FOLLOWERS = 3
_followers: dict[int, list[int]] = {}


class Table(Drafter):
    """Its configuration is any draft model's, which is not loaded."""

    kind = "table"
    name = "a table"
    rank = 99
    method = "draft_model"
    on_v1 = f"{__name__}.TableDrafterV1"
    on_v2 = f"{__name__}.TableDrafter"
    is_head = False
    may_look_like_model = True


def register_table(answers: list[list[int]]) -> None:
    """Registers the kind; its table has what follows each token in these answers."""
    register(Table)
    for answer in answers:
        for token, follower in pairwise(answer):
            found = _followers.setdefault(token, [])
            if follower not in found and len(found) < FOLLOWERS:
                found.append(follower)


def logits_after(tokens: Tensor, vocab_size: int) -> Tensor:
    """float32 ``[rows, V]``: of what the table has, the first is the likeliest."""
    logits = torch.zeros(len(tokens), vocab_size)
    for row, token in enumerate(tokens.tolist()):
        for rank, follower in enumerate(_followers.get(token, [])):
            logits[row, follower] = 12 - rank
    return logits


class NoModel(torch.nn.Module):
    """In the place of vLLM's model."""

    def forward(self, **inputs: Any) -> None:
        pass


class TableDrafter(TreeDrafter):
    """The table on Model Runner V2: a token's state is the token."""

    def load(self, target_model: torch.nn.Module, target_layers: set[str]) -> torch.nn.Module:
        return NoModel()

    def run(self, rows: DraftPass) -> DraftStates:
        return DraftStates(rows.token_ids[:, None])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return logits_after(hidden[:, 0], self.vocab_size)


class TableDrafterV1(DrafterV1):
    """The table on the V1 runner."""

    def load(self, chains: Any) -> torch.nn.Module:
        self._vocab_size = chains.vllm_config.model_config.get_vocab_size()
        return NoModel()

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        return logits_after(tokens if rows is None else tokens[rows], self._vocab_size)


def params() -> list[Any]:
    from vllm import SamplingParams

    common = {"max_tokens": 20, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **common), SamplingParams(temperature=0.7, seed=4, **common),
        SamplingParams(temperature=0, repetition_penalty=1.2, **common),
    ]  # fmt: skip


def generate_all() -> dict[str, Any]:
    """Answers of plain vLLM, then of trees from a table of these answers."""
    plain = generate(None, prompts(3), params())
    register_table([completion for request in plain["tokens"] for completion in request])
    trees = generate(whole_trees(size=12, drafter="table"), prompts(3), params())
    return {"plain": plain["tokens"], "trees": trees["tokens"], "counts": trees["counts"]}


@pytest.fixture(scope="module", params=["V1", "V2"])
def answers(request, tmp_path_factory):
    if request.param == "V2":
        return call_on_v2(generate_all, tmp_path_factory.mktemp("table"))
    before = dict(DRAFTERS)
    try:
        return generate_all()
    finally:
        DRAFTERS.clear()
        DRAFTERS.update(before)


def test_tokens_are_those_of_plain_vllm(answers):
    assert answers["trees"] == answers["plain"]


def test_what_the_table_has_is_accepted(answers):
    assert answers["counts"]["tokens_per_tree"] > 2
