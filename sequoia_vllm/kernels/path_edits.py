# mypy: allow-untyped-defs
"""Penalties and bad words at tree nodes: each node by the tokens of its own path.

vLLM's kernels for these take the drafts before a row as its history, as in a chain. They read and
write the same otherwise.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sequoia_vllm.kernels.tree_shapes import rows_per_slot

_BLOCK = 2048
_NUM_WARPS = 8


@dataclass(frozen=True)
class NodeRows:
    """The T rows of logits of tree nodes, those of a request in stored order."""

    slots: Tensor  # int32 or int64 ``[T]``: request slot of each row
    nodes: Tensor  # int32 or int64 ``[T]``: its index in the tree
    token_ids: Tensor  # int32 ``[T]``: what the target read in each row
    parents: Tensor  # int32 ``[N]``, or ``[S, N]`` by slot: of each node; the root's is not read


def penalise_paths(
    logits: Tensor,
    rows: NodeRows,
    *,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    prompt_bits: Tensor,
    output_counts: Tensor,
) -> None:
    """Applies penalties in place; requests without any are left alone.

    Waits for nothing on the device.

    Args:
        logits: float32 ``[T, V]``.
        repetition, frequency, presence: float32 ``[S]``: penalties by request slot.
        prompt_bits: int32 ``[S, ceil(V / 32)]``: a bit for each token of the prompt.
        output_counts: int32 ``[S, V]``: how often each token was generated, the root's included.
    """
    count, vocabulary = logits.shape
    penalise_paths_kernel[(count, triton.cdiv(vocabulary, _BLOCK))](
        logits, logits.stride(0), rows.slots, rows.nodes, rows.token_ids, rows.parents,
        rows_per_slot(rows.parents, 1), repetition, frequency, presence,
        prompt_bits, prompt_bits.stride(0), output_counts, output_counts.stride(0), vocabulary,
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


def exclude_bad_words(
    logits: Tensor,
    rows: NodeRows,
    *,
    words: Tensor,
    offsets: Tensor,
    num_words: Tensor,
    most_words: int,
    all_tokens: Tensor,
    prompt_lens: Tensor,
    total_lens: Tensor,
) -> None:
    """Sets tokens to -inf, in place, that would complete a bad word on a node's path.

    Waits for nothing on the device.

    Args:
        logits: float32 ``[T, V]``.
        words: int32 ``[S, ...]``: the tokens of all bad words of each request slot.
        offsets: int32 ``[S, ...]``: where each word begins, and the last one ends.
        num_words: int32 ``[S]``.
        most_words: No request has more bad words.
        all_tokens: int32 ``[S, L]``: prompt, then what was generated, the root included.
        prompt_lens, total_lens: int32 ``[S]``.
    """
    exclude_bad_words_kernel[(len(logits), most_words)](
        logits, logits.stride(0), rows.slots, rows.nodes, rows.token_ids, rows.parents,
        rows_per_slot(rows.parents, 1), words, words.stride(0), offsets, offsets.stride(0),
        num_words, all_tokens, all_tokens.stride(0), prompt_lens, total_lens, num_warps=1,
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
