"""The table of mistakes made by hand is true: what it changes is there, and so are its checks."""

import ast
from itertools import chain

import pytest

from tests.support.mutating import ROOT, TABLE, mutants

KINDS = [kind for kind in TABLE if kind != "elsewhere"]
MUTANTS = {(kind, name): mutant for kind in KINDS for name, mutant in mutants(kind).items()}
ENGINES = {"v1": "drafted", "v2": "accepted"}


@pytest.mark.parametrize("name", MUTANTS, ids=": ".join)
def test_what_a_mutant_changes_is_there_once(name):
    assert MUTANTS[name].new in MUTANTS[name].mutated
    if MUTANTS[name].place.endswith(".py"):
        MUTANTS[name].changed()


def test_checks_exist_and_names_are_different():
    checks = {mutant.check for (kind, _), mutant in MUTANTS.items() if kind not in ENGINES}
    for check in (*checks, *TABLE["elsewhere"]):
        file, _, function = check.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function.partition("[")[0] in names, check
    for kind, drafts in ENGINES.items():
        assert {mutant.check for mutant in mutants(kind).values()} == {"tokens", drafts}
    names = [name for _, name in MUTANTS] + [*chain(*TABLE["elsewhere"].values())]
    assert len(set(names)) == len(names) >= 70
