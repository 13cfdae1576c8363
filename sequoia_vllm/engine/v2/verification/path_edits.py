"""Replaces vLLM's logits processors that read a chain's history by ones for trees."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.kernels.path_edits import NodeRows, exclude_bad_words, penalise_paths
from sequoia_vllm.tree import TokenTree


def along_paths(processors: list[Any], tables: TreeTables) -> list[Any]:
    """The sampler's logits processors, with penalties and bad words by each node's own path.

    Logit bias, allowed tokens and ``min_tokens`` go by positions, which trees set by depth. What
    users have installed sees each path as a chain.
    """
    by_kind: dict[type, Any] = {
        PenaltiesState: lambda state: PathPenalties(state, tables.parents),
        BadWordsState: lambda state: PathBadWords(state, tables.parents),
        LogitBiasState: lambda state: state,
    }
    return [by_kind.get(type(one), lambda own: Chains(own, tables))(one) for one in processors]


class _OfPaths:
    """Replaces one of vLLM's processors, which still keeps the requests' state."""

    def __init__(self, state: Any, parents: Tensor) -> None:
        self._state = state
        self._parents = parents
        self.add_request = state.add_request
        self.apply_staged_writes = state.apply_staged_writes

    def _rows(self, context: LogitsContext) -> NodeRows:
        return NodeRows(
            slots=context.expanded_idx_mapping,
            nodes=context.expanded_local_pos,
            token_ids=context.input_ids,
            parents=self._parents,
        )


class PathPenalties(_OfPaths):
    """Presence, frequency and repetition penalties."""

    def apply(self, logits: Tensor, context: LogitsContext) -> Tensor:
        """Replaces `PenaltiesState.apply`: changes the logits ``[rows, V]`` in place."""
        state = self._state
        if state.use_penalty[context.idx_mapping_np].any():
            penalise_paths(
                logits,
                self._rows(context),
                repetition=state.repetition_penalty.gpu,
                frequency=state.frequency_penalty.gpu,
                presence=state.presence_penalty.gpu,
                prompt_bits=state.prompt_bin_mask,
                output_counts=state.output_bin_counts,
            )
        return logits


class PathBadWords(_OfPaths):
    """Bad words: excludes the token that would complete one."""

    def apply(self, logits: Tensor, context: LogitsContext) -> Tensor:
        """Replaces `BadWordsState.apply`: changes the logits ``[rows, V]`` in place."""
        state = self._state
        most_words = int(state.num_bad_words.np[context.idx_mapping_np].max())
        if most_words > 0:
            exclude_bad_words(
                logits,
                self._rows(context),
                words=state.bad_word_token_ids.gpu,
                offsets=state.bad_word_offsets.gpu,
                num_words=state.num_bad_words.gpu,
                most_words=most_words,
                all_tokens=state.req_states.all_token_ids.gpu,
                prompt_lens=state.req_states.prompt_len.gpu,
                total_lens=state.req_states.total_len.gpu,
            )
        return logits


class Chains:
    """Runs a processor of the user's on trees: each path to a leaf is a chain of drafts to it.

    vLLM's processors take the rows before a row of the same request for its history. Rows on
    several paths are computed as often. Waits for nothing on the device.
    """

    def __init__(self, processor: Any, tables: TreeTables) -> None:
        self._processor, self._tables = processor, tables
        self._ends = cache(partial(_ends, tables.tree, tables.parents.ndim == 2))
        self.add_request = processor.add_request
        self.apply_staged_writes = processor.apply_staged_writes

    def apply(self, logits: Tensor, context: LogitsContext) -> Tensor:
        """Replaces the processor's `apply`, of float32 logits ``[T, V]``."""
        total, slots = len(logits), context.idx_mapping.long()
        if total == len(slots):  # no drafts
            found: Tensor = self._processor.apply(logits, context)
            return found
        nodes = context.expanded_local_pos.long()
        rows, request = torch.arange(total, device=nodes.device), (nodes == 0).cumsum(0) - 1
        first = torch.empty_like(slots).scatter_(0, request, rows - nodes)[:, None]
        count = torch.zeros_like(slots).scatter_add_(0, request, torch.ones_like(nodes))[:, None]
        width = self._tables.tree.depth + 1
        places = torch.arange(width, device=nodes.device).to(context.expanded_local_pos.dtype)
        places = places.repeat(len(slots))
        found = logits.new_empty(total + 1, logits.shape[1])  # one row more, for padding
        for end in self._ends(total - len(slots) + 1):
            path = self._path(end, slots)
            is_node = (path >= 0) & (path < count)
            place = (first + torch.where(is_node, path, 0)).flatten()
            chains = replace(
                context,
                expanded_idx_mapping=context.idx_mapping.repeat_interleave(width),
                expanded_local_pos=places,
                input_ids=context.input_ids[place],
                pos=context.pos[place],
            )
            edited = self._processor.apply(logits[place], chains)
            found[torch.where(is_node.flatten(), place, total)] = edited
        return found[:total]

    def _path(self, end: int, slots: Tensor) -> Tensor:
        """Nodes from the root to this one, then -1: int64 ``[R, D + 1]``."""
        above = self._tables.ancestors
        on_path = above[slots, end] if above.ndim == 3 else above[end].expand(len(slots), -1)
        width = self._tables.tree.depth + 1
        column = torch.where(on_path, on_path.cumsum(1) - 1, width)  # parents come first
        nodes = torch.arange(on_path.shape[1], device=slots.device).expand_as(column)
        paths = nodes.new_full((len(slots), width + 1), -1)
        return paths.scatter_(1, column, nodes)[:, :width]


def _ends(tree: TokenTree, is_dynamic: bool, most: int) -> list[int]:
    """Nodes whose paths have all of the first ``most`` nodes; dynamic trees' may be any."""
    nodes = range(min(most, tree.size))
    inner = set() if is_dynamic else set(tree.parents[: len(nodes)])
    return [node for node in nodes if node not in inner]
