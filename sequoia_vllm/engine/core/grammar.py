"""Structured output on trees: what the grammar allows after each node, along the node's own path.

vLLM's manager takes a request's drafts for a chain. With trees all drafts are scored, with a mask
for each node. Forbidden tokens then have probability 0, and are rejected. Behind a reasoning parser
a grammar begins where reasoning ends, which may be amid a path.

On Model Runner V1 a forbidden draft is replaced where little is allowed (`StandIns`), and the
verifier knows both tokens (`verification.replaced`): docs/requests.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.structured_output.utils import strip_speculative_padding

from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.tree import TokenTree

MOST_ALLOWED = 8
"""Drafts are replaced where the grammar allows this many tokens or fewer. Where it allows more, a
choice without a model is hardly ever right, and the grammar would have to check everything below. A
forced string allows few: the tokens that are a beginning of it.
"""


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """Whether a mask, int32 ``[V / 32]``, allows this token; none if it is negative."""
    return token >= 0 and bool(mask[token // 32] >> (token % 32) & 1)


@dataclass(frozen=True)
class StandIns:
    """Chooses tokens for the children of a node, by its mask and their drafts alone."""

    vocabulary: int  # tokens that the target has; masks may have more
    length_of: Callable[[int], int]  # length of a token's text

    @classmethod
    def of(cls, manager: Any) -> "StandIns":
        """Stand-ins for the engine of vLLM's `StructuredOutputManager`."""
        tokenizer = manager.tokenizer

        @lru_cache(maxsize=4096)
        def length_of(token: int) -> int:
            [text] = tokenizer.convert_ids_to_tokens([token])
            return len(text or "")  # ids of no token have none

        return cls(manager.vllm_config.model_config.get_vocab_size(), length_of)

    def __call__(self, mask: NDArray[np.int32], drafts: Sequence[int]) -> list[int]:
        """Different tokens for the children: a draft if it is allowed, else one no sibling has.

        The longest come first: a tokenizer mostly takes as much of a forced string as it can. A
        forbidden draft stays where no token is left, or too many are allowed. ``mask``, int32 ``[V
        / 32]``, says what the grammar allows after the node.
        """
        if all(allows(mask, token) for token in drafts):
            return list(drafts)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=self.vocabulary)
        allowed = np.flatnonzero(bits)
        if len(allowed) > MOST_ALLOWED:
            return list(drafts)
        free = set(allowed.tolist()).difference(drafts)
        best = iter(sorted(free, key=lambda token: (-self.length_of(token), token)))
        return [token if allows(mask, token) else next(best, token) for token in drafts]


BACKENDS = ("xgrammar", "guidance")
"""Backends whose grammars can go back as many tokens as they went forward."""

_ALL = -1  # 32 tokens of a mask, all of them allowed


@dataclass(frozen=True)
class Grip:
    """Which nodes a grammar has a say in; the others are still reasoning."""

    takes: NDArray[np.bool_]  # bool ``[N]``: the grammar reads the node's own token
    masks: NDArray[np.bool_]  # bool ``[N]``: it says what may follow the node

    @classmethod
    def on_all(cls, nodes: int) -> "Grip":
        """The grip of a grammar that held before the root."""
        return cls(np.ones(nodes, dtype=bool), np.ones(nodes, dtype=bool))


class TreeGrammars:
    """What a Sequoia scheduler has for vLLM's `StructuredOutputManager`, which does the rest."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.tree = SequoiaSettings.of(manager.vllm_config).tree
        self.branches: frozenset[str] = frozenset()  # requests whose drafts are a chain
        # What grammars have gone through, by request, until the next masks are filled: tokens to
        # be scored at nodes 1, 2, ..., and int32 ``[1 + len(tokens), V / 32]``.
        self._walked: dict[str, tuple[list[int], NDArray[np.int32]]] = {}

    @cached_property
    def stand_ins(self) -> StandIns | None:
        """What replaces forbidden drafts, in an engine with a tokenizer; None: nothing does."""
        config = self.manager.vllm_config
        drafts_wait = not config.scheduler_config.async_scheduling
        replaces = drafts_wait and not config.use_v2_model_runner
        return StandIns.of(self.manager) if replaces else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def validate_tokens(self, request: Any, spec_tokens: list[int]) -> list[int]:
        """Keeps all drafts: other paths of a tree may be valid. It may replace some of a tree."""
        if not request.use_structured_output:
            return spec_tokens
        kept: list[int] = strip_speculative_padding(spec_tokens)
        name, grammar = request.request_id, request.structured_output_request.grammar
        self._walked.pop(name, None)
        if not kept or self.stand_ins is None or grammar.is_terminated() or name in self.branches:
            return kept
        self._make_room()
        scored, _ = self._walked[name] = self._walk(request, kept, self.stand_ins)
        return scored

    def grammar_bitmask(
        self,
        requests: dict[str, Any],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> NDArray[np.int32] | None:
        """Masks of each of these requests, its root's, then its drafts', int32 ``[rows, V / 32]``.

        The manager fills the roots', one by one: its layout of several differs by version.
        """
        manager, names = self.manager, structured_output_request_ids
        if not names:
            return None
        self._make_room()
        found = []
        for name in names:
            tokens = scheduled_spec_decode_tokens.get(name, [])
            # Maybe filled before these tokens, or more, were scheduled.
            walked, masks = self._walked.get(name, ([], None))
            if masks is not None and tokens and walked[: len(tokens)] == list(tokens):
                masks = masks[: len(tokens) + 1]
            elif tokens:
                _, masks = self._walk(requests[name], tokens)
            else:
                masks = manager.grammar_bitmask(requests, [name], {}).copy()
            found.append(masks)
        self._walked.clear()
        return np.concatenate(found)

    def _make_room(self) -> None:
        """Lets vLLM's manager fill one mask at a time, not those of a chain."""
        if self.manager._grammar_bitmask is None:
            self.manager._grammar_bitmask = self.manager.backend.allocate_token_bitmask(1)

    def _walk(
        self, request: Any, tokens: list[int], stand_ins: StandIns | None = None
    ) -> tuple[list[int], NDArray[np.int32]]:
        """The tokens to score at nodes 1, 2, ..., and int32 ``[1 + len(tokens), V / 32]``."""
        manager, name = self.manager, request.request_id
        root = manager.grammar_bitmask({name: request}, [name], {})[0]
        masks = np.full((len(tokens) + 1, len(root)), _ALL, dtype=np.int32)
        masks[0] = root
        tree = TokenTree.chain(len(tokens)) if name in self.branches else self.tree
        grammar, grip = request.structured_output_request.grammar, self._grip(request, tree, tokens)
        return fill_nodes(grammar, name, tree, tokens, masks, grip, stand_ins), masks

    def _grip(self, request: Any, tree: TokenTree, tokens: Sequence[int]) -> Grip:
        """Asks vLLM's manager, of each path of the tree, where its reasoning ends."""
        nodes, manager = len(tokens) + 1, self.manager
        found = Grip.on_all(nodes)
        if manager._get_constraint_bounds(request, ()).constraint_start == 0:  # it has ended
            return found
        found.takes[0] = found.masks[0] = False
        inner = set(tree.parents[:nodes])
        for leaf in set(range(1, nodes)) - inner:
            path = np.flatnonzero(tree.ancestor_mask[leaf])[1:]
            drafts = strip_speculative_padding([tokens[node - 1] for node in path])
            bounds, places = manager._get_constraint_bounds(request, drafts), np.arange(len(path))
            found.takes[path] = places >= bounds.grammar_start
            found.masks[path] = places + 1 >= bounds.constraint_start
        return found


def fill_nodes(
    grammar: Any,
    request_id: str,
    tree: TokenTree,
    tokens: Sequence[int],
    masks: NDArray[np.int32],
    grip: Grip,
    stand_ins: StandIns | None = None,
) -> list[int]:
    """Fills the masks of a tree's nodes, and leaves the grammar's state as it was.

    Args:
        grammar: vLLM's `StructuredOutputGrammar` of the request, at its root, or before it begins.
        tree: The engine's, or a chain; the request drafts its first nodes.
        tokens: Tokens of nodes 1, 2, ...; -1: none.
        masks: int32 ``[1 + len(tokens), V / 32]``, written but for the root's, which is filled.
            Nodes that the grammar forbids, and whatever is below, keep what is there. Nodes that
            still reason have the root's.
        grip: Of the grammar, on the tree's nodes.

    Returns:
        The tokens to score: ``tokens``, some of them replaced.
    """
    filled = torch.from_numpy(masks)
    scored = list(tokens)
    entered = [0]  # nodes from the root down, whose tokens the grammar has taken

    def replace_children(node: int) -> None:
        """Before any of them is entered: the choice must not depend on what is below them."""
        children = [child for child in tree.children[node] if child <= len(tokens)]
        if stand_ins is not None and children and grip.masks[node]:
            drawn = [tokens[child - 1] for child in children]
            for child, token in zip(children, stand_ins(masks[node], drawn), strict=True):
                scored[child - 1] = token

    replace_children(0)
    for node in tree.depth_first[1:]:
        parent = tree.parents[node]
        if node > len(tokens) or not _leave(grammar, entered, parent, grip):
            continue
        token = scored[node - 1]
        if not allows(masks[parent], token):
            continue
        if grip.takes[node]:
            if grammar.is_terminated():
                continue
            # What ends reasoning by its own text may be no beginning of the grammar's.
            if not grip.masks[parent] and not grammar.validate_tokens([token]):
                continue
            if not grammar.accept_tokens(request_id, [token]):
                continue
        entered.append(node)
        if not grip.masks[node]:
            masks[node] = masks[0]
        elif not grammar.is_terminated():
            grammar.fill_bitmask(filled, node)
            replace_children(node)
    _leave(grammar, entered, 0, grip)
    return scored


def _leave(grammar: Any, entered: list[int], node: int, grip: Grip) -> bool:
    """Goes back to an ancestor; False: it was never entered."""
    if node not in entered:
        return False
    left = entered[entered.index(node) + 1 :]
    if left:
        del entered[-len(left) :]
        if (count := int(grip.takes[left].sum())) > 0:
            grammar.rollback(count)
    return True
