"""Trees drafted by a trained head, which reads the target's hidden states with its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from sequoia_vllm.drafting.draft_plan import depths_by_drafts
from sequoia_vllm.drafting.growth import DraftStates
from sequoia_vllm.engine.v2.proposer import TreeProposer
from sequoia_vllm.engine.v2.step_reading import StepReading
from sequoia_vllm.kernels.target_states import gather_target_states


class HeadTreeProposer(TreeProposer, EagleSpeculator):
    """vLLM's speculator of EAGLE-3 heads (loading, KV cache, buffers) growing trees.

    A row of such a head is a committed token with the target's states at the token before it:
    it has that one's position and slot, and what it computes predicts the token after. Drafted
    tokens come with what the head itself fed back for their parents.

    A step leaves the target's states at all nodes; the accepted path's are gathered, in one
    launch, before the head reads.
    """

    lag = 1

    def _new_reading(self, steps_ahead: int) -> StepReading:
        return StepReading(self.max_num_reqs, depths_by_drafts(self.tree), self.device)

    # -- model and cache ---------------------------------------------------------------

    def load_model(self, target_model: torch.nn.Module) -> None:
        """As vLLM's; then room for the target's states of the largest pass that is captured."""
        super().load_model(target_model)
        layers = get_eagle3_aux_layers_from_config(self.speculative_config)
        if layers is None:
            layers = target_model.get_eagle3_default_aux_hidden_state_layers()
        width = len(layers) * self.vllm_config.model_config.get_hidden_size()
        rows = self.plan.most_rows_read
        self._gathered = torch.zeros(rows, width, dtype=self.dtype, device=self.device)
        self._rows_of: dict[int, tuple[Tensor, Tensor]] = {}

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, after room for slots is there."""
        block_tables: BlockTables = kwargs["block_tables"] if "block_tables" in kwargs else args[2]
        self._slots = torch.empty(
            block_tables.num_kv_cache_groups,
            self.max_num_tokens + self.max_num_reqs,
            dtype=torch.int64,
            device=self.device,
        )
        super().set_attn(*args, **kwargs)

    def _slot_mappings(self) -> Tensor:
        return self._slots

    def _target_states(self) -> Tensor:
        return self._gathered

    # -- the target's states ---------------------------------------------------------------

    def _take_target_states(
        self, batch: InputBatch, last: Tensor, auxiliary: list[Tensor] | None
    ) -> None:
        assert auxiliary, "vLLM gives heads the target's auxiliary states"
        self._layers, self._first_rows = auxiliary, batch.query_start_loc[: batch.num_reqs + 1]

    def _gather(self, requests: Tensor, offsets: Tensor, states: Tensor) -> Tensor:
        gather_target_states(
            self._layers,
            query_start_loc=self._first_rows,
            accepted=self.accepted,
            requests=requests,
            offsets=offsets,
            states=states,
        )
        return states

    def _reads_without_drafting(self, batch: InputBatch) -> bool:
        """The states of this step are gone with it."""
        return True

    def _fits_growth(self, num_trees: int, num_reqs: int, width: int) -> bool:
        """Every request must be read, and their states must fit."""
        return num_trees == num_reqs and num_trees * width <= len(self._gathered)

    def _before_growth(self, num_trees: int, width: int) -> None:
        requests, offsets = self._uniform_rows(width)
        rows = num_trees * width
        self._gather(requests[:rows], offsets[:rows], self._gathered[:rows])

    def _uniform_rows(self, width: int) -> tuple[Tensor, Tensor]:
        """Request and offset of each row of passes that read ``width`` tokens of each request."""
        if width not in self._rows_of:
            rows = torch.arange(len(self._gathered), dtype=torch.int32, device=self.device)
            self._rows_of[width] = rows // width, rows % width
        return self._rows_of[width]

    def _ragged_feedback(self, requests: Tensor, offsets: Tensor) -> Tensor:
        states = self._gathered.new_empty(len(requests), self._gathered.shape[1])
        return self.feedback_of(self._gather(requests, offsets, states))

    def _dummy_feedback(self, rows: int) -> Tensor:
        return self.feedback_of(self._gathered.new_zeros(rows, self._gathered.shape[1]))

    # -- the head -----------------------------------------------------------------------

    def feedback_of(self, target_states: Tensor) -> Tensor:
        """See `DraftModel.feedback_of`: of several layers' states one of the head's width."""
        return self.model.combine_hidden_states(target_states)

    @torch.inference_mode()
    def run_draft(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, Tensor] | None,
        feedback: Tensor | None,
    ) -> DraftStates:
        """See `TreeProposer.run_draft`."""
        rows = len(token_ids)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=rows,
            slot_mapping=slots,
            batch_descriptor=BatchDescriptor(num_tokens=rows),
        ):
            hidden, fed_back = self.model(
                input_ids=token_ids, positions=positions, hidden_states=feedback, inputs_embeds=None
            )
        return DraftStates(hidden, fed_back)
