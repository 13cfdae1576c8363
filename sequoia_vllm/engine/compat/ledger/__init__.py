"""What we override and use of vLLM: why, until when, and what the start-up contract checks.

An `Override` is something of vLLM's that we replace; an `Expected` is something that
we only call or read. Each is here once, in the list of where it holds:

- `EVERYWHERE`: on every device and runner (of scheduling: `scheduling`);
- `CPU_V1`: on CPUs: vLLM's V1 runner, and what both runners share there;
- `V2`: Model Runner V2, on every device (of its speculators: `v2_speculators`);
- `GPU`: on GPUs, where the runner is always V2.

A list is ordered by the modules of ours that need its entries. `engine.compat.contract` checks
at start-up what modules, classes and functions show of them; attributes that only
instances have are not seen. A test checks that no override is missing here.
"""

from sequoia_vllm.engine.compat.ledger.cpu_v1 import CPU_V1
from sequoia_vllm.engine.compat.ledger.everywhere import EVERYWHERE
from sequoia_vllm.engine.compat.ledger.expected import Expected, Signature
from sequoia_vllm.engine.compat.ledger.gpu import GPU
from sequoia_vllm.engine.compat.ledger.override import Override
from sequoia_vllm.engine.compat.ledger.v2 import V2

OVERRIDES = tuple(
    entry for entry in (*EVERYWHERE, *CPU_V1, *V2, *GPU) if isinstance(entry, Override)
)

__all__ = ["CPU_V1", "EVERYWHERE", "GPU", "OVERRIDES", "V2", "Expected", "Override", "Signature"]
