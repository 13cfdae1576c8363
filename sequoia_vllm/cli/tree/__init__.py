"""`sequoia-vllm tree`: build, list and look at trees."""
