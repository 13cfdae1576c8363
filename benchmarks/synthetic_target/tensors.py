"""Tensors of a synthetic target, from those of its source.

The hidden size is ``times`` that of the source, and holds as many copies of its residual stream. So
norms divide by the same numbers. Projections read the first copy. Their added columns come in pairs
of opposite sign, which read equal copies and cancel; one copy that is left over meets zeros. The
final norm keeps the first copy alone.
"""

import math
from dataclasses import dataclass, field

import torch

_INITIAL_STD = 0.02
_POOL = (1 << 22) + 15  # odd: no two rows of a matrix begin alike
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj")
# These are added to the residual stream: zero in added layers.
_ATTENTION_OUTPUT, _MLP_OUTPUT = _OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
_OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")


def is_of_width(part: str) -> bool:
    """Whether a layer's tensor grows with the MLP's width."""
    return part.startswith(_MLP) or part == f"{_MLP_OUTPUT}.weight"


@dataclass(frozen=True)
class Growth:
    """How tensors grow: the hidden size and the heads are so many times the source's."""

    times: int
    width: int
    _pools: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False)

    def size(self, part: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """The size of a layer's tensor whose size in the source is ``own``."""
        if part.startswith(_OF_HEADS):
            return own
        rows = self.width if part.startswith(_MLP) else own[0] * self.times
        if len(own) == 1:
            return (rows,)
        return rows, self.width if part.startswith(_MLP_OUTPUT) else own[1] * self.times

    def outside(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The same of a tensor outside of the layers: embeddings, output layer, final norm."""
        return *own[:-1], own[-1] * self.times

    def grown_outside(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor outside of the layers."""
        if name != "model.norm.weight":
            return tensor.repeat(1, self.times)
        return torch.cat([tensor, tensor.new_zeros(len(tensor) * (self.times - 1))])

    def grown(self, part: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of one of the source's layers."""
        size = self.size(part, tuple(tensor.shape))
        if tensor.shape == size:
            return tensor
        if part.startswith(_OUTPUTS):
            if tensor.dim() == 1:
                return tensor.repeat(self.times)
            padded = tensor.new_zeros(len(tensor), size[1])
            padded[:, : tensor.shape[1]] = tensor
            return padded.repeat(self.times, 1)
        if not part.startswith(_ATTENTION + _MLP):
            return tensor.repeat(self.times)
        if tensor.dim() == 1:
            return torch.cat([tensor, tensor.new_zeros(size[0] - len(tensor))])
        rows = self.random((size[0] - len(tensor), tensor.shape[1]), tensor.dtype)
        return self.reading_first(torch.cat([tensor, rows]))

    def reading_first(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix with columns for all copies of what it reads; the first alone counts."""
        rows, columns = matrix.shape
        pairs, odd = divmod(self.times - 1, 2)
        read = self.random((rows, columns * pairs), matrix.dtype)
        return torch.cat([matrix, read, -read, matrix.new_zeros(rows, columns * odd)], dim=1)

    def added(self, part: str, own: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of an added layer, which adds nothing to the residual stream."""
        size = self.size(part, own)
        if part.startswith(_OUTPUTS) or part.endswith(".bias"):
            return torch.zeros(size, dtype=dtype)
        return torch.ones(size, dtype=dtype) if "norm" in part else self.random(size, dtype)

    def random(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Repeats a pool of 4 million normal numbers: drawing billions would take minutes."""
        if dtype not in self._pools:
            pool = torch.empty(_POOL).normal_(
                0, _INITIAL_STD, generator=torch.Generator().manual_seed(0)
            )
            self._pools[dtype] = pool.to(dtype)
        pool, count = self._pools[dtype], math.prod(size)
        return pool.repeat(-(-count // _POOL))[:count].view(size)
