"""Logprobs are made for the tokens of a path, not for all nodes of its tree."""

import numpy as np

from sequoia_vllm.engine.v2.verification.verifier import emitted_rows


def test_a_tree_has_rows_for_the_longest_path_only():
    cu_num_logits = np.array([0, 64, 64, 65, 67], dtype=np.int32)  # 64, 0, 1 and 2 nodes
    starts, (request, column) = emitted_rows(cu_num_logits, most=4)
    assert starts.tolist() == [0, 4, 4, 5, 7]
    assert request.tolist() == [0, 0, 0, 0, 2, 3, 3]
    assert column.tolist() == [0, 1, 2, 3, 0, 0, 1]
