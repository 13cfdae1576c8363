"""Replaces vLLM's logits processors that read a chain's history by ones for trees."""

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.v2.verification.chains import Chains
from sequoia_vllm.kernels.path_edits import NodeRows, exclude_bad_words, penalise_paths


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
