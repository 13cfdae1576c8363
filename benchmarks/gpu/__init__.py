"""Measuring on GPUs: the check of kernels and steps, and what it found."""
