"""Applies sampling parameters to the target's logits at tree nodes, each by its own path.

Without drafts a request has one row, whose history is the tokens generated so far; vLLM's sampler
edits that row. A node's history is these tokens and those of its path.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.model_executor.layers.utils import apply_penalties
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.worker.gpu_input_batch import InputBatch

from sequoia_vllm.engine.v1.custom_processors import change, of_user, run_on_nodes
from sequoia_vllm.step.paths import NodePaths, node_paths
from sequoia_vllm.step.score import StepState


def edited_by_paths(
    logits: Tensor,
    trees: StepState,
    metadata: SamplingMetadata,
    sampling_params: Sequence[Any],
    batch: InputBatch,
) -> Tensor:
    """Applies to all tree nodes what vLLM's sampler applies before the temperature, in its order.

    These are ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``, the user's own
    processors, and penalties.

    Args:
        logits: ``[rows, V]``, any float dtype; not changed.
        sampling_params: Each request's `SamplingParams`.
        batch: vLLM's input batch, with the tokens so far.

    Returns:
        float32 ``[rows, V]``; ``logits`` itself where nothing changes.
    """
    starts, ends = batch.num_prompt_tokens, batch.num_tokens_no_spec
    num_outputs = (ends - starts)[: len(sampling_params)]
    edits = np.array(list(map(edits_logits, sampling_params, num_outputs)))
    own_processors = of_user(metadata.logitsprocs.non_argmax_invariant)
    if own_processors:
        edits |= np.array([change(own_processors, row) for row in range(len(edits))])
    of_tree = edits[trees.requests.numpy()]
    if not of_tree.any():
        return logits
    outputs = {
        index: batch.token_ids_cpu[index, starts[index] : ends[index]]
        for index in np.flatnonzero(edits).tolist()
    }
    nodes = node_paths(trees, torch.from_numpy(of_tree))
    found = logits.to(torch.float32, copy=True)
    own = found[nodes.rows]
    if metadata.allowed_token_ids_mask is not None:
        own.masked_fill_(metadata.allowed_token_ids_mask[nodes.requests], float("-inf"))
    _exclude_bad_words(own, nodes, metadata, outputs)
    for index, output in outputs.items():
        of_request = nodes.requests == index
        _keep_going(own, of_request, nodes, sampling_params[index], len(output))
        if bias := sampling_params[index].logit_bias:
            tokens, values = torch.tensor(list(bias)), torch.tensor(list(bias.values()))
            own[of_request.nonzero(), tokens] += values
    if own_processors:
        run_on_nodes(
            own_processors, own, nodes.requests.tolist(), nodes.own_tokens(), len(sampling_params)
        )
    own = _penalise(own, nodes, metadata, outputs)
    found[nodes.rows] = own
    return found


def drawn_by_paths(
    trees: StepState, metadata: SamplingMetadata, num_reqs: int
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """What the user's own processors do to rows that are drawn from, behind temperature and min-p.

    vLLM calls these argmax-invariant. See `TargetDistribution.edit`; None: there are none.
    """
    processors = of_user(metadata.logitsprocs.argmax_invariant)
    if metadata.all_greedy or not processors:
        return None
    nodes = node_paths(trees, torch.ones(len(trees.requests), dtype=torch.bool))
    paths = dict(zip(nodes.rows.tolist(), nodes.own_tokens(), strict=True))

    def edit(logits: Tensor, rows: Tensor, requests: Tensor) -> Tensor:
        # Rows of requests without trees are asked for and not read.
        of_rows = [paths.get(row, []) for row in rows.tolist()]
        run_on_nodes(processors, logits, requests.tolist(), of_rows, num_reqs)
        return logits

    return edit


def edits_logits(sampling_params: Any, num_outputs: int) -> bool:
    """Whether vLLM edits a request's logits before the temperature, after so many outputs."""
    p = sampling_params
    return bool(
        p.repetition_penalty != 1.0
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
        or p.bad_words_token_ids
        or p.logit_bias
        or p.allowed_token_ids is not None
        or p.min_tokens > num_outputs
    )


def _exclude_bad_words(
    logits: Tensor,
    nodes: NodePaths,
    metadata: SamplingMetadata,
    outputs: Mapping[int, NDArray[np.int32]],
) -> None:
    words = metadata.bad_words_token_ids
    if not words:
        return
    own = [(row, r) for row, r in enumerate(nodes.requests.tolist()) if r in words]
    paths = nodes.own_tokens()
    past: list[list[int]] = [[]] * len(paths)
    for row, request in own:
        past[row] = [*outputs[request].tolist(), *paths[row]]
    apply_bad_words(logits, {row: words[request] for row, request in own}, past)


def _keep_going(
    logits: Tensor, of_request: Tensor, nodes: NodePaths, params: Any, num_outputs: int
) -> None:
    """Excludes stop tokens below ``min_tokens``, unless a grammar allows no other, as vLLM."""
    if params.min_tokens <= num_outputs or not params.all_stop_token_ids:
        return
    short = of_request & (nodes.generated(num_outputs) < params.min_tokens)
    stops = torch.tensor(sorted(params.all_stop_token_ids))
    rows = short.nonzero()
    before = logits[rows, stops]
    logits[rows, stops] = float("-inf")
    if params.structured_outputs is not None:
        ends = logits[rows.squeeze(1)].isneginf().all(dim=1)
        logits[rows[ends], stops] = before[ends]


def _penalise(
    logits: Tensor,
    nodes: NodePaths,
    metadata: SamplingMetadata,
    outputs: Mapping[int, NDArray[np.int32]],
) -> Tensor:
    if metadata.no_penalties:
        return logits
    assert metadata.prompt_token_ids is not None
    nothing = logits.shape[1]  # vLLM's padding: one past the vocabulary
    longest = max(len(output) for output in outputs.values())
    committed = np.full((max(outputs) + 1, longest), nothing, dtype=np.int64)
    for index, output in outputs.items():
        committed[index, : len(output)] = output
    history = [
        torch.from_numpy(committed)[nodes.requests],
        torch.where(nodes.paths >= 0, nodes.paths, nothing),
    ]
    return apply_penalties(
        logits,
        metadata.prompt_token_ids[nodes.requests],
        torch.cat(history, dim=1),
        metadata.presence_penalties[nodes.requests],
        metadata.frequency_penalties[nodes.requests],
        metadata.repetition_penalties[nodes.requests],
    )
