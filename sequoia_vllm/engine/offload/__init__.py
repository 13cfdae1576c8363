"""Targets larger than memory: vLLM's own offloading on GPUs, and ours from a disk on CPUs.

- `vllms`: which of vLLM's offloaders is asked for, and how much it offloaded;
- `settings`: what ours is asked for, and the worker that does it;
- `worker`, `disk`: ours, behind vLLM's abstraction;
- `weight_file`, `layer_ring`: the file, and the buffers that layers are read into ahead of their
  computation, without vLLM;
- `weight_source`: what either costs, for the choice of a tree.

Until: vLLM offloads weights on CPUs.

May import: compat.
"""
