"""Everything that touches vLLM's internals; `ledger` lists each override."""
