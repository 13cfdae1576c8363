"""Trees and vLLM's chains over one trained EAGLE-3 head, at the cost of an 8B model."""
