"""Everything that touches vLLM's internals; `compat.ledger` lists each override."""
