"""SmolLM2-135M-Instruct as a folder that vLLM serves: fetched, converted, checked, cached."""
