"""What we expect of vLLM: each attribute that we override, call or rely on, by module of ours.

`engine.contract` says which of the lists hold where. Attributes that only
instances have are not seen: modules, classes and functions are looked at.
"""

from sequoia_vllm.engine.expectations.cpu_v1 import CPU_V1
from sequoia_vllm.engine.expectations.everywhere import EVERYWHERE
from sequoia_vllm.engine.expectations.expected import Expected, Signature
from sequoia_vllm.engine.expectations.gpu import GPU
from sequoia_vllm.engine.expectations.v2 import V2

__all__ = ["CPU_V1", "EVERYWHERE", "GPU", "V2", "Expected", "Signature"]
