"""What an engine times in its warm-up, for its next start's choice of a tree."""
