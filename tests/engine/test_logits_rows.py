"""The rows that the target computes logits of are vLLM's own."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from sequoia_vllm.engine.v1.batch_trees import logits_rows

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=12))
def test_rows_are_vllms(requests):
    """Requests of some drafts each, behind rows of a prompt without logits."""
    drafts = np.array([drafts for drafts, _ in requests], dtype=np.int32)
    ends = np.array([drafts + 1 + prompt for drafts, prompt in requests], dtype=np.int32).cumsum()
    ends = ends.astype(np.int32)
    runner = SimpleNamespace(
        arange_np=np.arange(int(ends[-1]) + 1, dtype=np.int64),
        _arange_scratch=np.zeros(int(ends[-1]) + 1, dtype=np.int64),
        input_ids=SimpleNamespace(gpu=torch.zeros(int(ends[-1]), dtype=torch.int32)),
        device=CPU,
    )
    runner._get_cumsum_and_arange = GPUModelRunner._get_cumsum_and_arange.__get__(runner)
    expected = GPUModelRunner._calc_spec_decode_metadata(runner, drafts, ends)
    rows = logits_rows(drafts, ends)
    assert rows.logits_indices.tolist() == expected.logits_indices.tolist()
    assert rows.num_draft_tokens == expected.num_draft_tokens
    assert rows.max_spec_len == expected.max_spec_len
