"""Layout of vLLM's CPU KV cache for the instruction sets "vec" and "vec16".

One layer's cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
Within a block and head the first half of the memory holds the keys
*transposed*, ``[head_size, block_size]``, the second half the values,
``[block_size, head_size]``. A test checks this against vLLM's own
cache-update op for every dtype and head size.
"""

from torch import Tensor

SUPPORTED_ISA = ("vec", "vec16")


def keys_and_values(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of one layer's cache by token: both ``[num_blocks, heads, block_size, head_size]``."""
    num_blocks, num_heads, block_size, twice_head_size = kv_cache.shape
    head_size = twice_head_size // 2
    halves = kv_cache.view(num_blocks, num_heads, 2, block_size * head_size)
    keys = halves[:, :, 0].unflatten(-1, (head_size, block_size)).transpose(-1, -2)
    values = halves[:, :, 1].unflatten(-1, (block_size, head_size))
    return keys, values


def gather_context(kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of whole requests, in slot order.

    Args:
        block_table: int ``[B, blocks]``: the blocks to read, per request.

    Returns two ``[B, heads, blocks * block_size, head_size]`` copies.
    """
    batch, num_blocks = block_table.shape
    blocks = block_table.reshape(-1).long()

    def gather(tokens: Tensor) -> Tensor:
        gathered = tokens.index_select(0, blocks).unflatten(0, (batch, num_blocks))
        return gathered.transpose(1, 2).flatten(2, 3)

    keys, values = keys_and_values(kv_cache)
    return gather(keys), gather(values)


def move_tokens(kv_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copies tokens' keys and values between slots of one layer's cache, in place.

    Args:
        source_slots, target_slots: int64 ``[M]``; target slots are distinct.
            A slot may be both source and target: all reads come first.
    """
    block_size = kv_cache.shape[2]
    source_block, source_offset = source_slots // block_size, source_slots % block_size
    target_block, target_offset = target_slots // block_size, target_slots % block_size
    for tokens in keys_and_values(kv_cache):
        tokens[target_block, :, target_offset] = tokens[source_block, :, source_offset]
