"""Replaces vLLM's logits processors that read a chain's history by ones for trees."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from sequoia_vllm.kernels.path_edits import exclude_bad_words, penalise_paths


def along_paths(processors: list[Any], parents: Tensor) -> list[Any]:
    """vLLM's logits processors, with penalties and bad words by each node's own path.

    Logit bias, allowed tokens and ``min_tokens`` go by positions, which trees set by depth.
    ``parents`` are those of `penalise_paths`.
    """
    edits = {PenaltiesState: penalise_paths, BadWordsState: exclude_bad_words}
    return [
        AlongPaths(edits[type(one)], one, parents) if type(one) in edits else one
        for one in processors
    ]


class AlongPaths:
    """Replaces one of vLLM's processors, which still keeps the requests' state."""

    def __init__(self, edit: Callable[..., None], state: Any, parents: Tensor) -> None:
        self._edit, self._state, self._parents = edit, state, parents
        self.add_request = state.add_request
        self.apply_staged_writes = state.apply_staged_writes

    def apply(self, logits: Tensor, context: LogitsContext) -> Tensor:
        """Replaces the processor's: changes the logits ``[rows, V]`` in place."""
        self._edit(logits, context, self._state, self._parents)
        return logits
