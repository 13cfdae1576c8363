"""What measuring on live engines shares: engines, recorders of their steps, provenance."""
