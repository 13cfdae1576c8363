"""Parts of workers that both model runners use."""
