"""Growing token trees with a draft model, on any device: no vLLM here."""
