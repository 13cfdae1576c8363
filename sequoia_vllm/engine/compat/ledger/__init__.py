"""What we override and use of vLLM: why, until when, and what the start-up contract checks.

An `Override` is something of vLLM's that we replace; an `Expected` is something that
we only call or read. Each is here once, in the table of where it holds:

- `EVERYWHERE`: on every device and runner;
- `CPU_V1`: on CPUs: vLLM's V1 runner, and what both runners share there;
- `V2`: Model Runner V2, on every device;
- `GPU`: on GPUs, where the runner is always V2.

Tables are ordered by vLLM's modules. They import nothing of vLLM and nothing that they describe.
So a device can be checked without loading another one's code, and other versions' wheels can be
read. `engine.compat.contract` checks at start-up what modules, classes and functions show;
attributes that only instances have are not seen. A test checks that no override is missing here.
"""

from sequoia_vllm.engine.compat.ledger.cpu_v1 import CPU_V1
from sequoia_vllm.engine.compat.ledger.entry import Expected, Override, Signature
from sequoia_vllm.engine.compat.ledger.everywhere import EVERYWHERE
from sequoia_vllm.engine.compat.ledger.gpu import GPU
from sequoia_vllm.engine.compat.ledger.v2 import V2

OVERRIDES = tuple(
    entry for entry in (*EVERYWHERE, *CPU_V1, *V2, *GPU) if isinstance(entry, Override)
)

__all__ = ["CPU_V1", "EVERYWHERE", "GPU", "OVERRIDES", "V2", "Expected", "Override", "Signature"]
