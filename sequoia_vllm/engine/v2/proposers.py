"""Which proposer drafts by which of vLLM's speculative methods."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.states import RequestState

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.replicas import as_alone
from sequoia_vllm.engine.v2.backend import TreeBackend
from sequoia_vllm.engine.v2.block_proposer import BlockTreeProposer
from sequoia_vllm.engine.v2.head_proposer import HeadTreeProposer, LayerTreeProposer
from sequoia_vllm.engine.v2.model_proposer import ModelTreeProposer
from sequoia_vllm.engine.v2.proposer import TreeProposer

_BY_METHOD: dict[str, type[TreeProposer]] = {
    "draft_model": ModelTreeProposer,
    "eagle3": HeadTreeProposer,
    "dflash": BlockTreeProposer,
    "mtp": LayerTreeProposer,
}


def new_proposer(
    vllm_config: VllmConfig,
    device: torch.device,
    req_states: RequestState,
    tables: TreeTables,
    backend: TreeBackend,
) -> TreeProposer:
    """The proposer of an engine whose trees vLLM knows by the method that it schedules like."""
    proposer = _BY_METHOD[vllm_config.speculative_config.method]
    return proposer(as_alone(vllm_config), device, req_states, tables, backend)
