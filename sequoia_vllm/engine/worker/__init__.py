"""Sequoia's workers, on CPUs and GPUs."""
