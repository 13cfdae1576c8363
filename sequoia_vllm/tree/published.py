"""Published acceptance vectors."""

from sequoia_vllm.tree.acceptance import Acceptance

REFERENCE_ACCEPTANCE = Acceptance.of(
    [
        0.634183, 0.107946, 0.056972, 0.022489, 0.01949, 0.014993, 0.004498, 0.002999,
        0.011994, 0.004498, 0.007496, 0.004498, 0.005997, 0.002999, 0.001499, 0.002999,
        0.001499, 0.002999, 0.0, 0.002999, 0.002999, 0.002999, 0.0, 0.001499,
        0.0, 0.001499, 0.0, 0.0, 0.0, 0.001499, 0.001499, 0.001499,
    ]
)  # fmt: skip
"""``acceptance-rate-vector.pt`` of the authors' public code; they do not state its model pair."""
