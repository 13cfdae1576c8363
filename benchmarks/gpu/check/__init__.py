"""Are the kernels right and fast on this GPU? In stages; the first two need no vLLM.

Also without pydantic, typer and rich: machines lent for measuring often have PyTorch,
Triton and NumPy alone.
"""
