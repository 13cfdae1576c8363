"""What nodes leave in recurrent layers, and the commit of accepted paths to their states."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sequoia_vllm.engine.runner.kv_commit import layers_by_cache
from sequoia_vllm.engine.v2.attention.recurrent_layers import (
    RecurrentTreeLayer,
    RecurrentTreeMetadata,
)
from sequoia_vllm.engine.v2.attention.scoring import ScoringTreesV2
from sequoia_vllm.kernels.recurrent_tree import (
    KeptNodes,
    RecurrentStates,
    ScoredNodes,
    commit_nodes,
)


class NodeStates:
    """The target's recurrent layers.

    Args:
        layers: By name, all of one shape; at least one.
        rows: The most nodes of a step, roots included.
    """

    def __init__(self, layers: dict[str, RecurrentTreeLayer], rows: int) -> None:
        self._layers = layers
        [shape] = {layer.shape for layer in layers.values()}
        [weight, *_] = [layer.convolution.weight for layer in layers.values()]
        self.kept = KeptNodes.empty(
            shape, len(weight), len(layers), rows, weight.dtype, weight.device
        )
        for place, layer in enumerate(layers.values()):
            layer.kept, layer.place = self.kept, place
        self._groups: list[tuple[str, RecurrentStates]] = []

    def commit(self, metadata: dict[str, Any], trees: ScoringTreesV2, accepted: Tensor) -> None:
        """Replays the accepted paths on all layers' states: at most two launches per cache group.

        Args:
            metadata: Each layer's metadata of this step.
            trees: This step's trees.
            accepted: int32 ``[R, D]``: accepted nodes by depth, then -1.
        """
        if not self._groups:
            self._groups = self._by_group(metadata)
        for name, states in self._groups:
            found = metadata[name]
            commit_nodes(
                states,
                self.kept,
                nodes=found.tree,
                accepted=accepted,
                context_lens=trees.context_lens,
                block_table=found.block_table,
                block_size=found.block_size,
            )

    def _by_group(self, metadata: dict[str, Any]) -> list[tuple[str, RecurrentStates]]:
        """The first layer of each cache group, and the states of all its layers."""
        inputs = {name: layer.last_inputs for name, layer in self._layers.items()}
        found = []
        for names in layers_by_cache(inputs, metadata):
            layers = [self._layers[name] for name in names]
            states = RecurrentStates.of(
                [layer.last_inputs for layer in layers],
                [state for layer in layers for state in layer.kv_cache[1:]],
                [layer.place for layer in layers],
            )
            found.append((names[0], states))
        return found


def scored_nodes(trees: ScoringTreesV2, metadata: RecurrentTreeMetadata) -> ScoredNodes:
    """The trees, as kernels read them; views of buffers that stay in place for CUDA graphs."""
    return ScoredNodes(
        cu_nodes=trees.query_start_loc,
        slots=trees.request_slots,
        parents=trees.parents,
        ancestors=trees.ancestors,
        depth=trees.depth,
        state_indices=metadata.state_indices[: trees.num_requests],
    )
