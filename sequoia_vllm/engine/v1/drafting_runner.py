"""The drafting half of the V1 runner: whose tokens the draft reads, and the trees that it grows."""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from sequoia_vllm.adaptation.told_branches import MOST_TOLD
from sequoia_vllm.drafting.dynamic_trees import can_choose
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.common.patched import patched
from sequoia_vllm.engine.common.settings import SequoiaSettings, without_speculation
from sequoia_vllm.engine.common.step_messages import is_loaded
from sequoia_vllm.engine.core.eligibility import TreeTerms, requests_to_read
from sequoia_vllm.engine.runner.draft_blocks import DraftBlocks
from sequoia_vllm.engine.runner.tensor_parallel import survive_draft
from sequoia_vllm.engine.v1.draft_progress import DraftProgressV1
from sequoia_vllm.engine.v1.proposer import RootsV1, TreeProposerV1
from sequoia_vllm.engine.v1.thinking_budgets import ThinkingBudgets
from sequoia_vllm.engine.v1.verifier import truncation_of
from sequoia_vllm.metrics.counts import StepStats
from sequoia_vllm.step.grow import Draft, DraftSampling, GrownTrees
from sequoia_vllm.step.score import StepState
from sequoia_vllm.step.seeds import SessionSeeds
from sequoia_vllm.tree import TokenTree

_STATIC, _DYNAMIC, _BRANCH = range(3)  # kinds of trees


def build_all_logitsprocs(vllm_config: VllmConfig, *args: Any) -> Any:
    """Calls vLLM's `build_logitsprocs` as for an engine without speculation."""
    return build_logitsprocs(without_speculation(vllm_config), *args)


@dataclass(frozen=True)
class EmittedTokens:
    """What a step has added to the requests of a batch."""

    known: NDArray[np.int64]  # int64 ``[requests]``: tokens of each before, the step's drafts not
    tokens: NDArray[np.integer]  # int ``[requests, W]``: the new ones; behind them -1
    counts: NDArray[np.int64]  # int64 ``[requests]``: how many are new
    reads: NDArray[np.bool_]  # bool ``[requests]``: whether it gets a tree, now or later


class DraftingRunner(CPUModelRunner):
    """Grows a token tree for each request at the end of a step, in the place of vLLM's chains."""

    speculative_config: Any
    drafter: TreeProposerV1

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        # The draft's configuration, made from this one, would choose blocks anew, and not those
        # that the target's latents need. Until: vLLM leaves a draft the target's blocks.
        vllm_config.cache_config.user_specified_block_size = True
        with (
            # vLLM drops logits processors when it speculates; requests that need them get no
            # drafts. Until: vLLM asks the speculative method.
            patched(gpu_model_runner, "build_logitsprocs", build_all_logitsprocs),
            # It grows chains, ours trees. Until: vLLM lets plugins register a speculative method.
            patched(gpu_model_runner, "DraftModelProposer", TreeProposerV1),
        ):
            super().__init__(vllm_config, device)
        settings = SequoiaSettings.of(vllm_config)
        self.tree = settings.tree
        self._settings = settings
        self._grown = 0  # steps that grew trees
        self.stats = StepStats(self.tree)
        self._tables = TreeTables(self.tree, device)
        self._drafts: dict[str, Draft] = {}
        self._terms: dict[str, TreeTerms] = {}
        self._session_seeds = SessionSeeds()

    @cached_property
    def draft_progress(self) -> DraftProgressV1:
        """How far the draft has read each request; needs the KV cache's configuration."""
        group = self.drafter.kv_cache_gid
        spec = self.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        return DraftProgressV1(self.max_num_tokens, DraftBlocks({group: spec.block_size}))

    def _drafts_each(self, scheduler_output: SchedulerOutput) -> int:
        """Nodes that this step grows for each request."""
        most = 0 if self.drafter.has_failed else self.drafter.max_drafts
        return min(scheduler_output.num_spec_tokens_to_schedule, most)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Calls vLLM's, and notes requests that finish, start, or resume after preemption."""
        for request_id in scheduler_output.finished_req_ids:
            self._drafts.pop(request_id, None)
            self._terms.pop(request_id, None)
            self._session_seeds.forget(request_id)
            self.draft_progress.forget(request_id)
            self._forget_budget(request_id)
            self.drafter.foretold.forget(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            known = self.requests.get(new.req_id)
            if known is not None and new.req_id not in scheduler_output.finished_req_ids:
                emitted = new.num_computed_tokens + 1 - known.num_prompt_tokens
                self._session_seeds.continue_session(new.req_id, known.generator, emitted)
            self._forget_budget(new.req_id)
        self._note_blocks(scheduler_output)
        found = super()._update_states(scheduler_output)
        longest = min(self.drafter.draft_max_len, self.max_model_len) - 1
        for new in scheduler_output.scheduled_new_reqs:
            state = self.requests[new.req_id]
            self._terms[new.req_id] = TreeTerms.of(
                state.sampling_params, state.num_prompt_tokens, longest
            )
            if self._terms[new.req_id].most_committed:
                self.drafter.foretold.start(new.req_id, state.sampling_params)
        return found

    def _note_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Notes the blocks of requests that start or resume, and new blocks of the others."""
        cached = scheduler_output.scheduled_cached_reqs
        starting = [
            (new.num_computed_tokens, new.req_id, new.block_ids)
            for new in scheduler_output.scheduled_new_reqs
        ]
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                starting.append((cached.num_computed_tokens[index], request_id, blocks))
            elif blocks is not None:
                self.draft_progress.extend(request_id, blocks)
        # One may have found blocks that another one fills in this step, which found fewer: that
        # one starts first, as `DraftBlocks` asks, or the draft would read them twice.
        for computed, request_id, blocks in sorted(starting, key=lambda one: one[0]):
            loaded = is_loaded(scheduler_output, request_id)
            self.draft_progress.start(request_id, computed, blocks, loaded)

    @cached_property
    def _budgets(self) -> ThinkingBudgets | None:
        """In an engine with a reasoning configuration, from its first step on."""
        holder = self.input_batch.thinking_budget_state_holder
        return None if holder is None else ThinkingBudgets(holder)

    def _forget_budget(self, request_id: str) -> None:
        if self._budgets is not None:
            self._budgets.forget(request_id)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Does not judge the whole batch as vLLM does: `requests_to_read` decides per request."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Tensor,
        sampling_metadata: SamplingMetadata,
        *unused: Any,
    ) -> list[list[int]]:
        """Replaces vLLM's: the draft reads the committed tokens and grows trees.

        Returns:
            Draft tokens of each request in stored tree order; empty: no tree.
        """
        started = time.perf_counter()
        try:
            return self._grow_trees(scheduler_output, sampled_token_ids, sampling_metadata)
        except Exception:
            survive_draft(self.vllm_config)
            self.drafter.has_failed = True
        finally:
            self.stats.drafting += time.perf_counter() - started
        return [[] for _ in range(self.input_batch.num_reqs)]

    def _grow_trees(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in range(self.input_batch.num_reqs)]
        drafts_each = self._drafts_each(scheduler_output)
        if drafts_each == 0:
            return drafts
        emitted = self._emitted_tokens(sampled_token_ids)
        self._look_back(emitted)
        committed = self.draft_progress.take(
            self.input_batch.req_ids,
            self.input_batch.token_ids_cpu,
            known=emitted.known,
            sampled=emitted.tokens,
            num_sampled=emitted.counts,
            reads=emitted.reads,
        )
        if committed is None:
            return drafts
        logits = self.drafter.advance(committed)
        levels = self._tables.levels_of(drafts_each)
        discarded = self.discard_request_mask.np[committed.requests]
        chosen = np.flatnonzero(committed.complete & ~discarded)
        own = committed.requests[chosen], committed.positions[committed.last[chosen]]
        branches = self._branch_lengths(*own, levels.tree)
        kinds = np.where(branches > 0, _BRANCH, self._have_dynamic_trees(own[0], levels.tree))
        truncation = truncation_of(sampling_metadata, self._params())
        for kind in (_STATIC, _DYNAMIC, _BRANCH):
            rows = chosen[kinds == kind]
            if len(rows) == 0:
                continue
            last, requests = committed.last[rows], committed.requests[rows]
            roots = RootsV1(
                requests,
                torch.from_numpy(committed.tokens[last]),
                committed.positions[last],
                logits if len(rows) == len(logits) else logits[rows],
            )
            if kind == _BRANCH:
                names = (self.input_batch.req_ids[row] for row in requests.tolist())
                self.drafter.foretold.masked = frozenset(filter(self._follows_grammar, names))
                grown = self.drafter.grow_told(roots, branches[branches > 0])
            elif kind == _DYNAMIC:
                grown = self.drafter.grow_dynamic(levels, roots, *self._limits(roots, drafts_each))
            else:
                sampling = DraftSampling.of(
                    requests, sampling_metadata.temperature, self.input_batch.generators,
                    truncation, levels.tree.depth,
                )  # fmt: skip
                grown = self.drafter.grow(levels, roots, sampling)
            self._keep(grown, requests, drafts)
        return drafts

    def _keep(
        self, grown: GrownTrees, requests: NDArray[np.int64], drafts: list[list[int]]
    ) -> None:
        """Keeps these requests' trees, and puts their tokens into ``drafts``."""
        tokens, shared = grown.tokens[:, 1:].tolist(), grown.shared
        for row, request in enumerate(requests.tolist()):
            request_id = self.input_batch.req_ids[request]
            self._drafts[request_id] = Draft(grown, row)
            most = self._terms[request_id].most_drafts
            if shared is not None:
                most = int(shared.sizes[row]) - 1
            drafts[request] = tokens[row][:most]  # safe: every prefix of a tree is a tree

    def _branch_lengths(
        self, requests: NDArray[np.int64], positions: NDArray[np.int64], tree: TokenTree
    ) -> NDArray[np.int64]:
        """Tokens of the branches that take the place of trees like ``tree``, int64 ``[B]``; 0: none
        does.

        A branch needs no slots before it is scored. So it may have more nodes than the engine's
        tree. Together branches leave prompts half of a step's tokens.
        """
        names = [self.input_batch.req_ids[row] for row in requests.tolist()]
        if not self.drafter.foretold.may_branch(names, tree.depth):
            return np.zeros(len(requests), dtype=np.int64)
        room = min(MOST_TOLD, self.max_num_tokens // (2 * self.input_batch.num_reqs) - 1)
        most = []
        for name, position in zip(names, positions.tolist(), strict=True):
            terms = self._terms[name]
            limits = [room, terms.most_committed - position]  # below its last token none counts
            if terms.most_drafts is not None:
                limits.append(terms.most_drafts)
            # Drafts that were padded before they are known have the engine's tree, with masks.
            hidden = self.use_async_scheduling and self._follows_grammar(name)
            most.append(0 if hidden else min(limits))
        drafts = tree.num_speculative_tokens
        return self.drafter.foretold.branch_lengths(names, most, tree.depth, drafts)

    def _follows_grammar(self, request_id: str) -> bool:
        params = self.requests[request_id].sampling_params
        return params is not None and params.structured_outputs is not None

    def _limits(self, roots: RootsV1, drafts_each: int) -> tuple[Tensor, Tensor]:
        """Most drafts of requests that share them, and most levels, int64 ``[B]`` each.

        vLLM has room for the engine's tree. With more than twice its share a request gains nothing,
        and attention pads all trees to the largest. Below a request's last token no node can be
        accepted.
        """
        most = min(self.tree.num_speculative_tokens, 2 * drafts_each)
        terms = [self._terms[self.input_batch.req_ids[row]] for row in roots.requests.tolist()]
        own = [most if one.most_drafts is None else min(one.most_drafts, most) for one in terms]
        last = np.array([one.most_committed for one in terms])
        return torch.tensor(own), torch.from_numpy(last - roots.positions)

    def _have_dynamic_trees(
        self, requests: NDArray[np.int64], tree: TokenTree
    ) -> NDArray[np.bool_]:
        """bool ``[B]``: which requests get a tree of its own shape in this step."""
        self._grown += 1
        is_static = self._settings.is_static_step(self._grown)
        if is_static or not can_choose(tree.size, tree.depth):
            return np.zeros(len(requests), dtype=bool)
        names = [self.input_batch.req_ids[row] for row in requests.tolist()]
        return np.array([not self._terms[name].is_static for name in names], dtype=bool)

    def _emitted_tokens(self, sampled_token_ids: Tensor) -> EmittedTokens:
        """What this step has added to each request."""
        num_reqs = self.input_batch.num_reqs
        scheduled = np.diff(self.query_start_loc.np[: num_reqs + 1])
        drafted = [len(ids) for ids in self.input_batch.spec_token_ids[:num_reqs]]
        computed = self.input_batch.num_computed_tokens_cpu[:num_reqs]
        sampled = sampled_token_ids.cpu().numpy()
        discarded = self.discard_request_mask.np[:num_reqs]
        known = (computed + scheduled - np.array(drafted)).astype(np.int64)
        num_sampled = np.where(discarded, 0, (sampled >= 0).sum(axis=1))
        terms = [self._terms[request] for request in self.input_batch.req_ids]
        reads = requests_to_read(terms, known + num_sampled, sampled)
        return EmittedTokens(known, sampled, num_sampled, reads)

    def _look_back(self, emitted: EmittedTokens) -> None:
        """Notes what the requests' texts and predictions say comes next."""
        rows = np.flatnonzero(emitted.reads & (emitted.counts > 0))
        if len(rows) == 0:
            return
        lengths = (emitted.known + emitted.counts)[rows]
        texts = self.input_batch.token_ids_cpu[rows, : lengths.max()]
        # vLLM notes new tokens later.
        place, column = np.nonzero(np.arange(emitted.tokens.shape[1]) < emitted.counts[rows, None])
        texts[place, emitted.known[rows][place] + column] = emitted.tokens[rows[place], column]
        names = [self.input_batch.req_ids[row] for row in rows.tolist()]
        prompts = self.input_batch.num_prompt_tokens[rows]
        self.drafter.foretold.look_back(rows, names, texts, prompts, lengths)

    def _count_predictions(self, sampled: Tensor, trees: StepState | None) -> None:
        """Counts what the step's tokens make of predictions, before they are noted anywhere."""
        emits = ~self.discard_request_mask.np
        rows = {name: row for name, row in self.input_batch.req_id_to_index.items() if emits[row]}
        texts, prompts = self.input_batch.token_ids_cpu, self.input_batch.num_prompt_tokens
        written = {
            name: texts[row, prompts[row] :][: len(self.requests[name].output_token_ids)]
            for name, row in rows.items()
        }
        self.drafter.foretold.count(rows, written, sampled, trees)

    def _params(self) -> list[Any]:
        """Each request's `SamplingParams`, in batch order."""
        return [self.requests[request].sampling_params for request in self.input_batch.req_ids]
