"""Sampling parameters that exclude tokens, for tests of the draft's truncation."""

TRUNCATIONS = [
    {"top_k": 1}, {"top_k": 20}, {"top_p": 0.8}, {"top_p": 1e-6}, {"min_p": 0.05}, {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.9}, {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 40, "top_p": 0.7, "min_p": 0.001},
]  # fmt: skip
