"""Plain vLLM, vLLM's chain and Sequoia as servers, under requests that arrive at random.

``python -m benchmarks.serving`` starts ``vllm serve`` once per variant and round, sends it the same
loads with ``vllm bench serve``, and prints one table. Arrivals do not wait for answers (an open
loop), so a slow server has more requests at once. Results are written after every load. A second
call with the same ``--output`` measures what is missing.
"""
