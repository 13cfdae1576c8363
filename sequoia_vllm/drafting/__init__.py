"""Growing token trees from what a drafter predicts: in torch, and in Triton for V2. No vLLM here."""
