"""Triton kernels of the GPU path: tree attention, drafting, verification, commit."""
