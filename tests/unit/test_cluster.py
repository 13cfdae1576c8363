"""Versions and devices that must be alike wherever an engine runs."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import torch
import torch.multiprocessing as mp

from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.common.cluster import (
    check_decisions,
    check_devices,
    check_group,
    check_ranks,
    check_versions,
    current_versions,
    decisions,
)
from sequoia_vllm.engine.common.settings import DECLINED, SequoiaSettings
from sequoia_vllm.engine.runner import tensor_parallel
from sequoia_vllm.engine.v2.drafting import proposer
from sequoia_vllm.tree import TokenTree

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize("package", ["sequoia-vllm", "vLLM"])
def test_a_node_with_another_version_is_refused_with_both_named(package):
    there = current_versions()
    assert there[package][0].isdigit()
    check_versions(there, there, "a-node")
    with pytest.raises(ConfigError) as error:
        check_versions(there, there | {package: "0.9.9"}, "node-7")
    message = str(error.value)
    assert f"{package} 0.9.9 here and {there[package]} there" in message
    assert "node-7" in message
    assert "Install the same versions" in message
    [same] = {"sequoia-vllm", "vLLM"} - {package}
    assert same not in message


def test_one_type_of_device_per_group_and_the_one_that_its_tree_was_chosen_for():
    check_devices([H100, H100], chosen_for=H100)
    check_devices([A100, A100], chosen_for=None)
    with pytest.raises(ConfigError, match=r"different devices \(NVIDIA A100.*, NVIDIA H100"):
        check_devices([H100, A100], chosen_for=None)
    with pytest.raises(ConfigError, match=f"chosen for {H100}, but this replica runs on {A100}"):
        check_devices([A100, A100], chosen_for=H100)


def engine(tree: TokenTree | None, drafts: int = 2, **settings) -> SimpleNamespace:
    """Configuration of an engine with a tree, or of one that had better have none."""
    ranges = [(1, 4, 2), (5, 5, drafts)]
    config = SimpleNamespace(
        additional_config={DECLINED: True} if tree is None else {},
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=2, num_speculative_tokens_per_batch_size=ranges
        ),
    )
    if tree is not None:
        stored = SequoiaSettings(tree, "a test", None, current_versions(), **settings)
        stored.store(config.speculative_config)
    return config


TREE = TokenTree.chain(2)


def test_nodes_may_know_a_tree_from_different_files():
    here = engine(TREE, adapts_as="here", expected_speedup=1.2)
    there = engine(TREE, adapts_as="there")
    check_decisions([("node-0", decisions(here)), ("node-1", decisions(there))])


@pytest.mark.parametrize(
    ("there", "difference"),
    [
        (engine(TokenTree((-1, 0, 0))), r"tree: 3 nodes, depth 2, checksum \w+ \(rank 0 on "),
        (engine(None), r"tree: 3 nodes, .* \(rank 0 on node-0\); none \(rank 2 on node-1\)"),
        (engine(TREE, drafts=0), "drafts by batch size: 1 to 8: 2 .*; 1 to 4: 2, 5 to 8: 0"),
        (engine(TREE, verification="traversal"), "verification: sequoia .*; traversal "),
        (engine(TREE, drafter="eagle3"), "drafter: model .*; eagle3 "),
        (engine(TREE, draft_tokens=[3, 1]), r"draft_vocabulary: checksum \w+ .*; checksum "),
        (engine(TREE, adapts_as="a-pair"), "adapts: no .*; yes "),
    ],
)
def test_nodes_that_decided_unlike_are_refused(there, difference):
    ranks = [("node-0", decisions(engine(TREE)))] * 2 + [("node-1", decisions(there))] * 2
    with pytest.raises(ConfigError, match=difference) as error:
        check_decisions(ranks)
    assert '{"parents": [...]}' in str(error.value)
    assert "SEQUOIA_VLLM_TREES" in str(error.value)


def _rank(rank: int, groups: dict[str, list[str]], store: str, errors) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    try:
        for group, names in groups.items():
            try:
                check_group(engine(TREE), names[rank], torch.distributed.group.WORLD)
                tree = TokenTree((-1, 0, 0)) if rank and group == "two trees" else TREE
                check_ranks(engine(tree), torch.distributed.group.WORLD)
            except ConfigError as error:
                errors[group, rank] = str(error)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_tell_each_other_their_device_and_tree(tmp_path):
    """All of a mixed group stop, not only the odd one: nobody waits for a rank that is gone."""
    groups = {"alike": [H100, H100], "mixed": [H100, A100], "two trees": [H100, H100]}
    named = {"mixed": (H100, A100), "two trees": ("depth 1", "depth 2")}
    with mp.Manager() as manager:
        errors = manager.dict()
        arguments = groups, str(tmp_path / "store"), errors
        mp.start_processes(_rank, arguments, nprocs=2, start_method="fork")
        assert set(errors.keys()) == {(group, rank) for group in named for rank in (0, 1)}
        for (group, _), message in errors.items():
            assert all(name in message for name in named[group])


@pytest.mark.parametrize("disabled", [True, False])
def test_broadcasts_have_their_communicator_before_memory_is_profiled(monkeypatch, disabled):
    """torch makes one at the first broadcast, which ``VLLM_DISABLE_PYNCCL`` leaves to it."""
    made, allocated = [], []
    nccl = SimpleNamespace(disabled=disabled, broadcast=lambda *_: made.append("vLLM's"))
    group = SimpleNamespace(
        world_size=2, device_communicator=SimpleNamespace(pynccl_comm=nccl),
        broadcast=lambda *_, **__: made.append("torch's"),
    )  # fmt: skip
    monkeypatch.setattr(tensor_parallel, "get_tp_group", lambda: group)
    monkeypatch.setattr(proposer, "allocate_drafted", lambda *_: allocated.append([*made]) or 1 / 0)
    shared = SimpleNamespace(
        device="cpu", plan=0, tree=0, max_num_reqs=0, drafter=SimpleNamespace(vocab_size=0),
        draft_model_config=SimpleNamespace(head_dtype=0),
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        proposer.TreeProposerV2.allocate(shared, torch.nn.Module(), None)
    assert allocated == [["torch's" if disabled else "vLLM's"]]
