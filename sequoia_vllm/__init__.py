"""Sequoia tree speculative decoding for vLLM (arXiv 2402.12374)."""

__version__ = "0.2.0"
