"""Verifying trees on Model Runner V2."""
