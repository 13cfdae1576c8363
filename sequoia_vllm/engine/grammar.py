"""Structured output on trees: what the grammar allows after each node, along the node's own path.

vLLM's manager takes a request's drafts for a chain: it drops those after the first that
the grammar forbids, and fills one mask after another. With trees all drafts are scored, a
mask for each node; what is forbidden has probability 0 then, and is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.structured_output.utils import strip_speculative_padding

from sequoia_vllm.engine.settings import SequoiaSettings
from sequoia_vllm.tree import TokenTree

BACKENDS = ("xgrammar", "guidance")
"""Whose state goes back as many tokens as it went forward."""

_TREE = "_sequoia_tree"  # set on a manager
_ALL = -1  # 32 tokens of a mask, all of them allowed


def thinks_first(vllm_config: Any) -> bool:
    """Whether an engine's grammars begin to hold only once a request has ended its reasoning."""
    config = vllm_config.structured_outputs_config
    return bool(config.reasoning_parser) and not config.enable_in_reasoning


def validate_tokens(
    original: Callable[..., list[int]], self: Any, request: Any, spec_tokens: list[int]
) -> list[int]:
    """As the manager's; a Sequoia engine keeps all drafts, as a tree's other paths may be valid."""
    if not request.use_structured_output or not SequoiaSettings.enabled(self.vllm_config):
        return original(self, request, spec_tokens)
    kept: list[int] = strip_speculative_padding(spec_tokens)
    return kept


def grammar_bitmask(
    original: Callable[..., NDArray[np.int32] | None],
    self: Any,
    requests: dict[str, Any],
    structured_output_request_ids: list[str],
    scheduled_spec_decode_tokens: dict[str, list[int]],
) -> NDArray[np.int32] | None:
    """As the manager's, which fills the masks of the roots; then those of the other nodes.

    Returns:
        int32 ``[rows, V / 32]``: of each of these requests its root's, then its drafts'.
    """
    drafted = [scheduled_spec_decode_tokens.get(name, []) for name in structured_output_request_ids]
    if not any(drafted) or not SequoiaSettings.enabled(self.vllm_config):
        return original(self, requests, structured_output_request_ids, scheduled_spec_decode_tokens)
    if not hasattr(self, _TREE):
        setattr(self, _TREE, SequoiaSettings.of(self.vllm_config).tree)
    roots = original(self, requests, structured_output_request_ids, {})
    assert roots is not None
    ends = np.cumsum([len(tokens) + 1 for tokens in drafted])
    masks = np.full((ends[-1], roots.shape[1]), _ALL, dtype=np.int32)
    for index, (name, tokens) in enumerate(
        zip(structured_output_request_ids, drafted, strict=True)
    ):
        own = masks[ends[index] - len(tokens) - 1 : ends[index]]
        own[0] = roots[index]
        grammar = requests[name].structured_output_request.grammar
        fill_nodes(grammar, name, getattr(self, _TREE), tokens, own)
    return masks


def fill_nodes(
    grammar: Any, request_id: str, tree: TokenTree, tokens: Sequence[int], masks: NDArray[np.int32]
) -> None:
    """Fills the masks of a tree's nodes, and leaves the grammar's state as it was.

    Args:
        grammar: vLLM's `StructuredOutputGrammar` of the request, at its root.
        request_id: For the grammar's messages.
        tree: The engine's; the request drafts its first nodes.
        tokens: Those of nodes 1, 2, ...; -1: none.
        masks: int32 ``[1 + len(tokens), V / 32]``, written but for the root's, which is
            filled. Nodes that the grammar forbids, and whatever is below, keep what is there:
            no path leads to them.
    """
    filled = torch.from_numpy(masks)
    entered = [0]  # nodes from the root down, whose tokens the grammar has taken
    for node in _depth_first(tree):
        parent = tree.parents[node]
        if node > len(tokens) or not _leave(grammar, entered, parent):
            continue
        token = tokens[node - 1]
        if not _allows(masks[parent], token) or grammar.is_terminated():
            continue
        if grammar.accept_tokens(request_id, [token]):
            entered.append(node)
            if not grammar.is_terminated():
                grammar.fill_bitmask(filled, node)
    _leave(grammar, entered, 0)


def _leave(grammar: Any, entered: list[int], node: int) -> bool:
    """Goes back to an ancestor; False: it was never entered."""
    if node not in entered:
        return False
    count = len(entered) - 1 - entered.index(node)
    if count > 0:
        grammar.rollback(count)
        del entered[-count:]
    return True


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    return token >= 0 and bool(mask[token // 32] >> (token % 32) & 1)


@lru_cache(maxsize=8)
def _depth_first(tree: TokenTree) -> list[int]:
    """All nodes but the root, each after its parent, with nothing between but its subtree's."""
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(tree.children[node]))
    return order[1:]
