"""What `sequoia-vllm verify` concludes: comparison of answers, test of a law, the report. No vLLM.

`bench/verify.py` runs the engines.
"""
