"""Kinds of drafters: models of their own, heads of a target, layers of its checkpoint.

A folder has everything about one kind. Its ``__init__`` has names, signs in configurations, shape
and published checkpoints, and imports neither vLLM nor torch. Its ``v2`` runs the kind on Model
Runner V2, and its ``v1`` on the V1 runner; engines import them by their dotted paths. These are two
files because V2's needs Triton, which CPUs do without, and V1's goes when vLLM drops that runner.
"""

from importlib import import_module
from pkgutil import iter_modules

from sequoia_vllm.drafters.registry import Drafter, register

for _module in iter_modules(__path__, f"{__name__}."):
    if _module.ispkg:
        import_module(_module.name)

__all__ = ["Drafter", "register"]
