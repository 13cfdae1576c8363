"""Two operators that a CUDA build of torchvision needs while it is imported beside torch for CPUs.

PyPI has no other build, and vLLM's multimodal models import it for their image processors, which
call neither.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_defined: list[Any] = []  # kept: they go with the library that has them


class _BeforeTorchvision(MetaPathFinder):
    """Defines the operators when torchvision is first looked for, and finds nothing."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _defined.append(library := torch.library.Library("torchvision", "DEF"))
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        return None


def define() -> None:
    """To be called where ``torchvision`` is in a folder of PYTHONPATH."""
    sys.meta_path.insert(0, _BeforeTorchvision())
