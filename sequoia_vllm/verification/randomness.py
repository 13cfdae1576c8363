"""Uniform random numbers from one stream, or from one stream per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from sequoia_vllm.verification.topology import Topology

Generators: TypeAlias = torch.Generator | Sequence[torch.Generator | None] | None
"""One generator for everything, one per row (None in the list: a row without a
seed of its own), or None for torch's default generator. Generators live on the
device of the tensors they fill."""


def fill_uniform(values: Tensor, generators: Generators) -> Tensor:
    """Overwrites ``values`` with U[0, 1) and returns it.

    Args:
        values: ``[R, M]``, floating point.
        generators: Where the numbers come from. A row with its own generator
            gets the same numbers whatever the other rows are; consecutive rows
            with the same generator are filled together.

    Raises:
        ValueError: If a list of generators has not one entry per row.
    """
    if generators is None or isinstance(generators, torch.Generator):
        return values.uniform_(generator=generators)
    _check_one_per_row(generators, values.shape[0])
    _fill_unseeded(values, generators)
    for start, stop, generator in _runs(generators):
        values[start:stop].uniform_(generator=generator)
    return values


def fill_uniform_prefixes(values: Tensor, lengths: Sequence[int], generators: Generators) -> Tensor:
    """Fills a batch like `fill_uniform`, but a row's own generator fills only its first numbers.

    A row so takes from its generator what it needs, not what the longest row
    of the batch needs; the rest of the row is unspecified.

    Args:
        values: ``[R, M]``, floating point.
        lengths: How many numbers each row takes from its own generator.
        generators: Where the numbers come from.

    Raises:
        ValueError: If a list of generators has not one entry per row.
    """
    if generators is None or isinstance(generators, torch.Generator):
        return values.uniform_(generator=generators)
    _check_one_per_row(generators, values.shape[0])
    _fill_unseeded(values, generators)
    for row, (length, generator) in enumerate(zip(lengths, generators, strict=True)):
        if generator is not None:
            values[row, :length].uniform_(generator=generator)
    return values


def node_uniforms(shape: torch.Size, topology: Topology, generators: Generators) -> Tensor:
    """The numbers that verifiers decide by, one per node of each request's tree.

    Args:
        shape: ``[B, N+1]``.
        topology: The trees.
        generators: See `fill_uniform_prefixes`; a row takes as many numbers as its tree has nodes.

    Returns:
        float64 ``[B, N+1]``; beyond a request's tree anything.

    Raises:
        ValueError: If a list of generators has not one entry per request.
    """
    uniforms = torch.empty(shape, dtype=torch.float64, device=topology.children.device)
    return fill_uniform_prefixes(uniforms, topology.sizes, generators)


def _check_one_per_row(generators: Sequence[torch.Generator | None], rows: int) -> None:
    if len(generators) != rows:
        raise ValueError(f"{len(generators)} generators for {rows} rows: one per row is needed")


def _fill_unseeded(values: Tensor, generators: Sequence[torch.Generator | None]) -> None:
    # One call for all of them; the rows with a generator are overwritten after.
    if any(generator is None for generator in generators):
        values.uniform_()


def _runs(
    generators: Sequence[torch.Generator | None],
) -> Iterator[tuple[int, int, torch.Generator]]:
    start = 0
    for _, group in groupby(generators, key=id):
        run = list(group)
        if run[0] is not None:
            yield start, start + len(run), run[0]
        start += len(run)
