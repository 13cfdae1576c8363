"""`sequoia-vllm tree`: make, draw, list and predict trees."""
