"""Methods of verifying sampled trees: one record for each, found by its name.

Code is named, not imported: configuration and files ask for names where there is neither torch
nor Triton. A plugin of vLLM's group ``vllm.general_plugins``, which vLLM loads in every process,
adds a method by `register`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class VerificationMethod:
    """One way to verify sampled trees. Each part of its code is given as "module:name"."""

    name: str
    host: str  # verifies on the host (Model Runner V1); called as `walk.walk_tree` is
    kernel: str  # launches the kernels (Model Runner V2); called as `kernels.verify.verify_trees`
    compiled: str | None = None  # called once at start, compiles what ``host`` runs; None: nothing
    tables: str | None = None
    """Called with a tree's parents and a device, makes what ``kernel`` needs of the tree; None:
    nothing."""
    ran_on: str | None = None  # the GPU on which its kernels have run here; None: none

    def host_function(self) -> Callable[..., Any]:
        """The function that verifies on the host."""
        return resolve_name(self.host)

    def kernel_launcher(self) -> Callable[..., None]:
        """The function that launches the kernels; importing it needs Triton."""
        return resolve_name(self.kernel)

    def compile_host(self) -> None:
        """Compiles now what `host_function` would compile in its first step."""
        if self.compiled is not None:
            resolve_name(self.compiled)()

    def tree_tables(self, parents: Sequence[int], device: Any) -> Any:
        """What `kernel_launcher` needs of a tree, or None."""
        return None if self.tables is None else resolve_name(self.tables)(parents, device)


DEFAULT_METHOD = "sequoia"
"""The paper's: Algorithm 2 of arXiv 2402.12374."""
_SEQUOIA = VerificationMethod(
    DEFAULT_METHOD,
    host="sequoia_vllm.verification.walk:walk_tree",
    kernel="sequoia_vllm.kernels.verify:verify_trees",
    ran_on="an H100",
)
_TRAVERSAL = VerificationMethod(
    "traversal",  # arXiv 2505.12398
    host="sequoia_vllm.verification.traversal:traverse_tree",
    kernel="sequoia_vllm.kernels.traversal:traverse_trees",
    compiled="sequoia_vllm.verification.traversal:load_traversal",
    tables="sequoia_vllm.kernels.traversal:TraversalOrder.of",
)
_METHODS = {method.name: method for method in (_SEQUOIA, _TRAVERSAL)}


def register(method: VerificationMethod) -> None:
    """Adds a method, under a name that no other has.

    Raises:
        ValueError: There is another one of its name.
    """
    if _METHODS.setdefault(method.name, method) != method:
        raise ValueError(f"there is a method {method.name!r} of verification already")


def method_of(name: str) -> VerificationMethod:
    """The record of the method of this name.

    Raises:
        ValueError: There is none; the message names those there are.
    """
    if name not in _METHODS:
        raise ValueError(f"there is no method {name!r}: give one of {', '.join(_METHODS)}")
    return _METHODS[name]


def usual_method(on_cpu: bool) -> str:
    """The method where none is asked for.

    Traversal accepts more of the same drafts. On GPUs it is the usual one once it has run on one.
    On CPUs it costs about what it gains.
    """
    return "traversal" if method_of("traversal").ran_on and not on_cpu else DEFAULT_METHOD
