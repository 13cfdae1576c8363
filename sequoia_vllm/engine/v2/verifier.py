"""The Sequoia verifier in the place of Model Runner V2's rejection sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)

from sequoia_vllm.engine.tensor_parallel import of_first_rank
from sequoia_vllm.engine.v2.levels import child_table
from sequoia_vllm.engine.v2.speculator import TreeSpeculator
from sequoia_vllm.kernels.verify import verify_trees


@dataclass(frozen=True)
class Verified:
    """What became of a batch's trees.

    Attributes:
        tokens: int64 ``[R, D + 1]``: emitted tokens.
        num_sampled: int32 ``[R]``: how many they are.
        accepted: int32 ``[R, D]``: accepted nodes by depth, then -1.
    """

    tokens: Tensor
    num_sampled: Tensor
    accepted: Tensor


class TreeRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler, whose call verifies trees.

    Derived from it for what vLLM reads of it besides, which differs between versions.

    Args:
        sampler: vLLM's sampler: sampling parameters, noise and logprobs are its own.
        speculator: Who drew the drafts.
    """

    def __init__(self, sampler: Sampler, speculator: TreeSpeculator) -> None:
        super().__init__(sampler, speculator.speculative_config, speculator.device)
        self._speculator = speculator
        self._inner_index = torch.tensor(
            speculator.inner_rows, dtype=torch.int32, device=speculator.device
        )
        self._children = child_table(speculator.tree, speculator.device)
        # Of the last batch, for commit and statistics: int32 [R, D] and [R].
        self.accepted = torch.empty(0, dtype=torch.int32)
        self.num_nodes = torch.empty(0, dtype=torch.int32)

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Verifies every request's tree; requests without one get the sampler's token.

        Args:
            logits: ``[rows, V]``: the target's logits at all nodes.
            input_batch: The batch, with positions by depth.
            draft_logits: Not used: the speculator keeps them by node.
            invalid_drafts: bool ``[rows]``: drafts that a grammar excludes.
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        verified = self._verify(
            logits, self._drafted_tokens(input_batch, invalid_drafts), input_batch
        )
        self.accepted = verified.accepted
        self.num_nodes = self._num_nodes(input_batch)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            verified.num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=verified.tokens,
            logprobs_tensors=self._logprobs(logits, verified, input_batch),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=None,
        )

    def _drafted_tokens(self, batch: InputBatch, invalid: Tensor | None) -> Tensor:
        """Drafted token of each logits row, int64; -1 where nothing may be accepted."""
        drafted = self._speculator.drafted.nodes[batch.expanded_idx_mapping]
        is_draft = batch.expanded_local_pos < drafted
        if invalid is not None:
            is_draft &= ~invalid
        return torch.where(is_draft, batch.input_ids[batch.logits_indices], -1).long()

    def _num_nodes(self, batch: InputBatch) -> Tensor:
        """int32 ``[R]``: nodes scored that were drafted; less than 2: no tree."""
        drafted = self._speculator.drafted.nodes[batch.idx_mapping]
        return torch.minimum(drafted, batch.cu_num_logits.diff())

    def _verify(self, logits: Tensor, tokens: Tensor, batch: InputBatch) -> Verified:
        depth, slots = self._speculator.tree.depth, batch.idx_mapping
        verified = Verified(
            tokens=tokens.new_empty(batch.num_reqs, depth + 1),
            num_sampled=slots.new_empty(batch.num_reqs, dtype=torch.int32),
            accepted=slots.new_empty(batch.num_reqs, depth, dtype=torch.int32),
        )
        # As vLLM's: sampling parameters are applied to a float32 copy of limited size.
        most = get_max_chunk_logits(logits.shape[1])
        for requests in _request_chunks(batch.cu_num_logits_np, most):
            self._verify_requests(requests, logits, tokens, batch, verified)
        return Verified(*of_first_rank(verified.tokens, verified.num_sampled, verified.accepted))

    def _verify_requests(
        self,
        requests: slice,
        all_logits: Tensor,
        tokens: Tensor,
        batch: InputBatch,
        verified: Verified,
    ) -> None:
        """Verifies these requests of the batch."""
        states, speculator = self.sampler.sampling_states, self._speculator
        first = int(batch.cu_num_logits_np[requests.start])
        rows = slice(first, int(batch.cu_num_logits_np[requests.stop]))
        cu_num_logits = batch.cu_num_logits[requests.start : requests.stop + 1] - first
        slots, slots_np = batch.idx_mapping[requests], batch.idx_mapping_np[requests]
        positions = batch.positions[batch.logits_indices[rows]]
        logits = self.sampler.apply_sampling_params(
            all_logits[rows],
            batch.expanded_idx_mapping[rows],
            slots,
            slots_np,
            positions,
            batch.input_ids[batch.logits_indices[rows]],
            batch.expanded_local_pos[rows],
            batch.seq_lens_cpu_upper_bound.numpy()[requests],
        )
        own_tokens = tokens[rows]  # not read where all are sampled
        if not speculator.modes.all_sampled(slots_np):
            # What the engine would sample without speculation, at every node.
            own_tokens = gumbel_sample(
                logits,
                batch.expanded_idx_mapping[rows],
                states.temperature.gpu,
                states.seeds.gpu,
                positions,
                apply_temperature=False,
                is_drafting=False,
            )
        drafted = speculator.drafted
        verify_trees(
            logits=logits,
            tokens=tokens[rows],
            target_tokens=own_tokens,
            cu_num_logits=cu_num_logits,
            modes=speculator.modes.gpu[slots],
            positions=positions[cu_num_logits[:-1].long()].int(),
            seeds=states.seeds.gpu[slots],
            children=self._children,
            inner_index=self._inner_index,
            draft_logits=drafted.logits,
            draft_stats=drafted.stats,
            state_rows=drafted.rows[slots],
            draft_temperatures=states.temperature.gpu[slots],
            sampled_tokens=verified.tokens[requests],
            num_sampled=verified.num_sampled[requests],
            accepted=verified.accepted[requests],
        )

    def _logprobs(
        self, logits: Tensor, verified: Verified, batch: InputBatch
    ) -> LogprobsTensors | None:
        """Logprobs of emitted tokens, in the rows where vLLM expects a chain's."""
        most = self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        if most == NO_LOGPROBS:
            return None
        request, offset = _row_requests(batch, logits.device)
        # Token j of a path was drawn at its node j - 1; the first at the root.
        nodes = torch.nn.functional.pad(verified.accepted.clamp(min=0), (1, 0)).long()
        column = offset.clamp(max=nodes.shape[1] - 1)
        rows = batch.cu_num_logits[request].long() + nodes[request, column]
        emitted = verified.tokens[request, column].clamp(min=0)
        expanded = logits.shape[0] != batch.num_reqs
        return compute_topk_scores(
            logits[rows],
            most,
            emitted,
            batch.cu_num_logits_np.tolist() if expanded else None,
            logits_mode=self.sampler.logprobs_mode == "raw_logits",
        )


def _row_requests(batch: InputBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Request of each logits row, and its place among the request's rows; int64."""
    counts = np.diff(batch.cu_num_logits_np)
    request = async_tensor_h2d(np.repeat(np.arange(len(counts)), counts), device=device)
    return request, batch.expanded_local_pos.long()


def _request_chunks(cu_num_logits: NDArray[np.int32], most: int) -> Iterator[slice]:
    """Runs of requests with ``most`` rows of logits together, or a single larger request."""
    start, num_reqs = 0, len(cu_num_logits) - 1
    while start < num_reqs:
        fitting = np.searchsorted(cu_num_logits, cu_num_logits[start] + most, side="right") - 1
        end = max(start + 1, int(fitting))
        yield slice(start, end)
        start = end
