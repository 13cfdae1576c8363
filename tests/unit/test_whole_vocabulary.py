"""A draft with the target's whole vocabulary proposes what it did before."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.whole_vocabulary import write
from sequoia_vllm.vocabulary.matching import Matching
from tests.support.models import DRAFT, TARGET

TOKENS = 4096
KEPT = 1500
ADDED = 300


@pytest.fixture
def matching():
    """A target with some tokens of the draft's, in another order, and others."""
    random = np.random.default_rng(0)
    drawn = np.full(KEPT + ADDED, -1)
    places = random.permutation(KEPT + ADDED)[:KEPT]
    drawn[places] = random.permutation(TOKENS)[:KEPT]
    read = np.where(drawn < 0, 7, drawn)
    return Matching(drawn, read, np.empty((0, 2), dtype=np.int64))


@pytest.fixture
def target(tmp_path):
    shutil.copytree(TARGET, tmp_path / "target")
    return str(tmp_path / "target")


def logits(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(tokens).logits


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_tokens_that_it_has_keep_their_logits_and_others_are_never_drawn(
    tmp_path, target, matching, scale
):
    """Also where the final states are large."""
    draft = shutil.copytree(DRAFT, tmp_path / "draft")
    tensors = load_file(draft / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    name = f"model.layers.{last}.mlp.down_proj.weight"
    tensors[name] = tensors[name] * scale
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    write(target, draft, tmp_path / "wide", matching)
    tokens = torch.randint(KEPT + ADDED, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = logits(draft, torch.from_numpy(matching.read)[tokens])
    found = logits(tmp_path / "wide", tokens)
    has = torch.from_numpy(matching.drawn >= 0)
    expected = expected[..., torch.from_numpy(matching.drawn[matching.drawn >= 0])]
    torch.testing.assert_close(found[..., has], expected, rtol=0.02, atol=0.1)
    assert torch.softmax(found, -1)[..., ~has].sum(-1).max() < 1e-9
