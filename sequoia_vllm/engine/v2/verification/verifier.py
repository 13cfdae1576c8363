"""The Sequoia verifier, which replaces Model Runner V2's rejection sampler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, get_max_chunk_logits

from sequoia_vllm.engine.runner.tensor_parallel import from_rank0
from sequoia_vllm.engine.v2.drafting.drafter import TextDrafter
from sequoia_vllm.engine.v2.drafting.proposer import TreeProposerV2
from sequoia_vllm.engine.v2.verification.logits_needs import LogitsNeeds
from sequoia_vllm.engine.v2.verification.nan_counts import nans_of_paths
from sequoia_vllm.kernels.modes import SAMPLED
from sequoia_vllm.kernels.scoring_inputs import VerifierInputs, gather_for_verification
from sequoia_vllm.kernels.verify import TreesToVerify
from sequoia_vllm.verification.methods import method_of
from sequoia_vllm.verification.topology import drawn_at


class Verified(NamedTuple):
    """The outcome of a batch's trees."""

    tokens: Tensor  # int64 ``[R, D + 1]``: emitted tokens
    num_sampled: Tensor  # int32 ``[R]``: number of emitted tokens
    paths: Tensor
    """int32 ``[R, 1 + D]``: nodes drafted and scored, root included (less than 2: no tree;
    `BRANCH`: a branch of told tokens), then the accepted ones by depth, then -1."""

    @classmethod
    def empty(cls, num_reqs: int, depth: int, device: torch.device) -> Verified:
        """Memory for R requests and a tree of depth D."""
        empty = partial(torch.empty, device=device)
        return cls(
            tokens=empty(num_reqs, depth + 1, dtype=torch.int64),
            num_sampled=empty(num_reqs, dtype=torch.int32),
            paths=empty(num_reqs, 1 + depth, dtype=torch.int32),
        )

    def part(self, requests: slice) -> Verified:
        """Results of these requests, as a view."""
        return Verified(*(each[requests] for each in self))


class TreeVerifierV2(RejectionSampler):
    """vLLM's rejection sampler, whose call verifies trees.

    It reads the target's logits, the trees and draft logits that the speculator left on the device,
    and the requests' modes and sampling parameters. The runner reads the accepted nodes from
    `paths`.

    It derives from vLLM's class because vLLM also reads other attributes, which differ between
    versions.

    Args:
        sampler: vLLM's sampler, whose sampling parameters, noise and logprobs are used.
    """

    def __init__(self, sampler: Sampler, speculator: TreeProposerV2, method: str) -> None:
        super().__init__(sampler, speculator.speculative_config, speculator.device)
        self._speculator = speculator
        self._method = method_of(method)
        self._verify_trees = self._method.kernel_launcher()
        self._needs = LogitsNeeds(sampler)
        # One flag stands for all that a request's logits need; a temperature is the walk's work,
        # for the few rows that it reads. Until: vLLM tells temperature and other processing apart.
        self.sampler.add_request = self._needs.add_request
        self.sampler.sampling_states.add_request = self._needs.add_to_states
        self._no_temperatures = torch.ones(speculator.max_num_reqs, device=speculator.device)
        # The last batch's, for commit and statistics: see `Verified`.
        self.paths = torch.empty(0, 1, dtype=torch.int32)

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
            draft_logits: Not used; the proposer keeps them by node.
            invalid_drafts: bool ``[rows]``: drafts that a grammar excludes.
        """
        if isinstance(drafter := self._speculator.drafter, TextDrafter):
            tokens = input_batch.input_ids[input_batch.logits_indices]
            drafter.learn(tokens, logits, input_batch.expanded_idx_mapping)
        nans_of_rows = get_num_nans(logits) if self.sampler.compute_nans else None
        is_processed = self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        reports = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np) is not None
        processed: list[Tensor] | None = [] if is_processed and reports else None
        states, drafted = self.sampler.sampling_states, self._speculator.drafted
        depth = self._speculator.foretold.most_accepted(input_batch.idx_mapping_np)
        verified = Verified.empty(input_batch.num_reqs, depth, logits.device)
        inputs = gather_for_verification(
            input_batch,
            num_nodes=drafted.nodes,
            state_rows=drafted.rows,
            modes=self._speculator.modes.gpu,
            temperatures=states.temperature.gpu,
            seeds=states.seeds.gpu,
            invalid=invalid_drafts,
            scored=verified.paths[:, 0],
        )
        # Like vLLM, we apply sampling parameters to a float32 copy of limited size.
        most = get_max_chunk_logits(logits.shape[1])
        for requests in _request_chunks(input_batch.cu_num_logits_np, most):
            self._verify_requests(requests, logits, inputs, input_batch, verified, processed)
        verified = Verified(*from_rank0(*verified))
        if processed is not None:
            logits = torch.cat(processed)
        self.paths = verified.paths
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
            num_nans=nans_of_paths(nans_of_rows, verified, input_batch),
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=None,
        )

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles the kernels that vLLM's warm-up does not reach, so that no request waits.

        That warm-up's requests are greedy, or have every sampling parameter. Others may need only
        their temperatures: kernels then read logits in the model's dtype.
        """
        device = self._speculator.device
        inputs = VerifierInputs.empty(1, torch.zeros(1, dtype=torch.int64, device=device))
        for tensor in (inputs.tokens, inputs.root_positions, inputs.state_rows, inputs.seeds):
            tensor.zero_()
        inputs.modes.fill_(SAMPLED)
        inputs.temperatures.fill_(1.0)
        one_row = torch.arange(2, dtype=torch.int32, device=device)
        vocabulary = self._speculator.drafted.logits.shape[2]
        padded = torch.zeros(1, pad_vocab_size(vocabulary), dtype=dtype, device=device)
        of_the_model = padded[:, :vocabulary]  # vLLM's logits are a part of such rows
        processed = torch.zeros(1, vocabulary, dtype=torch.float32, device=device)
        for depth in {self._speculator.tree.depth, self._speculator.foretold.longest}:
            verified = Verified.empty(1, depth, device)
            for logits in (of_the_model, processed):
                self._walk(logits, inputs.temperatures, inputs.tokens, one_row, inputs, verified)

    def _verify_requests(
        self,
        requests: slice,
        all_logits: Tensor,
        all_inputs: VerifierInputs,
        batch: InputBatch,
        verified: Verified,
        processed: list[Tensor] | None,
    ) -> None:
        """Verifies these requests of the batch; adds their final logits to ``processed``."""
        speculator = self._speculator
        first = int(batch.cu_num_logits_np[requests.start])
        rows = slice(first, int(batch.cu_num_logits_np[requests.stop]))
        cu_num_logits = batch.cu_num_logits[requests.start : requests.stop + 1]
        if first > 0:
            cu_num_logits = cu_num_logits - first
        slots_np, slots = batch.idx_mapping_np[requests], batch.expanded_idx_mapping[rows]
        inputs, states = all_inputs.part(requests, rows), self.sampler.sampling_states
        # Of a branch every node has its own token, which needs final logits.
        all_sampled, may_branch = speculator.modes.sampled(slots_np), speculator.foretold.may_branch
        sampled = all_sampled & ~may_branch[slots_np]
        logits, temperatures = all_logits[rows], inputs.temperatures
        if processed is not None or not self._needs.leaves_temperatures(slots_np, sampled):
            # Final logits, in float32 if the sampler edits any.
            logits = self.sampler.apply_sampling_params(
                logits,
                slots,
                batch.idx_mapping[requests],
                slots_np,
                inputs.positions,
                inputs.token_ids,
                batch.expanded_local_pos[rows],
                batch.seq_lens_cpu_upper_bound.numpy()[requests],
            )
            temperatures = self._no_temperatures[: len(slots_np)]
        if processed is not None:
            processed.append(logits)
        own_tokens = inputs.tokens  # a placeholder: unread if all are sampled
        if not sampled.all():
            # The token that plain vLLM would sample at every node.
            own_tokens = gumbel_sample(
                logits,
                slots,
                states.temperature.gpu,
                states.seeds.gpu,
                inputs.positions,
                apply_temperature=False,
                is_drafting=False,
            )
        self._walk(
            logits, temperatures, own_tokens, cu_num_logits, inputs, verified.part(requests),
            any_sampled=bool(all_sampled.any()),
            any_matched=not sampled.all(),
            most_nodes=int(np.diff(batch.cu_num_logits_np)[requests].max()),
        )  # fmt: skip

    def _walk(
        self,
        logits: Tensor,
        temperatures: Tensor,
        own_tokens: Tensor,
        cu_num_logits: Tensor,
        inputs: VerifierInputs,
        verified: Verified,
        **known: Any,
    ) -> None:
        """Launches the kernels that verify these requests' trees; ``known`` facts save launches.

        Of logits ``[rows, V]``, to be divided by ``temperatures [R]``; ``own_tokens [rows]`` are
        the target's after each node, and ``cu_num_logits [R + 1]`` the first row of each request.
        """
        drafted, tables = self._speculator.drafted, self._speculator.tables
        trees = TreesToVerify(
            logits=logits,
            target_temperatures=temperatures,
            inputs=inputs,
            target_tokens=own_tokens,
            cu_num_logits=cu_num_logits,
            children=tables.children,
            inner_index=tables.inner_rows,
            draft_logits=drafted.logits,
            draft_stats=drafted.stats,
            sampled_tokens=verified.tokens,
            num_sampled=verified.num_sampled,
            accepted=verified.paths[:, 1:],
        )
        self._verify_trees(trees, self._tables_of_method, **known)

    @cached_property
    def _tables_of_method(self) -> Any:
        # Made on first use: memory taken while models are loaded does not survive sleep.
        speculator = self._speculator
        return self._method.tree_tables(speculator.tree.parents, speculator.device)

    def _logprobs(
        self, logits: Tensor, verified: Verified, batch: InputBatch
    ) -> LogprobsTensors | None:
        """Logprobs of emitted tokens, in the layout that vLLM expects of a chain."""
        dimensions = self.sampler.get_logprobs_dims(batch.idx_mapping_np)
        if dimensions is None:
            return None
        most, most_chosen = dimensions
        starts, rows_np = emitted_rows(batch.cu_num_logits_np, verified.tokens.shape[1])
        request, column = async_tensor_h2d(rows_np, device=logits.device)
        nodes = drawn_at(verified.paths[:, 1:]).long()
        rows = batch.cu_num_logits[request].long() + nodes[request, column]
        expanded = logits.shape[0] != batch.num_reqs
        return compute_topk_scores(
            logits[rows],
            most,
            verified.tokens[request, column].clamp(min=0),
            starts.tolist() if expanded else None,
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.idx_mapping[request],
            max_per_req_token_ids=most_chosen,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


def emitted_rows(
    cu_num_logits: NDArray[np.int32], most: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows for the logprobs of a batch's tokens, at most ``most`` for each of R requests.

    A path emits at most one token more than its tree is deep, often fewer than the tree's nodes.

    Returns:
        First row of each request, then the number of rows, int64 ``[R + 1]``; and for each row
        its request and the index of the request's emitted token, int64 ``[2, rows]``.
    """
    counts = np.minimum(np.diff(cu_num_logits), most).astype(np.int64)
    starts = np.concatenate([[0], counts.cumsum()])
    request = np.repeat(np.arange(len(counts)), counts)
    return starts, np.stack([request, np.arange(len(request)) - starts[request]])


def _request_chunks(cu_num_logits: NDArray[np.int32], most: int) -> Iterator[slice]:
    """Splits requests into runs of at most ``most`` rows of logits, or one larger request."""
    start, num_reqs = 0, len(cu_num_logits) - 1
    while start < num_reqs:
        fitting = np.searchsorted(cu_num_logits, cu_num_logits[start] + most, side="right") - 1
        end = max(start + 1, int(fitting))
        yield slice(start, end)
        start = end
