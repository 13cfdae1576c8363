"""Shared by measurements on live engines: engines, recorders of their steps, provenance."""
