"""Scoring trees on Model Runner V2."""
