"""Versions and devices that must be alike wherever an engine runs."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
import torch.multiprocessing as mp

from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.cluster import (
    check_devices,
    check_group,
    check_versions,
    current_versions,
)
from sequoia_vllm.engine.settings import SequoiaSettings
from sequoia_vllm.tree import TokenTree

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def test_the_versions_of_this_process_are_known():
    versions = current_versions()
    assert versions["sequoia-vllm"][0].isdigit()
    assert versions["vLLM"][0].isdigit()
    check_versions(versions, versions, "a-node")


@pytest.mark.parametrize("package", ["sequoia-vllm", "vLLM"])
def test_a_node_with_another_version_is_refused_with_both_named(package):
    there = {"sequoia-vllm": "1.2.0", "vLLM": "0.33.0"}
    here = there | {package: "0.9.9"}
    with pytest.raises(ConfigError) as error:
        check_versions(there, here, "node-7")
    message = str(error.value)
    assert f"{package} 0.9.9 here and {there[package]} there" in message
    assert "node-7" in message
    assert "Install the same versions" in message
    [same] = {"sequoia-vllm", "vLLM"} - {package}
    assert same not in message


def test_one_type_of_device_per_group():
    check_devices([H100, H100], chosen_for=H100)
    check_devices([A100, A100], chosen_for=None)
    with pytest.raises(ConfigError, match=r"different devices \(NVIDIA A100.*, NVIDIA H100"):
        check_devices([H100, A100], chosen_for=None)


def test_a_tree_chosen_for_another_device_is_refused():
    with pytest.raises(ConfigError, match=f"chosen for {H100}, but this replica runs on {A100}"):
        check_devices([A100, A100], chosen_for=H100)


class _Config:
    def __init__(self, chosen_for: str | None) -> None:
        settings = SequoiaSettings(TokenTree.chain(2), "a test", chosen_for, current_versions())
        self.speculative_config = SimpleNamespace()
        settings.store(self.speculative_config)


def _rank(rank: int, groups: dict[str, list[str]], store: str, errors) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    try:
        for group, names in groups.items():
            try:
                check_group(_Config(None), names[rank], torch.distributed.group.WORLD)
            except ConfigError as error:
                errors[group, rank] = str(error)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_tell_each_other_their_device(tmp_path):
    """All of a mixed group stop, not only the odd one: nobody waits for a rank that is gone."""
    groups = {"alike": [H100, H100], "mixed": [H100, A100]}
    with mp.Manager() as manager:
        errors = manager.dict()
        mp.spawn(_rank, args=(groups, str(tmp_path / "store"), errors), nprocs=2)
        assert set(errors.keys()) == {("mixed", 0), ("mixed", 1)}
        assert all(H100 in message and A100 in message for message in errors.values())
