"""Weights on a disk behind vLLM's own abstraction of offloading, for engines on CPUs."""
