"""Sequoia on vLLM's V1 runner, the default on CPUs: what `step` does, from and to vLLM.

Until: vLLM's V2 runner runs on CPUs (vllm-project/vllm#55847): v2 has its part.

May import: common, compat, core, offload, runner.
"""
