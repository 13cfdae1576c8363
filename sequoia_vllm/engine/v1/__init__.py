"""What only vLLM's V1 runner needs: it goes when vLLM drops that runner."""
