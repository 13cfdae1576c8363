# mypy: allow-untyped-defs
"""Penalties and bad words at tree nodes: each node by the tokens of its own path.

vLLM's kernels for these take the drafts before a row as its history, as in a chain. They read and
write the same otherwise.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.tree_shapes import rows_per_slot

_BLOCK = 2048
_NUM_WARPS = 8


def penalise_paths(logits: Tensor, rows: Any, state: Any, parents: Tensor) -> None:
    """Applies penalties in place; requests without any are left alone.

    Waits for nothing on the device.

    Args:
        logits: float32 ``[T, V]``: of tree nodes, those of a request in stored order.
        rows: vLLM's context: int32 or int64 ``[T]``, each row's request slot and its index in the
            tree; int32 ``[T]``, what the target read.
        state: vLLM's penalties by request slot, float32 ``[S]``; int32 ``[S, ceil(V / 32)]``, a
            bit for each token of the prompt; int32 ``[S, V]``, how often each token was
            generated, the root's included.
        parents: int32 ``[N]``, or ``[S, N]`` by slot: of each node; the root's is not read.
    """
    if not state.use_penalty[rows.idx_mapping_np].any():
        return
    count, vocabulary = logits.shape
    bits, counts = state.prompt_bin_mask, state.output_bin_counts
    penalise_paths_kernel[(count, triton.cdiv(vocabulary, _BLOCK))](
        logits, logits.stride(0), rows.expanded_idx_mapping, rows.expanded_local_pos,
        rows.input_ids, parents, rows_per_slot(parents, 1), state.repetition_penalty.gpu,
        state.frequency_penalty.gpu, state.presence_penalty.gpu,
        bits, bits.stride(0), counts, counts.stride(0), vocabulary,
        BLOCK=_BLOCK, num_warps=_NUM_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slot_rows"])
def penalise_paths_kernel(
    logits, logits_stride, slots, nodes, token_ids, parents, slot_rows,
    repetition, frequency, presence,
    prompt_bits, bits_stride, output_counts, counts_stride, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row and a block of the vocabulary per program. Arguments as in `penalise_paths`."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    parents += slot * slot_rows
    repeated = tl.load(repetition + slot)
    by_count = tl.load(frequency + slot)
    once = tl.load(presence + slot)
    if (repeated == 1.0) & (by_count == 0.0) & (once == 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    counts = tl.load(output_counts + slot * counts_stride + token, mask=inside, other=0)
    node = tl.load(nodes + row).to(tl.int32)
    root = row - node
    while node > 0:
        counts += (token == tl.load(token_ids + root + node)).to(tl.int32)
        node = tl.load(parents + node).to(tl.int32)
    generated = counts > 0
    words = tl.load(prompt_bits + slot * bits_stride + token // 32, mask=inside, other=0)
    seen = generated | (((words >> (token % 32)) & 1) == 1)
    values = tl.load(logits + row * logits_stride + token, mask=inside, other=0.0)
    scale = tl.where(seen, repeated, 1.0)
    values *= tl.where(values > 0, 1.0 / scale, scale)
    values -= by_count * counts
    values -= once * generated
    tl.store(logits + row * logits_stride + token, values, mask=inside)


def exclude_bad_words(logits: Tensor, rows: Any, state: Any, parents: Tensor) -> None:
    """Sets tokens to -inf, in place, that would complete a bad word on a node's path.

    Waits for nothing on the device.

    Args:
        logits, rows, parents: As in `penalise_paths`.
        state: vLLM's bad words: int32 ``[S, ...]``, the tokens of all of each request slot, and
            where each word begins and the last one ends; int32 ``[S]``, how many. Of the requests,
            int32 ``[S, L]``: prompt, then what was generated, the root included; int32 ``[S]``:
            the length of the prompt, and of both.
    """
    most_words = int(state.num_bad_words.np[rows.idx_mapping_np].max())
    if most_words == 0:
        return
    words, offsets = state.bad_word_token_ids.gpu, state.bad_word_offsets.gpu
    requests = state.req_states
    tokens = requests.all_token_ids.gpu
    exclude_bad_words_kernel[(len(logits), most_words)](
        logits, logits.stride(0), rows.expanded_idx_mapping, rows.expanded_local_pos,
        rows.input_ids, parents, rows_per_slot(parents, 1), words, words.stride(0),
        offsets, offsets.stride(0), state.num_bad_words.gpu, tokens, tokens.stride(0),
        requests.prompt_len.gpu, requests.total_len.gpu, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slot_rows"])
def exclude_bad_words_kernel(
    logits, logits_stride, slots, nodes, token_ids, parents, slot_rows, words, words_stride,
    offsets, offsets_stride, num_words, all_tokens, tokens_stride, prompt_lens, total_lens,
):  # fmt: skip
    """A row and a bad word per program. Arguments as in `exclude_bad_words`."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if word >= tl.load(num_words + slot):
        return
    parents += slot * slot_rows
    start = tl.load(offsets + slot * offsets_stride + word)
    last = tl.load(offsets + slot * offsets_stride + word + 1) - 1
    prompt = tl.load(prompt_lens + slot)
    committed = tl.load(total_lens + slot)  # what follows in the path's order, backwards
    node = tl.load(nodes + row).to(tl.int32)
    root = row - node
    matches = 1
    position = last - 1
    while position >= start:
        on_path = node > 0
        committed = tl.where(on_path, committed, committed - 1)
        drafted = tl.load(token_ids + root + node, mask=on_path, other=-1)
        earlier = tl.load(
            all_tokens + slot * tokens_stride + committed,
            mask=(node <= 0) & (committed >= prompt),
            other=-1,
        )
        expected = tl.load(words + slot * words_stride + position)
        matches = matches & (tl.where(on_path, drafted, earlier) == expected).to(tl.int32)
        node = tl.where(on_path, tl.load(parents + node, mask=on_path, other=0).to(tl.int32), 0)
        position -= 1
    if matches == 1:
        excluded = tl.load(words + slot * words_stride + last)
        tl.store(logits + row * logits_stride + excluded, float("-inf"))
