"""Most nodes of a tree, root included, by what holds all of them."""

MOST_NODES = 1024
"""The largest tree of a configuration or a file."""
MOST_DYNAMIC_NODES = 128
"""The largest dynamic tree on GPUs: a program of `kernels.dynamic_trees` holds all candidates."""
MOST_RECURRENT_NODES = 64
"""The largest tree over recurrent layers: a program of `kernels.recurrent_tree` holds all nodes."""
