"""Mistakes in the CPU's kernel, in both runners' parts and in engines of V1 are found."""

import pytest

from sequoia_vllm.engine.v1.proposer import TreeProposerV1
from tests.support.engines import generated, noting, plain_outputs, running, sequoia
from tests.support.generating import greedy_and_seeded
from tests.support.models import prompts
from tests.support.mutating import assert_all_pass, assert_caught, assert_shown, mutants

PROMPTS, PARAMS = prompts(4), greedy_and_seeded(4, 24)
PARTS, CPU_KERNEL, V1 = mutants("parts"), mutants("cpu_kernel"), mutants("v1")


@pytest.mark.parametrize("kind", ["parts", pytest.param("cpu_kernel", marks=pytest.mark.sharded)])
def test_without_mutants_all_checks_pass(kind):
    assert_all_pass(kind)


@pytest.mark.parametrize("name", PARTS)
def test_a_check_finds(name, tmp_path):
    assert_caught(PARTS[name], tmp_path)


@pytest.mark.sharded
@pytest.mark.parametrize("name", CPU_KERNEL)
def test_a_check_finds_in_the_cpu_kernel(name, tmp_path):
    assert_caught(CPU_KERNEL[name], tmp_path)


def answers(llm):
    """All tokens, and those of all nodes that the draft drew."""
    with noting(TreeProposerV1, "grow", lambda grown: grown.tokens.tolist(), True) as drafted:
        return {"tokens": generated(llm, PROMPTS, PARAMS), "drafted": drafted}


@pytest.fixture(scope="module")
def engine():
    """One for all mistakes, and its answers before. No prefix cache keeps wrong keys."""
    expected = plain_outputs(PROMPTS, PARAMS)
    with running(sequoia(), enable_prefix_caching=False) as llm:
        before = answers(llm)
        assert before["tokens"] == expected
        yield llm, before


@pytest.mark.engine
@pytest.mark.sharded
@pytest.mark.parametrize("name", V1)
def test_an_engine_shows(name, engine, tmp_path):
    llm, before = engine
    with V1[name].applied(tmp_path):
        found = answers(llm)
    assert_shown(V1[name], found, before)


@pytest.mark.engine
@pytest.mark.sharded
def test_an_engine_without_mutants_answers_as_before(engine):
    llm, before = engine
    assert answers(llm) == before
