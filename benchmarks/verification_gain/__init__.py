"""What methods of verification gain on the distributions of a pair of models.

For contexts of the target's own text a tree is drafted, and P and Q are computed at each of its
nodes (float32, torch). From these come the expected tokens per step of each method:

- Algorithm 2 and traversal by this package's code, with children drawn without replacement. Their
  trees are the same. Each is verified several times, and the mean is taken.
- UniVer (arXiv 2605.04543), exactly given the tree. It needs other trees: all children of a node
  are its likeliest tokens, but for the last, which is drawn from the rest.
- Trees of the likeliest tokens alone, without any draw, exactly.

``python -m benchmarks.verification_gain`` measures the pair in ``examples/models``.
"""
