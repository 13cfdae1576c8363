"""A third method of verification, added by one registration: sampled requests accept no draft.

What they emit is sampled from the target at the root. So their law is the target's, and one token
per step shows that this method verified them.
"""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from sequoia_vllm.verification.methods import VerificationMethod
from sequoia_vllm.verification.topology import VerifyResult, topology_of
from sequoia_vllm.verification.walk import walk_tree

HERE = __name__
TARGET_ONLY = VerificationMethod(
    "target-only", host=f"{HERE}:verify_on_host", kernel=f"{HERE}:launch",
    compiled=f"{HERE}:compile_host", tables=f"{HERE}:tables_of",
)  # fmt: skip
called: list[str] = []


def compile_host() -> None:
    called.append("compiled")


def verify_on_host(target_at, draft_at, tokens, parents, generator=None) -> VerifyResult:
    called.append("host")
    depth = topology_of(parents, tokens).max_depth
    roots = torch.full((len(tokens), 1), -1)
    found = walk_tree(target_at, draft_at, tokens[:, :1], roots, generator)
    return VerifyResult(
        pad(found.accepted_nodes, (0, depth), value=-1),
        pad(found.output_tokens, (0, depth), value=-1),
        found.num_accepted,
    )


def tables_of(parents, device) -> int:
    """The number of nodes, to see that `launch` is given it."""
    return len(parents)


def launch(trees, tables, **options) -> None:
    from sequoia_vllm.kernels.modes import SAMPLED
    from sequoia_vllm.kernels.verify import verify_trees

    called.append("kernel")
    assert tables == len(trees.children)
    modes = trees.inputs.modes.repeat_interleave(trees.cu_num_logits.diff())
    hidden = torch.where(modes == SAMPLED, -1, trees.inputs.tokens)
    verify_trees(replace(trees, inputs=replace(trees.inputs, tokens=hidden)), **options)
