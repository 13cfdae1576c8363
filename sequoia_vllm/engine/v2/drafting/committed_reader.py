"""Reads what a step committed into the draft's KV cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from sequoia_vllm.drafting.block_growth import BlockModel
from sequoia_vllm.drafting.draft_batch import DraftBatch
from sequoia_vllm.drafting.draft_plan import DraftPlan
from sequoia_vllm.drafting.growth import DraftStates, TreeGrowth
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.v2.drafting.draft_graphs import RAGGED, DraftGraphs
from sequoia_vllm.engine.v2.drafting.draft_progress import DraftProgress
from sequoia_vllm.engine.v2.drafting.drafter import DraftPass, TextDrafter, TreeDrafter
from sequoia_vllm.engine.v2.drafting.target_states import TargetStates
from sequoia_vllm.hardware.graph_sizes import powers_of_two

# Most rows of prompts, times the tokens that they see, that a ragged graph reads. Beyond, attention
# takes longer than the launches that it saves: our kernel reads prompts more slowly than vLLM's.
_MOST_READ = 512 * 16384


@dataclass
class CommittedReader:
    """Reads committed tokens, as many as each request has: with a graph if one fits.

    Only the device knows how many a request reads. The host knows bounds, which choose the graph.
    Rows that no request needs are padding, behind those of all requests.
    """

    drafter: TreeDrafter  # reads
    growth: TreeGrowth  # its reading passes, and where it keeps the states of roots
    progress: DraftProgress  # what the draft has read
    states: TargetStates | None  # the target's, for a head; None: the draft reads tokens alone
    batch: DraftBatch  # says what each request reads
    build_metadata: Callable[..., dict[str, Any] | None]  # vLLM's ``_build_attn_metadata``
    buffers: InputBuffers  # vLLM's, which it reads
    graphs: DraftGraphs | None = None  # of passes that read; None: there are none
    key_graphs: DraftGraphs | None = None
    """The same, for keys and values alone: of one token of each request, or of any number."""

    def make_graphs(
        self,
        graphs_of: Callable[..., DraftGraphs],
        plan: DraftPlan,
        max_num_reqs: int,
        longest: int,
    ) -> None:
        """Makes the graphs of its passes, to be captured, for requests of ``longest`` tokens."""
        if not isinstance(self.drafter, TextDrafter):
            self.graphs = graphs_of(
                partial(self.read_captured, longest), "Capturing what the draft reads",
                plan.read_sizes, plan.ragged_sizes(max_num_reqs),
            )  # fmt: skip
        if self.drafter.reads_states:  # where nothing is drafted
            # Passes of several layers do not end early: prompts then have the graphs above.
            ends_early = len(self.drafter.cache.groups) == 1
            self.key_graphs = graphs_of(
                lambda requests, each, rows: self.store_keys(requests, rows, each, longest),
                "Capturing what the draft reads for later", {1: powers_of_two(max_num_reqs)},
                plan.ragged_sizes(max_num_reqs) if ends_early else (),
            )  # fmt: skip

    def readers(self, batch: InputBatch, reads: NDArray[np.bool_], num_trees: int) -> int:
        """How many of the first requests are read where the first ``num_trees`` get trees.

        A model reads the others once one of them has more tokens than a path: a prompt.
        """
        unread = self.progress.most_unread(batch.idx_mapping_np[num_trees:][reads[num_trees:]])
        others = self.states is not None or unread > self.drafter.tree.depth + 1
        return batch.num_reqs if others else num_trees

    def read(self, batch: InputBatch, bounds: NDArray[np.int32], num_reqs: int) -> int:
        """Reads, and keeps the states of the first ``num_reqs`` roots.

        Args:
            batch: R requests.
            bounds: int32 ``[R]``: most tokens of each; 0 from ``num_reqs`` on.

        Returns:
            Bound on the rows of all.
        """
        rows, most = max(int(bounds.sum()), 1), max(int(bounds.max()), 1)
        path, states = self.drafter.tree.depth + 1, self._states_of(num_reqs, rows)
        prompts, lengths = np.where(bounds > path, bounds, 0), lengths_of(batch)
        if self._replay(num_reqs, rows, most, int(prompts @ lengths.astype(np.int64))):
            return rows
        if most <= path or isinstance(self.drafter, BlockModel):  # such a head attends to nothing
            # Always as if a path: for other numbers another kernel might have to be compiled.
            read = self.growth.read_committed(num_reqs, rows, path, max_keys(batch), states)
        elif self.drafter.cache.has_latents:
            # vLLM's attention asks the host which rows are a prompt's, and only the device knows.
            read = self.growth.read_committed(num_reqs, rows, most, max_keys(batch), states)
        else:
            read = self._read_prompts(batch, bounds, states)
        if not self.drafter.only_keys:
            self.growth.keep_roots(read, num_reqs)
        return rows

    def read_captured(self, longest: int, num_reqs: int, each: int, rows: int) -> None:
        """The pass that `graphs` hold, see `DraftGraphs`, for requests of ``longest`` tokens."""
        read = self.growth.read_committed(num_reqs, rows, each or rows, longest)
        self.growth.keep_roots(read, num_reqs)

    def _states_of(self, num_reqs: int, rows: int) -> Tensor | None:
        if self.states is None:
            return None
        return self.states.gather(self.batch.first_rows[: num_reqs + 1], rows)

    def _replay(self, num_reqs: int, rows: int, most: int, seen: int) -> bool:
        """Replays a graph with as many rows for each request, or with any; False: none fits.

        ``seen``: rows of prompts times the tokens that they see.
        """
        if self.graphs is None or self.drafter.images is not None:
            return False
        each = next((n for n in self.graphs.tokens_for(num_reqs) if n >= most), RAGGED)
        if each == RAGGED and seen > _MOST_READ:
            return False
        return self.graphs.replay(num_reqs, each, 0 if each else rows)

    def must_read(self, batch: InputBatch, reads: NDArray[np.bool_]) -> bool:
        """Whether the draft must read these requests' tokens although it drafts nothing.

        A model must for prompts if it has sliding windows: their blocks will be freed.
        """
        if self.states is not None:
            return True
        return bool(self.drafter.cache.windows and (batch.is_prefilling_np & reads).any())

    def only_read(self, batch: InputBatch, bounds: NDArray[np.int32]) -> None:
        """Reads these requests' tokens, and nothing grows. Arguments as in `read`."""
        num_reqs, states = batch.num_reqs, self.states
        each, rows = (1, num_reqs) if bounds.max() <= 1 else (RAGGED, int(bounds.sum()))
        graphs = self.key_graphs
        fits = each or (graphs and each in graphs.tokens_for(num_reqs))
        if states is not None and self.drafter.images is None and fits:
            if rows <= len(states.gathered):
                self._states_of(num_reqs, rows)
                if graphs and graphs.replay(num_reqs, each, 0 if each else rows):
                    return
            if each:
                self.store_keys(num_reqs, num_reqs, each, max_keys(batch))
                return
        if bounds.any():
            with patched(self.drafter, "only_keys", True):
                self.read(batch, bounds, num_reqs)

    def store_keys(self, num_reqs: int, rows: int, each: int, most_keys: int) -> None:
        """Reads so many tokens of each request, or `RAGGED`, for keys and values alone."""
        with patched(self.drafter, "only_keys", True):
            self.growth.read_committed(num_reqs, rows, each or rows, most_keys)

    def _read_prompts(
        self, batch: InputBatch, bounds: NDArray[np.int32], states: Tensor | None
    ) -> DraftStates:
        """Reads prompts with vLLM's attention; returns the states of all rows."""
        rows = int(bounds.sum())
        inputs = self.growth.committed_inputs(batch.num_reqs, rows)
        positions, slots = inputs.positions[:rows], inputs.slots[:, :rows]
        return self.drafter.run(
            DraftPass(
                inputs.token_ids[:rows], positions, self.growth.combined_states(rows, states),
                self._metadata_of(batch, bounds, positions, slots),
                self.drafter.cache.by_layer(slots),
            )
        )  # fmt: skip

    def _metadata_of(
        self, batch: InputBatch, bounds: NDArray[np.int32], positions: Tensor, slots: Tensor
    ) -> dict[str, Any] | None:
        """vLLM's attention metadata of rows at these positions ``[rows]``."""
        num_reqs, rows, buffers = batch.num_reqs, slots.shape[1], self.buffers
        first_rows = self.batch.first_rows[: num_reqs + 1]
        buffers.query_start_loc[: num_reqs + 1] = first_rows
        buffers.seq_lens[:num_reqs] = self.batch.starts[:num_reqs] + self.batch.counts[:num_reqs]
        buffers.positions[:rows] = positions
        most_np = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(bounds, out=most_np[1:])
        return self.build_metadata(
            num_reqs=num_reqs,
            batch_desc=BatchExecutionDescriptor(CUDAGraphMode.NONE, rows, num_reqs),
            query_start_loc_np=most_np,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=int(bounds.max()),
            slot_mappings=slots,
        )


def lengths_of(batch: InputBatch) -> NDArray[np.int32]:
    """Upper bounds of the committed tokens of this batch's requests, int32 ``[R]``."""
    lengths: NDArray[np.int32] = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
    return lengths


def max_keys(batch: InputBatch) -> int:
    """Upper bound of the committed tokens of any request of this batch."""
    return int(lengths_of(batch).max()) + 1
