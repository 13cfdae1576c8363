"""Targets larger than memory: vLLM's own offloading on GPUs, and ours from a disk on CPUs.

- `vllms`: which of vLLM's offloaders is asked for, and what came of it;
- `settings`, `choice`: what ours is asked for, and which worker does it;
- `worker`, `disk`: ours, behind vLLM's abstraction;
- `weight_source`, `disk_source`: what either costs, for the choice of a tree.

May import: compat.
"""
