"""Sequoia on vLLM's Model Runner V2, the default on GPUs."""
