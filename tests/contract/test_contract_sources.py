"""Reading the contract from sources answers as importing them does."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sequoia_vllm.engine.compat import contract, versions
from sequoia_vllm.engine.compat.ledger import LEDGER, Expected, expected
from sequoia_vllm.engine.compat.sources import source_differences
from tests.contract import used
from tests.contract.check_wheels import CHECKED, expected_hash


def plain(a, b): ...


def grown(a, b, c=0, *, d=None): ...


def demanding(a, b, c, d=0, *, e): ...


@pytest.mark.parametrize(
    ("name", "may_grow", "difference"),
    [
        ("plain", False, None),
        ("plain", True, None),
        ("grown", False, "grown takes (a, b, c, d), not (a, b)"),
        ("grown", True, None),
        ("demanding", True, "demanding needs c, e, too"),
    ],
)
def test_what_is_only_called_may_grow(name, may_grow, difference):
    """Of the functions above, read and imported."""
    expected = Expected(f"{__name__}:{name}", ("a", "b"), may_grow)
    found = [f"{__name__}:{difference}"] if difference else []
    assert source_differences(used.REPOSITORY, [expected]) == found
    assert contract.differences([expected]) == found


def test_entries_are_read_by_their_notation():
    assert expected("a.b:c", None) == Expected("a.b:c")
    assert expected("a.b:C.f", "") == Expected("a.b:C.f", ())
    assert expected("a.b:g", "x, y", since=(0, 33)) == Expected("a.b:g", ("x", "y"), since=(0, 33))
    assert expected("a.b:h", "self, x, ...") == Expected("a.b:h", ("self", "x"), may_grow=True)
    assert expected("a.b:h", "...") == Expected("a.b:h", (), may_grow=True)


@pytest.mark.parametrize(
    ("version", "path"),
    [
        ("0.32.0", "sub:build"),
        ("0.33.0", "base:plain"),
        ("0.34.1", "base:plain"),
        (None, "sub:build"),
    ],
)
def test_what_changed_is_expected_of_the_versions_that_have_it(monkeypatch, version, path):
    changed = Expected("sub:build", before=(0, 33)), Expected("base:plain", since=(0, 33))
    monkeypatch.setattr(contract, "CHANGED", changed)
    monkeypatch.setattr(contract, "vllm_version", lambda: None)
    found = contract.contract("gpu", version=version)
    assert [expected.path for expected in found if expected in changed] == [path]


def test_the_layout_of_grammars_masks_is_known_by_version():
    """It changed once, under the same signatures of all that we call: what changed with it did."""
    worker = "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker"
    parameters = {
        expected.parameters
        for version in versions.SUPPORTED_VERSIONS["gpu"]
        for expected in contract.contract("gpu", version=version)
        if expected.path == worker
    }
    assert len(parameters) == 2
    assert versions.SUPPORTED_VERSIONS["gpu"] == ("0.32.0", "0.33.0"), "has it changed again?"


def test_gpus_are_not_asked_for_what_is_on_cpus_only():
    """Importing vLLM's CPU worker changes torch for the whole process."""
    expectations = contract.contract("gpu")
    assert expectations == contract.contract("gpu", v2=True)
    modules = {expected.path.partition(":")[0] for expected in expectations}
    assert [module for module in modules if "cpu" in module] == []


@pytest.fixture(scope="module")
def installed():
    """Where the installed vLLM's sources are; it is not imported."""
    found = used.installed()
    if found is None:
        pytest.skip("vLLM is not installed")
    if versions.vllm_version() not in versions.SUPPORTED_VERSIONS["cpu"]:
        pytest.skip(f"vLLM {versions.vllm_version()} is not supported")
    return found


@pytest.fixture(scope="module")
def regenerated(installed):
    return used.Use(installed).to_dict()


def test_the_ledger_has_what_is_used(regenerated):
    """If not: ``python -m tests.contract.used``."""
    assert json.loads(LEDGER.read_text()) == regenerated


def test_all_that_is_replaced_says_until_when(regenerated):
    replaced = regenerated["replaced"]
    assert [path for path, one in replaced.items() if not one["until"]] == []
    ways = {one["how"] for one in replaced.values()}
    assert ways == {"patch", "added field", "swap", "subclass", "instance"}


@pytest.mark.parametrize("version", versions.SUPPORTED_VERSIONS["gpu"])
def test_what_we_expect_was_checked_in_the_gpu_wheel(version):
    checked = json.loads(CHECKED.read_text())[version]
    assert checked["differences"] == []
    assert checked["expected"] == expected_hash(version), "run `make contract`, and commit its file"


def test_an_override_whose_signature_changed_is_told(tmp_path, installed, regenerated):
    """By the start-up contract, whatever version it is: it must take exactly what ours does."""
    [path] = [path for path in regenerated["everywhere"] if path.endswith("Scheduler.schedule")]
    [entry] = [one for one in contract.contract("cpu") if one.path == path]
    other = replace(entry, parameters=(*entry.parameters, "more"))
    assert not entry.may_grow
    names = "self, throttle_prefills"
    for found in source_differences(installed, [entry, other]), contract.differences([other]):
        assert found == [f"{path} takes ({names}), not ({names}, more)"]


def test_reading_finds_what_importing_finds(installed):
    """In all of vLLM that CPUs have, but for modules that change torch as they are imported."""
    entries = [one for one in contract.contract("cpu") if "cpu" not in one.path]
    assert contract.differences(entries) == source_differences(installed, entries) == []
    wrong = [
        replace(one, parameters=(*one.parameters, "added"), may_grow=False)
        for one in entries
        if one.parameters is not None
    ]
    found = contract.differences(wrong)
    assert found == source_differences(installed, wrong)
    assert len(found) == len(wrong) > 100


@pytest.mark.parametrize(("device", "v2"), [("cpu", False), ("cpu", True), ("gpu", True)])
def test_installed_vllm_fits_by_its_sources_and_every_signature_is_compared(installed, device, v2):
    """The CPU build carries the GPU's modules."""
    entries = contract.contract(device, v2)
    assert source_differences(installed, entries) == []
    wrong = [
        replace(expected, parameters=("other", *expected.parameters))
        for expected in entries
        if expected.parameters is not None
    ]
    assert len(source_differences(installed, wrong)) == len(wrong) > 0


def test_the_page_of_hooks_names_what_is_replaced():
    """In its second column: functions of vLLM, and the method that ours is translated to."""
    page = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    cells = "".join(line.split(" | ")[1] for line in page.splitlines() if line.startswith("| "))
    named = set(re.findall(r"`(\w*_\w+)`", cells)) - {"draft_model"}
    replaced = json.loads(LEDGER.read_text(encoding="utf-8"))["replaced"]
    assert len(named) > 10
    assert named <= {path.rpartition(".")[2].rpartition(":")[2] for path in replaced}
