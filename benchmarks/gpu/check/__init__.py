"""Are the kernels right and fast on this GPU? Each is compared with torch, and timed.

Without vLLM, pydantic, typer and rich: machines lent for measuring often have PyTorch,
Triton and NumPy alone.
"""
