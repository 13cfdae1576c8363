"""Growing token trees from what a drafter predicts: in torch, for V2 also in Triton. No vLLM."""
