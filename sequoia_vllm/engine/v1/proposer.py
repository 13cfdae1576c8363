"""The proposer of the V1 runner: the draft model grows a token tree for each request."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import supports_multimodal
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from sequoia_vllm.attention.cpu_kernel import PACKED_ISA, TreeQueries, clear_tokens
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.drafting.dynamic_trees import DynamicGrowth, SharedNodes
from sequoia_vllm.drafting.tree_tables import DraftLevels
from sequoia_vllm.engine.common.cluster import as_alone
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.runner.attention_layers import freed_behind
from sequoia_vllm.engine.runner.cpu_attention import CPUTreeAttentionMetadata
from sequoia_vllm.engine.runner.tensor_parallel import take_from_rank0
from sequoia_vllm.engine.v1.draft_progress import CommittedTokens
from sequoia_vllm.engine.v1.foretelling import ForetoldTexts
from sequoia_vllm.step.grow import (
    DraftSampling,
    GrownTrees,
    LogitsAt,
    grow,
    grow_dynamic,
    grow_told,
)


class TextDrafterV1(ABC):
    """A draft without a model on the V1 runner: it runs no passes, and reads the target's logits.

    What it predicts may depend on these, but not on other nodes: see `TextDrafter`.
    """

    @abstractmethod
    def prepare(self, vllm_config: VllmConfig) -> None:
        """Allocates what it needs."""

    @abstractmethod
    def learn(self, tokens: Tensor, logits: Tensor, adapters: NDArray[np.int64]) -> None:
        """Takes the target's logits ``[R, V]`` after tokens int32 ``[R]`` of one step.

        ``adapters [R]``: id of the LoRA adapter of each row's request; 0: none.
        """

    @abstractmethod
    def logits(self, tokens: Tensor, adapters: NDArray[np.int64]) -> Tensor:
        """Logits ``[R, V]`` after tokens int64 ``[R]``; ``adapters`` as in `learn`."""


PADDING_SLOT = -1  # vLLM's cache-update op skips it


@dataclass(frozen=True)
class RootsV1:
    """The roots of B requests' trees, which grow together."""

    requests: NDArray[np.int64]  # int64 ``[B]``: indices of the requests in the batch
    tokens: Tensor  # int64 ``[B]``
    positions: NDArray[np.int64]  # int64 ``[B]``
    logits: Tensor  # ``[B, V]``: the draft's


@dataclass(frozen=True)
class _BelowRoots:
    """Where the draft reads nodes of B trees: the roots and what lies behind them in the cache."""

    positions: Tensor  # int64 ``[B]``: of the roots
    last: int  # the largest of them
    room: Tensor  # int64 ``[B]``: nodes that the model's length leaves, roots included
    slots: Tensor  # int64 ``[B, N]``: of the nodes that the draft reads
    block_table: Tensor  # int32 ``[B, max_blocks]``


class DrafterV1(ABC):
    """One kind of draft on the V1 runner: how it is loaded, and what it predicts."""

    @abstractmethod
    def load(self, chains: DraftModelProposer) -> torch.nn.Module:
        """Loads the draft; ``chains`` is vLLM's proposer, which can load models."""

    @abstractmethod
    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """Runs a pass in vLLM's forward context.

        Args:
            tokens: int32 ``[T]``: ids of the target's.
            positions: int64 ``[T]``.
            rows: int64 ``[R]``: the rows whose logits are asked for; None: all.

        Returns:
            Logits ``[R, V]`` of the target's tokens.
        """


class WithoutModel(torch.nn.Module):
    """In the place of vLLM's model where nothing is loaded."""

    def forward(self, **inputs: Any) -> None:
        """Does nothing: vLLM's warm-up runs it."""


class TreeProposerV1(DraftModelProposer):
    """Grows trees with vLLM's draft-model proposer (loading, KV cache, compilation).

    Instead of `propose`, the runner calls `advance`, which reads the committed tokens, and `grow`,
    which runs the draft over each further level's nodes with children. Later steps overwrite the
    keys and values that `grow` writes.
    """

    has_failed = False  # true once the draft has failed: the engine drafts no more

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config=as_alone(vllm_config), device=device, runner=runner)
        self.runner = runner
        self.draft_max_len = self.draft_model_config.max_model_len
        settings = SequoiaSettings.of(vllm_config)
        self.max_drafts = settings.tree.num_speculative_tokens  # lowered by measuring tools
        kind = drafter(settings.drafter)
        assert kind.on_v1 is not None, f"{kind.name} needs vLLM's Model Runner V2"
        self.drafter: DrafterV1 | TextDrafterV1 = resolve_name(kind.on_v1)()
        self._rows = torch.arange(runner.max_num_tokens)
        self.foretold = ForetoldTexts(
            runner.max_num_reqs, settings.tree.depth, settings.retrieval,
            vllm_config.model_config.get_vocab_size(),
        )  # fmt: skip

    # Until: vLLM asks whether a draft has layers that would read M-RoPE's positions.
    def _raise_if_mrope(self) -> None:
        """Calls vLLM's where a model drafts: without one, the draft's configuration is the
        target's, and nothing reads positions."""
        if drafter(SequoiaSettings.of(self.vllm_config).drafter).has_weights:
            super()._raise_if_mrope()

    # Until: vLLM asks a multimodal target for an image's token only where a head reads images.
    def load_model(self, target_model: torch.nn.Module) -> None:
        """Loads the draft as vLLM does, beside a multimodal target's text part alone."""
        if supports_multimodal(target_model):
            target_model = target_model.get_language_model()
        super().load_model(target_model)

    def _get_model(self) -> torch.nn.Module:
        """Lets the drafter load."""
        if isinstance(self.drafter, DrafterV1):
            return self.drafter.load(self)
        self.drafter.prepare(self.vllm_config)
        return WithoutModel()

    def initialize_attn_backend(self, *args: Any, **kwargs: Any) -> None:
        """Calls vLLM's; a draft without layers takes slots of the target's, and fills none."""
        if self._draft_attn_layer_names:
            super().initialize_attn_backend(*args, **kwargs)
            return
        self.kv_cache_gid = 0
        self.block_size = self.runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, Tensor] | None = None,
    ) -> None:
        """Runs one dummy forward; vLLM runs one per speculative token."""
        super().dummy_run(num_tokens, use_cudagraphs, True, slot_mappings)

    def run_draft(self, rows: int) -> None:
        """Runs a pass over so many dummy tokens of no request."""
        if isinstance(self.drafter, DrafterV1):
            zeros, nowhere = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), PADDING_SLOT)
            self._forward(zeros.to(torch.int32), zeros, nowhere, None)

    def advance(self, committed: CommittedTokens) -> Tensor:
        """Reads committed tokens; returns draft logits ``[R, V]`` after each request's last one."""
        requests, counts, last = committed.requests, committed.counts, committed.last
        if isinstance(self.drafter, TextDrafterV1):
            return self._predict(torch.from_numpy(committed.tokens[last]), requests)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        starts[1:] = last + 1
        seq_lens = committed.positions[last] + 1
        slots = self._slots(np.repeat(requests, counts), committed.positions)
        self._leave_out_before_windows(slots, committed)
        positions = torch.from_numpy(committed.positions)
        query_start_loc = torch.from_numpy(starts)
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            num_reqs=len(counts),
            num_actual_tokens=len(committed.tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self._block_table(requests),
            slot_mapping=slots,
            causal=True,
            positions=positions,
        )
        _, metadata = self.build_per_group_and_layer_attn_metadata(common)
        tokens = torch.from_numpy(committed.tokens.astype(np.int32))
        rows = torch.from_numpy(last) if len(tokens) > len(counts) else None
        return self._forward(tokens, positions, slots, metadata, rows)

    def learn(self, scored: Tensor, logits: Tensor) -> None:
        """Shows a draft without a model the target's logits after these rows of the step."""
        if isinstance(self.drafter, TextDrafterV1):
            ends = self.runner.query_start_loc.np[1 : self.runner.input_batch.num_reqs + 1]
            requests = np.searchsorted(ends, scored.numpy(), side="right")
            tokens = self.runner.input_ids.gpu[scored]
            self.drafter.learn(tokens, logits, self._adapters(requests))

    def _adapters(self, requests: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the requests' LoRA adapters; 0: none."""
        adapters: NDArray[np.int64] = self.runner.input_batch.request_lora_mapping[requests]
        return adapters

    def _leave_out_before_windows(self, slots: Tensor, committed: CommittedTokens) -> None:
        """Takes away, in place, slots of tokens that no later token's sliding window reaches.

        vLLM frees a block when the target is past it: it may already belong to another request.
        """
        group = self.runner.kv_cache_config.kv_cache_groups[self.kv_cache_gid]
        if (window := freed_behind(group.kv_cache_spec)) is None:
            return
        computed = self.runner.input_batch.num_computed_tokens_cpu[committed.requests]
        first = np.repeat(computed - window + 1, committed.counts)
        slots[torch.from_numpy(committed.positions < first)] = PADDING_SLOT

    def grow(self, levels: DraftLevels, roots: RootsV1, sampling: DraftSampling) -> GrownTrees:
        """Grows one tree per request, with the engine's topology."""
        told = self.foretold.told_of(roots.requests, levels.tree.depth)
        logits_at = self._logits_at(roots, levels)
        grown = grow(levels, roots.tokens, roots.logits, told, sampling, logits_at)
        take_from_rank0(grown.tokens)
        return grown

    def grow_dynamic(
        self, levels: DraftLevels, roots: RootsV1, most: Tensor, deepest: Tensor
    ) -> GrownTrees:
        """Grows dynamic trees of greedy requests: as large as the static one in the mean.

        ``most`` and ``deepest`` are as in `DynamicGrowth.best`.
        """
        growth = DynamicGrowth(roots.tokens, levels.tree.size, levels.tree.depth)
        told = self.foretold.told_of(roots.requests, growth.depth)
        logits_at = self._logits_at(roots, levels)
        own = grow_dynamic(growth, roots.logits, told, logits_at, most, deepest)
        together = torch.stack([own.tokens, own.parents, own.places])
        take_from_rank0(together)
        shared, no_q = SharedNodes(*together), torch.empty(0)
        return GrownTrees(shared.tokens, no_q, no_q, shared)

    def grow_told(self, roots: RootsV1, lengths: NDArray[np.int64]) -> GrownTrees:
        """Makes branches of so many told tokens, int64 ``[B]``: they ask no draft."""
        told = self.foretold.told_of(roots.requests, int(lengths.max()))
        return grow_told(roots.tokens, told, torch.from_numpy(lengths))

    def _logits_at(self, roots: RootsV1, levels: DraftLevels) -> LogitsAt:
        """What the draft says at nodes of these requests' trees. Their slots lie behind the roots:
        those with children are no more than a tree has."""
        requests = roots.requests
        if isinstance(self.drafter, TextDrafterV1):
            return lambda tokens, *_: self._predict(
                tokens.flatten(), np.repeat(requests, tokens.shape[1])
            )
        places = roots.positions[:, None] + np.arange(levels.tree.size)
        below = _BelowRoots(
            positions=torch.from_numpy(roots.positions),
            last=int(roots.positions.max()),
            room=torch.from_numpy(self.max_model_len - roots.positions),
            slots=self._slots(requests[:, None], places),
            block_table=self._block_table(requests),
        )
        return partial(self._level_logits, below)

    def _level_logits(
        self, below: _BelowRoots, tokens: Tensor, depth: int, sees: Tensor, first: int
    ) -> Tensor:
        """Computes the draft's logits at a level's nodes in one forward; see `LogitsAt`."""
        width = tokens.shape[1]
        end = first + width
        # The scheduler trims nodes past the model's length. Until then they must not write
        # outside the request's blocks, nor read outside the RoPE table.
        num_nodes = below.room.clamp(max=end)
        positions = (below.positions + depth).clamp(max=self.draft_max_len - 1)
        # vLLM's kernels read them without looking at strides, which one column would have.
        slots = below.slots[:, first:end].flatten().contiguous()
        tree = TreeQueries(
            rows=self._rows[: tokens.numel()].view(tokens.shape),
            block_table=below.block_table,
            context_lens=below.positions,
            num_nodes=num_nodes,
            ancestors=sees,
            max_keys=min(below.last + end, self.max_model_len),
            only_trees=True,
        )
        metadata = CPUTreeAttentionMetadata.of_trees(tree, slots)
        logits = self._forward(
            tokens.flatten().to(torch.int32),
            positions.repeat_interleave(width),
            slots,
            dict.fromkeys(self._draft_attn_layer_names, metadata),
        )
        if tree.spoilt:  # else NaN would reach the next tokens that vLLM's kernel reads
            layers = self.vllm_config.compilation_config.static_forward_context
            for name in self._draft_attn_layer_names:
                packed = getattr(layers[name], "isa", None) == PACKED_ISA
                clear_tokens(layers[name].kv_cache, slots[slots != PADDING_SLOT], packed)
        return logits

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        metadata: dict[str, Any] | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Runs one forward over all tokens; see `DrafterV1.logits`."""
        assert isinstance(self.drafter, DrafterV1)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=len(tokens),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(self._draft_attn_layer_names, slots),
        ):
            return self.drafter.logits(tokens, positions, rows)

    def _predict(self, tokens: Tensor, requests: NDArray[np.int64]) -> Tensor:
        """Logits ``[R, V]`` of a draft without a model, after one token of each request."""
        assert isinstance(self.drafter, TextDrafterV1)
        return self.drafter.logits(tokens, self._adapters(requests))

    def _block_table(self, requests: NDArray[np.int64]) -> Tensor:
        """The draft's cache blocks of these requests, int32 ``[B, max_blocks]``."""
        num_reqs = self.runner.input_batch.num_reqs
        table = self._table.get_device_tensor(num_reqs)
        if len(requests) == num_reqs:  # in order: all of them
            return table
        return table[torch.from_numpy(requests)]

    def _slots(self, requests: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """The draft's cache slots, int64, of these positions; padding past the model's length."""
        table = self._table.get_numpy_array()
        block = np.minimum(positions // self.block_size, table.shape[1] - 1)
        slots = table[requests, block] * np.int64(self.block_size) + positions % self.block_size
        inside = positions < self.max_model_len
        return torch.from_numpy(np.where(inside, slots, PADDING_SLOT))

    @property
    def _table(self) -> Any:
        return self.runner.input_batch.block_table[self.kv_cache_gid]
