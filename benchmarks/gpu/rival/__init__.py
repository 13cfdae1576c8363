"""Trees and vLLM's chains over one trained head, at the cost of an 8B model."""
