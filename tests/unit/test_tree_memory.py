"""Memory that grows with trees: how much it is, and what is said where it is not there."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from sequoia_vllm.config import ConfigError
from sequoia_vllm.drafting.draft_plan import DraftPlan
from sequoia_vllm.engine.v2.drafting import tree_memory
from sequoia_vllm.engine.v2.verification.verifier import emitted_rows
from sequoia_vllm.tree import TokenTree

TREE = TokenTree((-1, 0, 0, 1, 1, 2, 2))  # three nodes with children
CPU = torch.device("cpu")


@pytest.mark.parametrize(("soft_cap", "expected"), [(30.0, True), (None, False)])
def test_targets_whose_logits_are_capped(soft_cap, expected):
    with set_current_vllm_config(VllmConfig()):
        target = torch.nn.Sequential(torch.nn.Sequential(LogitsProcessor(9, soft_cap=soft_cap)))
    assert tree_memory.has_soft_cap(target) == expected


def test_there_are_rows_for_all_trees_of_a_batch_or_the_device_is_too_small(monkeypatch):
    def allocate(max_num_seqs: int, vocab_size: int):
        plan = DraftPlan(TREE, [6] * max_num_seqs, most_rows=1 << 20)
        return tree_memory.allocate_drafted(
            plan, TREE, max_num_seqs, vocab_size, torch.float32, CPU
        )

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert allocate(4, 100).logits.shape == (12, 3, 100)
    monkeypatch.setattr(tree_memory.DraftedTrees, "empty", full)
    with pytest.raises(ConfigError) as error:
        allocate(1024, 131072)
    for said in ("3072 nodes with children", "take 1.5 GiB", "lower max_num_seqs (1024)"):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("drafts_by_batch", "budget", "most"),
    [
        ([767, 767], 8192, 1536), ([767, 511, 255], 8192, 1024), ([767] * 16, 8192, 8192),
        ([3, 3], 8192, 768),  # vLLM's warm-up has the whole tree, though the schedule does not
    ],
)  # fmt: skip
def test_the_most_nodes_that_a_step_scores(drafts_by_batch, budget, most):
    assert tree_memory.most_scored(drafts_by_batch, 768, budget) == most


def test_masks_are_those_of_trees_and_of_requests_without_one():
    """A thousand requests and trees of 128 nodes: not 131,072."""
    drafts = [127] * 8 + [0] * 1016
    for most_tokens, most in ((8192, 2048), (1536, 1536)):
        scored = tree_memory.most_scored(drafts, 128, most_tokens)
        assert tree_memory.most_masked(scored, max_num_reqs=1024, most_tokens=most_tokens) == most


def test_profiling_takes_the_logits_of_all_nodes(monkeypatch):
    """In the model's dtype, and a copy in float32 of at most a gigabyte or one tree.

    Those of a soft cap once more in the model's dtype, gone before they are copied.
    """
    taken = []
    monkeypatch.setattr(
        tree_memory.torch, "empty", lambda *shape, dtype, device: taken.append((*shape, dtype))
    )
    tree_memory.take_logits_memory(1536, 768, 131072, torch.bfloat16, CPU)
    tree_memory.take_logits_memory(8192, 768, 131072, torch.bfloat16, CPU)
    tree_memory.take_logits_memory(64, 8, 256, torch.bfloat16, CPU, capped=True)
    chunk = (1 << 30) // (131072 * 4)
    assert taken == [
        (1536, 131072, torch.bfloat16), (1536, 131072, torch.float32),
        (8192, 131072, torch.bfloat16), (chunk, 131072, torch.float32),
        (64, 256, torch.bfloat16), (64, 256, torch.bfloat16), (64, 256, torch.float32),
    ]  # fmt: skip


def test_the_log_says_what_trees_add(caplog):
    caplog.set_level("INFO", logger="vllm.sequoia")
    target = SimpleNamespace(get_vocab_size=lambda: 1 << 18, head_dtype=torch.float32)
    for kept in (0, 3 << 30):
        tree_memory.log_added(target, drafts=15, rows=512, kept_bytes=kept)
    [plain, recurrent] = caplog.messages
    assert plain.endswith(
        "15 tokens in the KV cache of each request, 0.50 GiB for the logits of 512 nodes"
    )
    assert recurrent == f"{plain}, 3.00 GiB for nodes in recurrent layers"


def test_logprobs_of_a_tree_have_rows_for_the_longest_path_only():
    cu_num_logits = np.array([0, 64, 64, 65, 67], dtype=np.int32)  # 64, 0, 1 and 2 nodes
    starts, (request, column) = emitted_rows(cu_num_logits, most=4)
    assert starts.tolist() == [0, 4, 4, 5, 7]
    assert request.tolist() == [0, 0, 0, 0, 2, 3, 3]
    assert column.tolist() == [0, 1, 2, 3, 0, 0, 1]
