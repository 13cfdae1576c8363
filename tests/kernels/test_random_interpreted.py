"""Kernels' random numbers, run by Triton's interpreter, against slow implementations."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sequoia_vllm.kernels import random
from sequoia_vllm.kernels.modes import SEEDED
from tests.oracles.random_numbers import exponential, philox, uniform32, uniform64
from tests.support.drawing import draw

KEYS = [  # seed, position, node, purpose
    (0, 0, 0, 0),
    (1, 2, 3, 0),
    (-7, 100_000, 63, 1),
    (2**63 - 1, 2**31 - 1, 1023, 2),
    (0x1234_5678_9ABC_DEF0, 17, 5, 2),
]


@triton.jit
def numbers_kernel(
    seeds, positions, nodes, purposes, single, double, exponentials, block: tl.constexpr
):
    row = tl.program_id(0)
    token = tl.arange(0, block)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    node, purpose = tl.load(nodes + row), tl.load(purposes + row)
    own = row * block + token
    tl.store(single + own, random.uniform32(seed, token, position, node, purpose))
    tl.store(double + own, random.uniform64(seed, token, position, node, purpose))
    tl.store(exponentials + own, random.exponential(seed, token, position, node, purpose))


def test_numbers_are_those_of_the_reference():
    rows, tokens = len(KEYS), 512
    seeds, *others = map(torch.tensor, zip(*KEYS, strict=True))
    single, exponentials = torch.empty(2, rows, tokens)
    double = torch.empty(rows, tokens, dtype=torch.float64)
    places = [one.int() for one in others]
    numbers_kernel[(rows,)](seeds, *places, single, double, exponentials, block=tokens)
    for row, (seed, position, node, purpose) in enumerate(KEYS):
        expected = philox(seed, np.arange(tokens), position, node, purpose)
        assert torch.equal(single[row], torch.from_numpy(uniform32(expected)).float())
        assert np.array_equal(double[row].numpy(), uniform64(expected))
        arrival = exponential(seed, np.arange(tokens), position, node, purpose)
        np.testing.assert_allclose(exponentials[row].numpy(), arrival, rtol=1e-6)


@triton.jit
def logarithm_kernel(values, out, block: tl.constexpr):
    index = tl.arange(0, block)
    tl.store(out + index, random._log_one_minus(tl.load(values + index), random._EXACT_TERMS))


def test_logarithm_of_small_numbers_loses_nothing():
    values = torch.logspace(-57, 0, 4096, base=2, dtype=torch.float64).float()
    out = torch.empty_like(values)
    logarithm_kernel[(1,)](values, out, block=4096)
    exact = torch.log1p(-values.double())
    # Near 1 the smallest of a race cannot lie; there only the bound matters.
    small = values < 0.99
    torch.testing.assert_close(out[small].double(), exact[small], rtol=3e-7, atol=0)
    assert torch.isfinite(out).all()
    assert (out < 0).all()


@pytest.fixture(scope="module")
def vllm_gumbel():
    """vLLM's own sampling module, loaded without vLLM: that would find no GPU and no Triton."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM's sources")
    path = Path(spec.origin).parent / "v1/worker/gpu/sample/gumbel.py"
    stub = ModuleType("vllm.triton_utils")
    stub.tl, stub.triton = tl, triton
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        patch.setitem(sys.modules, "vllm.triton_utils", stub)
        source = importlib.util.spec_from_file_location("vllm_gumbel", path)
        module = importlib.util.module_from_spec(source)
        source.loader.exec_module(module)
    return module


@triton.jit
def our_noise_kernel(seeds, positions, out, block: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, block)
    noise = random.target_noise(tl.load(seeds + row), tl.load(positions + row), token)
    tl.store(out + row * block + token, noise)


@triton.jit
def their_noise_kernel(seeds, positions, out, tokens: tl.constexpr, argmax: tl.constexpr):
    row = tl.program_id(0)
    token = tl.program_id(1) + tl.arange(0, 1)
    noise, _ = argmax(
        token.to(tl.float32) * 0.0, token, token >= 0, tl.load(seeds + row),
        tl.load(positions + row), 1.0, IS_DRAFTING=False, USE_FP64=False,
    )  # fmt: skip
    tl.store(out + row * tokens + tl.program_id(1), noise)


def test_noise_is_vllms_to_the_bit(vllm_gumbel):
    """Its argmax among single tokens gives away the noise of each."""
    tokens = 32
    seeds = torch.tensor([0, 1, -5, 2**40 + 12345, -(2**63), 2**31])
    positions = torch.tensor([0, 7, 131_071, 1, 2**20, 65_535], dtype=torch.int32)
    ours, theirs = torch.empty(2, len(seeds), tokens)
    our_noise_kernel[(len(seeds),)](seeds, positions, ours, block=tokens)
    their_noise_kernel[(len(seeds), tokens)](
        seeds, positions.long(), theirs, tokens=tokens, argmax=vllm_gumbel.gumbel_noised_argmax
    )
    assert torch.equal(ours, theirs)
    assert len(ours.unique()) == ours.numel()


def test_matched_drafts_propose_what_vllm_samples(vllm_gumbel):
    torch.manual_seed(0)
    requests, vocabulary, depth = 12, 2500, 3
    logits = torch.randn(requests, vocabulary) * 2
    seeds = torch.randint(-(2**62), 2**62, (requests,))
    positions = torch.randint(0, 5000, (requests,), dtype=torch.int32)
    temperature = torch.rand(requests) + 0.5
    drawn = draw(
        logits, SEEDED, [3], temperature=temperature, seeds=seeds, positions=positions, depth=depth
    )
    sampled = vllm_gumbel.gumbel_sample(
        logits.clone(), torch.arange(requests), temperature, seeds, positions.long() + depth,
        apply_temperature=True, is_drafting=False,
    )  # fmt: skip
    assert torch.equal(drawn.tokens[:, 1], sampled)
