"""What the GPU kernels compile to, without a GPU.

``python -m benchmarks.compiled`` prints registers, spills and shared memory of every kernel's
variants. The GPUs are A100 (80), L4, L40 and RTX 4090 (89), H100 and H200 (90), B200 (100) and
RTX 5090 (120). It says nothing about speed. But it finds variants that spill or do not fit, which
would be slow on the GPU, or refused.

Not in a process with TRITON_INTERPRET=1: there Triton compiles nothing.
"""
