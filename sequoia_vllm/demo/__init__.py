"""The demo: the same prompts through plain vLLM, its chain speculation, and Sequoia."""
