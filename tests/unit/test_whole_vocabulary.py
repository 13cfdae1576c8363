"""A draft with the target's whole vocabulary proposes what it did before."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.whole_vocabulary import write
from sequoia_vllm.errors import SequoiaError
from sequoia_vllm.vocabulary.matching import Matching
from tests.support.models import DRAFT

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


def test_tokens_that_it_has_keep_their_logits_and_others_are_never_drawn(tmp_path, matching):
    write(str(tmp_path), Path(DRAFT), tmp_path / "wide", matching)
    small = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=torch.float32)
    tokens = torch.randint(KEPT + ADDED, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = small(torch.from_numpy(matching.read)[tokens]).logits
        found = wide(tokens).logits
    has = torch.from_numpy(matching.drawn >= 0)
    expected = expected[..., torch.from_numpy(matching.drawn[matching.drawn >= 0])]
    torch.testing.assert_close(found[..., has], expected, rtol=0, atol=0.1)
    assert torch.softmax(found, -1)[..., ~has].sum(-1).max() < 1e-9


def test_other_architectures_are_refused(tmp_path, matching):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(SequoiaError, match="can use LlamaForCausalLM"):
        write("target", tmp_path, tmp_path / "wide", matching)
