"""Test only: a CUDA GPU for vLLM on a machine without one.

vLLM's own GPU worker and Model Runner V2 run on tensors in host memory: streams and
events do nothing, kernels are interpreted (or, for libraries, written in torch), and
CUDA graphs are records of operators that are run again. See ../../README.md.
"""
