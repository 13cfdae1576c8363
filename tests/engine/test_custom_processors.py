"""Logits processors of the engine's user run on tree nodes where they can, else nothing drafts."""

import logging
import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

from sequoia_vllm.engine.v2.verification.chains import Chains
from sequoia_vllm.tree import TokenTree
from tests.support import processors
from tests.support.engines import generated, plain_outputs, running, sequoia, undrafted
from tests.support.generating import answered, check_logprobs
from tests.support.models import prompts
from tests.support.processors import FOR_TREES, KINDS

pytestmark = pytest.mark.engine


def params_of(kinds: dict) -> list[SamplingParams]:
    """A greedy and a seeded request of each kind; they end at different times."""
    return [
        SamplingParams(
            temperature=temperature, seed=5, max_tokens=24 + 5 * (place % 4), logprobs=1,
            ignore_eos=True, **keys,
        )
        for place, (keys, temperature) in enumerate(product(kinds.values(), (0, 0.8)))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def both():
    """Answers of plain vLLM and of trees, all kinds in one batch, and counts of each kind alone."""
    params, texts = params_of(KINDS), prompts(2 * len(KINDS))
    options = {
        "logits_processors": FOR_TREES, "logprobs_mode": "processed_logprobs", "max_num_seqs": 8
    }  # fmt: skip
    with running(**options) as llm:
        plain = answered(llm.generate(texts, params, use_tqdm=False))
    with running(sequoia(), **options) as llm:
        trees = answered(llm.generate(texts, params, use_tqdm=False))
        [trees["stats"]] = llm.collective_rpc("sequoia_stats", args=(True,))
        for name, keys in KINDS.items():
            generated(llm, texts[:2], params_of({name: keys}))
            [trees[name]] = llm.collective_rpc("sequoia_stats", args=(True,))
        trees["undrafted"] = undrafted(llm)
    return plain, trees


def test_tokens_are_those_of_plain_vllm(both):
    plain, trees = both
    assert trees["tokens"] == plain["tokens"]
    assert check_logprobs(trees["logprobs"], plain["logprobs"]) > 200


def test_all_have_trees(both):
    _, trees = both
    assert trees["undrafted"] == {}
    for name in KINDS:
        assert trees[name]["tokens"] > 1.2 * trees[name]["tree_steps"] > 0, name


def test_processors_are_at_work(both):
    """Else the tests above would see nothing."""
    unedited = plain_outputs(prompts(2 * len(KINDS)), params_of(KINDS))
    tokens = both[0]["tokens"]
    for place, (name, _) in enumerate(product(KINDS, (0, 0.8))):
        # The greedy request is indifferent to what keeps the likeliest token.
        same = name == "none" or (name == "sharper" and place % 2 == 0)
        assert (tokens[place] == unedited[place]) == same, name


def test_nothing_drafts_beside_a_processor_that_may_not_run_on_trees(caplog):
    options = {"logits_processors": [f"{processors.__name__}:EvenTokensOnly", *FOR_TREES]}
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = plain_outputs(prompts(4), params, **options)
    with caplog.at_level(logging.WARNING, "vllm.sequoia"), running(sequoia(), **options) as llm:
        found = generated(llm, prompts(4), params)
        [stats] = llm.collective_rpc("sequoia_stats")
    assert found == expected
    assert all(token % 2 == 0 for tokens in found for token in tokens)
    assert stats["tree_steps"] == 0
    [said] = [line for line in caplog.messages if "logits processors" in line]
    assert "EvenTokensOnly" in said
    assert "Tilted" not in said


# -- on Model Runner V2 ------------------------------------------------------------------------

#   0 ─┬─ 1 ─┬─ 3 ─── 6
#      │     └─ 4 ─── 7
#      └─ 2 ─── 5
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 3, 4))
OTHER = TokenTree((-1, 0, 1, 2, 0, 1, 4, 6))
SLOTS, VOCABULARY = 5, 97


class Histories:
    """Adds to each row a number that tells its slot, position, and the rows before it."""

    add_request = apply_staged_writes = None

    def apply(self, logits, ctx):
        places, slots = ctx.expanded_local_pos.tolist(), ctx.expanded_idx_mapping.tolist()
        firsts = [row for row, place in enumerate(places) if place == 0]
        assert (
            [slots[row] for row in firsts]
            == ctx.idx_mapping.tolist()
            == ctx.idx_mapping_np.tolist()
        )
        for row, (slot, place) in enumerate(zip(slots, places, strict=True)):
            path = ctx.input_ids[row - place : row + 1].tolist()
            logits[row, code(slot, int(ctx.pos[row]), path)] += 1
        return logits.clone()


def code(slot: int, position: int, path: list[int]) -> int:
    return hash((slot, position, *path)) % VOCABULARY


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("counts", [[8, 8], [1, 1, 1], [8, 1, 4, 2], [3], [1, 6, 1]])
def test_every_node_is_told_its_own_path(counts, by_slot):
    rng = random.Random(str(counts))
    slots = rng.sample(range(SLOTS), len(counts))
    trees = [TREE if slot % 2 or not by_slot else OTHER for slot in range(SLOTS)]
    tables = SimpleNamespace(
        tree=TREE,
        parents=torch.zeros(SLOTS, 8) if by_slot else torch.zeros(8),
        ancestors=torch.from_numpy(
            np.stack([tree.ancestor_mask for tree in trees]) if by_slot else TREE.ancestor_mask
        ),
    )
    rows = [
        (slot, node) for slot, count in zip(slots, counts, strict=True) for node in range(count)
    ]
    tokens = [rng.randrange(50) for _ in rows]
    positions = [30 * slot + int(trees[slot].depths[node]) for slot, node in rows]
    logits = torch.rand(len(rows), VOCABULARY)
    found = Chains(Histories(), tables).apply(
        logits.clone(),
        LogitsContext(
            expanded_idx_mapping=torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.array(slots),
            expanded_local_pos=torch.tensor([node for _, node in rows], dtype=torch.int32),
            input_ids=torch.tensor(tokens),
            pos=torch.tensor(positions),
            seq_lens_upper_bound_np=np.array(counts),
        ),
    )
    for row, (slot, node) in enumerate(rows):
        path = [
            tokens[row - node + int(above)]
            for above in trees[slot].ancestor_mask[node].nonzero()[0]
        ]
        logits[row, code(slot, positions[row], path)] += 1
    assert torch.equal(found, logits)
