"""What texts say comes next, run by Triton's interpreter, against the function on the host."""

import pytest
import torch

from sequoia_vllm.kernels import continuations as kernels
from sequoia_vllm.kernels.continuations import find_continuations
from sequoia_vllm.verification import retrieval
from sequoia_vllm.verification.retrieval import continuations


@pytest.mark.parametrize(("window", "block"), [(8192, 1024), (16, 4), (8192, 8)])
def test_they_are_those_of_the_host(window, block, monkeypatch):
    monkeypatch.setattr(kernels, "_BLOCK", block)
    for module in (kernels, retrieval):
        monkeypatch.setattr(module, "WINDOW", window)
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(3, (30, 41), generator=draw, dtype=torch.int32)
    texts[0, :20], texts[1, :9] = torch.tensor([2, 1]).repeat(10), 1
    slots = torch.cat([torch.randperm(30, generator=draw), torch.tensor([-1])])
    roots = torch.randint(41, (31,), generator=draw, dtype=torch.int32)
    roots[slots == 0], roots[slots == 1], roots[5] = 19, 8, 0
    told = torch.full((31, 5), -9)
    find_continuations(texts, slots, roots, told)
    expected = continuations(texts, slots[:-1], roots[:-1] + 1, 5)
    assert torch.equal(told[:-1], expected)
    assert 10 < (expected[:, 0] >= 0).sum() < 30
