"""Runs as many requests as users ask for, whatever vLLM sets aside for heads that draft blocks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.frontend import tree_metrics
from sequoia_vllm.tree import TokenTree

BUDGET, NODES = 8192, 128
SETTINGS = SequoiaSettings(TokenTree.chain(4), "a test", None, {})


def config(active=None, ours=True):
    speculative = SimpleNamespace()
    if ours:
        SETTINGS.store(speculative)
    return SimpleNamespace(
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(max_num_active_seqs=active, max_num_seqs=1024),
    )


@pytest.fixture
def lowering():
    """What vLLM 0.33 does, and whether it would have warned of it."""

    def lower(of):
        scheduler = of.scheduler_config
        active = scheduler.max_num_active_seqs or scheduler.max_num_seqs
        if active > BUDGET // NODES:
            lower.warned = True
            scheduler.max_num_active_seqs = BUDGET // NODES

    lower.warned = False
    return lower


@pytest.mark.parametrize("users", [None, 400, 8])
def test_users_decide_how_many_requests_run(users, lowering):
    of = config(users)
    tree_metrics.check_budget(lowering, of)
    assert of.scheduler_config.max_num_active_seqs == users
    assert not lowering.warned


def test_other_engines_are_left_alone(lowering):
    of = config(ours=False)
    tree_metrics.check_budget(lowering, of)
    assert of.scheduler_config.max_num_active_seqs == 64


def test_a_budget_that_vllm_refuses_leaves_the_users_number():
    def refuse(_):
        raise ValueError("too few")

    of = config(400)
    with pytest.raises(ValueError, match="too few"):
        tree_metrics.check_budget(refuse, of)
    assert of.scheduler_config.max_num_active_seqs == 400


@pytest.mark.parametrize(
    ("kind", "slots"), [("dflash", 0), ("dspark", 0), ("model", 127), (None, 127)]
)
def test_blocks_take_no_rows_of_the_targets_batch(kind, slots):
    of = SimpleNamespace()
    if kind:
        replace(SETTINGS, drafter=kind).store(of)
    assert tree_metrics.slots_for_drafting(lambda _: 127, of) == slots
