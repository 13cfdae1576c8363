"""Measures acceptance and step times on live engines, for the tree optimizer."""
