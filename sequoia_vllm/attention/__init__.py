"""Tree attention over a paged KV cache: a compiled CPU kernel, and torch."""
