"""Divides tree attention: the tile of one program, and the splits of a context."""

from dataclasses import dataclass
from functools import cache

import triton

MAX_ROWS = 128
# Rows of one matrix product must be at least as many as the tensor cores take.
_MIN_ROWS = 16
# A split costs a merge, so it gets at least this many positions to be worth it.
MIN_POSITIONS_PER_SPLIT = 256
# Hopper, and Blackwell for data centres: their tensor cores read operands from shared memory. All
# others take them from registers, consumer Blackwell (12.x) too. Among those, 8.6, 8.9 and 12.x
# have 99 KB of shared memory at most.
_READ_SHARED_MEMORY = range(90, 120)
HOPPER = 90
# Registers of a thread. The compiler is told so where it would spill a few to fit one more
# program on a processor than `choose_splits` plans for.
_ALL_REGISTERS = 255


@dataclass(frozen=True)
class Tile:
    """The tile of one program, and how the program is compiled."""

    rows: int  # pairs of node and query head
    keys: int  # positions taken at once
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; None leaves it to the compiler


@cache  # steps that also read a prompt ask in every layer, while the device waits
def choose_tile(
    rows: int,
    head_size: int,
    element_size: int,
    capability: int,
    quantized: bool = False,
    windowed: bool = False,
    latent: bool = False,
) -> Tile:
    """The tile for requests of up to ``rows`` rows.

    Args:
        rows: Nodes times query heads per key head.
        head_size: D.
        element_size: Bytes of a query element.
        capability: Compute capability of the device, times ten.
        latent: Whether keys have more channels than values.
    """
    rows = min(MAX_ROWS, max(_MIN_ROWS, triton.next_power_of_2(rows)))
    padded_head_size = triton.next_power_of_2(head_size)
    if element_size == 4:
        # No tensor cores in full precision: products run in registers, which
        # larger tiles would exhaust.
        registers = _ALL_REGISTERS if padded_head_size == 128 else None
        warps = 8 if padded_head_size > 256 else 4
        return Tile(16, 16, num_warps=warps, num_stages=2, max_registers=registers)
    if padded_head_size > 256:  # Gemma 4's layers without a window, and MLA
        registers = _ALL_REGISTERS if latent else None
        return Tile(min(rows, 32), 32, num_warps=8, num_stages=2, max_registers=registers)
    # The output stays in registers, and so do queries that are not read elsewhere and
    # keys in fp8, which are converted there.
    in_registers = quantized or capability not in _READ_SHARED_MEMORY
    if in_registers and padded_head_size > 128:
        rows = min(rows, 32)
    elif windowed and padded_head_size > (64 if in_registers else 128):
        rows = min(rows, 64)  # the beginnings of the rows' windows take registers, too
    output_size = rows * padded_head_size
    wide = rows > 64 or output_size > 64 * 128
    wide |= windowed and (rows, padded_head_size) == (64, 128)
    # 64 positions fill the tensor cores; fewer where registers or shared memory end,
    # more where a block has few bytes.
    full = in_registers and output_size >= 64 * 128
    keys = 32 if full or padded_head_size > 128 else 64 if output_size > 16 * 64 else 128
    blackwell = not in_registers and capability > HOPPER
    spills = (blackwell and padded_head_size <= 64 <= rows) or (windowed and keys == 128) or latent
    registers = _ALL_REGISTERS if spills else None
    # Three stages. While one block is computed, the next one's keys and values are on their way,
    # and the block table's entries for the one after.
    return Tile(rows, keys, 8 if wide else 4, num_stages=3, max_registers=registers)


def choose_splits(units: int, tile: Tile, processors: int, max_positions: int) -> int:
    """Splits of each context, as many as the processors can run at once.

    Args:
        units: Programs that there are without splits.
        max_positions: Bound on the positions of a request.
    """
    # Eight warps take a processor's registers; of four, two programs are there at a
    # time. Either way a processor has at most `MAX_ROWS` rows.
    programs = processors * (1 if tile.num_warps == 8 else 2)
    return max(1, min(programs // units, -(-max_positions // MIN_POSITIONS_PER_SPLIT)))
