"""What kinds of drafters differ in on Model Runner V2: how one is loaded, and how it runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader, set_offloader
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from sequoia_vllm.drafting.growth import DraftModel, DraftQueries, DraftStates, TreeGrowth
from sequoia_vllm.engine.runner.attention_layers import freed_behind
from sequoia_vllm.engine.v2.attention.scoring import TreeBackend
from sequoia_vllm.kernels.draft_inputs import DraftInputs, PagedTables
from sequoia_vllm.tree import TokenTree


@dataclass(frozen=True)
class DraftCache:
    """The draft's part of the paged KV cache."""

    block_tables: BlockTables  # vLLM's, gathered for the batch by the target's pass
    groups: dict[str, int]  # index of the cache group of each draft layer
    block_sizes: dict[int, int]  # tokens per block, by group
    windows: dict[int, int]  # sliding window in tokens, by group; groups without one are absent
    has_latents: bool = False  # whether its layers keep latents (MLA), not keys and values

    @classmethod
    def of(
        cls,
        block_tables: BlockTables,
        kv_cache_config: KVCacheConfig,
        layers: set[str],
        depth: int,
    ) -> DraftCache:
        """The part of vLLM's cache that these layers of the draft have.

        Raises:
            ValueError: A sliding window is too short for trees of this depth.
        """
        by_index = kv_cache_config.kv_cache_groups
        groups = {
            name: index
            for index, group in enumerate(by_index)
            for name in group.layer_names
            if name in layers
        }
        specs = {index: by_index[index].kv_cache_spec for index in groups.values()}
        windows = {i: w for i, spec in specs.items() if (w := freed_behind(spec)) is not None}
        if windows and min(windows.values()) <= depth + 1:
            raise ValueError(
                f"the draft has a sliding window of {min(windows.values())} tokens, too few for a "
                f"tree of depth {depth}: choose a shallower tree"
            )
        sizes = {index: spec.block_size for index, spec in specs.items()}
        by_layer = (
            getattr(specs[index], "kv_cache_specs", {}).get(name, specs[index])
            for name, index in groups.items()
        )
        has_latents = any(isinstance(spec, MLAAttentionSpec) for spec in by_layer)
        return cls(block_tables, groups, sizes, windows, has_latents)

    def by_layer(self, slots: Tensor) -> dict[str, Tensor]:
        """Each draft layer's row of ``slots``."""
        return {name: slots[group] for name, group in self.groups.items()}

    def inputs(self, rows: int, all_token_ids: Tensor, longest: int) -> DraftInputs:
        """Buffers for passes of up to so many rows; arguments as of `DraftInputs`."""
        tables, sizes = self.block_tables.input_block_tables, self.block_tables.block_sizes
        paged = PagedTables.of(tables, sizes, self.windows)
        return DraftInputs.empty(paged, rows, all_token_ids, longest)


@dataclass(frozen=True)
class DraftPass:
    """One forward pass of a draft over rows of the target's tokens."""

    token_ids: Tensor  # int32 ``[rows]``
    positions: Tensor  # int64 ``[rows]``
    states: Tensor | None = None  # see `DraftQueries.recurrent_states`
    metadata: dict[str, Any] | None = None  # attention metadata by layer; None in dummy runs
    slots: dict[str, Tensor] | None = None  # likewise


class TreeDrafter(DraftModel):
    """One kind of draft: loaded with vLLM's speculator (`chains`), and run by growth."""

    reads_states: ClassVar[bool] = False
    """Whether it reads the target's hidden states, and so reads in every step."""
    model: Any  # vLLM's, once it is loaded
    cache: DraftCache  # the draft's KV cache, once there is one
    least_rows = 1  # of a request in its widest pass, however small its tree
    only_keys = False  # true while nothing grows from what is read
    images: Any = None  # `ImageRows` that the next pass reads in place of tokens; None: none

    def __init__(self, chains: DraftModelSpeculator, tree: TokenTree, backend: TreeBackend) -> None:
        self.chains: Any = chains
        self.tree = tree
        self.backend = backend
        self.vocab_size = chains.vllm_config.model_config.get_vocab_size()

    @property
    def queries_per_request(self) -> int:
        """Queries for which vLLM leaves room in the draft's batch, known once it is loaded."""
        return int(self.chains.num_query_per_req)

    def load(self, target_model: torch.nn.Module, target_layers: set[str]) -> torch.nn.Module:
        """Loads the draft onto the device; ``target_layers`` names the target's attention."""
        with nothing_offloaded():
            self.model = self.chains.load_draft_model(target_model, target_layers)
        return self.model

    def allocate(self, target_model: torch.nn.Module) -> None:
        """Allocates what it needs on the device besides the loaded model."""

    def note_adapters(self, slots: NDArray[np.int32], adapters: NDArray[np.int32]) -> None:
        """Notes ids of the LoRA adapters of a step's requests, by slot; 0: none."""

    def new_growth(self, **shared: Any) -> TreeGrowth:
        """Makes the `TreeGrowth`; ``shared`` has all arguments except the model."""
        return TreeGrowth(**shared, model=self)

    @abstractmethod
    def run(self, rows: DraftPass) -> DraftStates:
        """Runs one pass, see `DraftModel.forward`."""

    def forward(self, queries: DraftQueries) -> DraftStates:
        """See `DraftModel.forward`."""
        metadata = self.metadata_of(queries, self.cache.groups)
        by_layer = self.cache.by_layer(queries.slots)
        tokens, states = queries.token_ids, queries.recurrent_states
        return self.run(DraftPass(tokens, queries.positions, states, metadata, by_layer))

    def metadata_of(self, queries: DraftQueries, groups: dict[str, int]) -> dict[str, Any]:
        """Attention metadata by layer; layers of one cache group share theirs."""
        tables = self.cache.block_tables.input_block_tables
        num_reqs, slots = len(queries.context_lens), queries.slots
        by_group = {
            group: self.backend.draft_metadata(queries, tables[group][:num_reqs], slots[group])
            for group in set(groups.values())
        }
        return {name: by_group[group] for name, group in groups.items()}

    @torch.inference_mode()
    def run_model(self, rows: DraftPass, **inputs: Any) -> Any:
        """Runs vLLM's model in its forward context; ``inputs`` are those besides tokens."""
        number = len(rows.token_ids)
        with set_forward_context(
            rows.metadata,
            self.chains.vllm_config,
            num_tokens=number,
            slot_mapping=rows.slots,
            batch_descriptor=BatchDescriptor(num_tokens=number),
        ):
            return self.model(input_ids=rows.token_ids, positions=rows.positions, **inputs)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The draft's logits ``[rows, V]`` over the target's vocabulary."""
        return self.model.compute_logits(hidden)


class HeadDrafter(TreeDrafter):
    """A head: it reads the target's hidden states of some layers beside tokens."""

    reads_states = True

    def layers_read(self, target_model: torch.nn.Module) -> int:
        """Number of the target's layers whose states the head reads."""
        layers = get_eagle3_aux_layers_from_config(self.chains.speculative_config)
        if layers is None:
            layers = target_model.get_eagle3_default_aux_hidden_state_layers()
        return len(layers)

    def states_read(self, last: Tensor, auxiliary: list[Tensor] | None) -> list[Tensor]:
        """The step's states ``[T, H]`` that the head reads, by layer."""
        assert auxiliary, "vLLM gives heads the target's auxiliary states"
        return auxiliary

    def combine_hidden_states(self, target_states: Tensor) -> Tensor:
        """Combines the states of several layers into one of the head's width."""
        return self.model.combine_hidden_states(target_states)


@contextmanager
def nothing_offloaded() -> Iterator[None]:
    """Keeps models built in the block on the device; then restores the engine's offloader.

    One offloader serves a whole process. Reading the draft from host memory at every level would
    cost more than it saves. Also, vLLM's prefetch backend takes only one model's layers.
    """
    offloader = get_offloader()
    set_offloader(NoopOffloader())
    try:
        yield
    finally:
        set_offloader(offloader)


class TextDrafter(TreeDrafter):
    """A draft without a model: it runs no passes, and reads the target's logits.

    Its `new_growth` grows trees without passes. What it predicts may depend on the target's logits
    and on committed text, but not on other nodes: else a tree has not the law it is verified
    against.
    """

    def load(self, target_model: torch.nn.Module, target_layers: set[str]) -> torch.nn.Module:
        """Loads nothing; see `TreeDrafter.load`."""
        return torch.nn.Module()

    def run(self, rows: DraftPass) -> DraftStates:
        """Is not called: there are no passes."""
        raise NotImplementedError

    @abstractmethod
    def learn(self, tokens: Tensor, logits: Tensor, slots: Tensor) -> None:
        """Takes the target's logits ``[R, V]`` after tokens int32 ``[R]``, not to be changed.

        Args:
            slots: int32 ``[R]``: the slot of each row's request.
        """
