"""Mistakes in our Triton kernels are found by these kernels' tests: `mutants_by_hand.toml`."""

import pytest

from tests.support.mutating import assert_all_pass, assert_caught, mutants

KERNELS = mutants("kernels")


@pytest.fixture(autouse=True)
def memory_checked():
    """The checks' own."""


def test_without_mutants_all_checks_pass():
    assert_all_pass("kernels")


@pytest.mark.parametrize("name", KERNELS)
def test_a_check_finds(name, tmp_path):
    assert_caught(KERNELS[name], tmp_path)
