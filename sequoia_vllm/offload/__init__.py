"""Weights that stay on a disk and are read ahead of each layer: no vLLM in here."""
