"""Sequoia tree speculative decoding for vLLM (arXiv 2402.12374)."""

from sequoia_vllm.orphans import die_with_parent

__version__ = "0.2.0"

die_with_parent()
