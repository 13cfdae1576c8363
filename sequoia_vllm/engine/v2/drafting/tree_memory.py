"""Device memory that grows with trees: the draft's Q, the target's logits, grammar masks."""

import logging
from collections.abc import Sequence

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from sequoia_vllm.config import ConfigError
from sequoia_vllm.drafting.draft_plan import DraftPlan, inner_nodes
from sequoia_vllm.drafting.drafted_trees import DraftedTrees
from sequoia_vllm.tree import TokenTree

logger = logging.getLogger("vllm.sequoia")

_GIB = 1 << 30
_WORTH_SAYING = _GIB


def allocate_drafted(
    plan: DraftPlan,
    tree: TokenTree,
    max_num_reqs: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftedTrees:
    """Allocates the trees of the largest batch, with draft logits of this size and dtype.
    It refuses a batch for which the device has too little memory, and says how to need less."""
    rows = plan.logits_rows
    size = rows * vocab_size * dtype.itemsize
    if size >= _WORTH_SAYING:
        logger.info(
            "Sequoia: the draft's distributions at %d nodes with children take %.1f GiB of the "
            "device", rows, size / _GIB,
        )  # fmt: skip
    try:
        return DraftedTrees.empty(
            max_num_reqs, rows, inner_nodes(tree), tree.size, vocab_size, dtype, device
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a batch's trees have {rows} nodes with children, and the draft's distributions there "
            f"take {size / _GIB:.1f} GiB, more than the device has left: lower max_num_seqs "
            f"({max_num_reqs}), or draft less where batches are large "
            "(num_speculative_tokens_per_batch_size)"
        ) from error


def log_added(target: ModelConfig, drafts: int, rows: int, kept_bytes: int) -> None:
    """Logs what trees add to the target's memory. vLLM counts all of it in its profile.

    Args:
        drafts: Most drafts of a request: keys and values, or latents, of as many tokens.
        rows: See `most_scored`.
        kept_bytes: Memory for what nodes leave in recurrent layers; 0: there are none.
    """
    row_bytes = target.get_vocab_size() * target.head_dtype.itemsize
    logger.info(
        "Sequoia: trees add to the target's memory: %d tokens in the KV cache of each request, "
        "%.2f GiB for the logits of %d nodes%s", drafts, rows * row_bytes / _GIB, rows,
        f", {kept_bytes / _GIB:.2f} GiB for nodes in recurrent layers" if kept_bytes else "",
    )  # fmt: skip


def most_scored(drafts_by_batch: Sequence[int], largest_tree: int, most_tokens: int) -> int:
    """The most nodes of all trees of a step, roots included.

    Args:
        drafts_by_batch: Drafts per request of batches of 1, 2, ... requests.
        largest_tree: Nodes of the engine's tree; in the warm-up one request has all of them.
        most_tokens: Most tokens of a step.
    """
    by_batch = enumerate(drafts_by_batch, start=1)
    most = max(batch * (drafts + 1) for batch, drafts in by_batch)
    return min(max(most, largest_tree), most_tokens)


def most_masked(scored: int, max_num_reqs: int, most_tokens: int) -> int:
    """The most nodes of a step with a grammar's mask: requests without drafts add a root each."""
    return min(scored + max_num_reqs, most_tokens)


def take_logits_memory(
    rows: int,
    largest_tree: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    capped: bool = False,
) -> None:
    """Allocates and frees the memory of a step's target logits, for memory profiling.

    vLLM's own profile has logits at only one token per request.

    Args:
        rows: See `most_scored`.
        largest_tree: Nodes of the largest tree, which are edited together, as a float32 copy.
        capped: True if the target has a soft cap, which needs a second copy of the logits.
    """
    edited = min(rows, max(largest_tree, get_max_chunk_logits(vocab_size)))
    logits = torch.empty(rows, vocab_size, dtype=dtype, device=device)
    if capped:
        torch.empty(rows, vocab_size, dtype=dtype, device=device)
    copy = torch.empty(edited, vocab_size, dtype=torch.float32, device=device)
    del logits, copy


def has_soft_cap(target: torch.nn.Module) -> bool:
    """Whether a target has a soft cap on its logits (Gemma 2)."""
    heads = (module for module in target.modules() if isinstance(module, LogitsProcessor))
    return any(head.soft_cap is not None for head in heads)
