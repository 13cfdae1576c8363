"""Which proposer drafts by which of vLLM's speculative methods."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.states import RequestState

from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.common.replicas import as_alone
from sequoia_vllm.engine.v2.attention.backend import TreeBackend
from sequoia_vllm.engine.v2.drafting.block_proposer import BlockTreeProposer
from sequoia_vllm.engine.v2.drafting.corrected_blocks import (
    CandidateTreeProposer,
    LatticeTreeProposer,
    MarkovTreeProposer,
)
from sequoia_vllm.engine.v2.drafting.head_proposer import HeadTreeProposer, LayerTreeProposer
from sequoia_vllm.engine.v2.drafting.model_proposer import ModelTreeProposer
from sequoia_vllm.engine.v2.drafting.proposer import TreeProposerV2

_BY_METHOD: dict[str, type[TreeProposerV2]] = {
    "draft_model": ModelTreeProposer,
    "eagle3": HeadTreeProposer,
    "dflash": BlockTreeProposer,
    "dspark": MarkovTreeProposer,
    "mtp": LayerTreeProposer,
}
# Of vLLM's method "dflash" by the draft's architecture, as vLLM does.
_BY_ARCHITECTURE: dict[str, type[TreeProposerV2]] = {
    "DFlash2DraftModel": CandidateTreeProposer,
    "LiLiCorrDraftModel": LatticeTreeProposer,
}


def new_proposer(
    vllm_config: VllmConfig,
    device: torch.device,
    req_states: RequestState,
    tables: TreeTables,
    backend: TreeBackend,
) -> TreeProposerV2:
    """The proposer of an engine whose trees vLLM knows by the method that it schedules like."""
    speculative_config = vllm_config.speculative_config
    proposer = _BY_METHOD[speculative_config.method]
    if proposer is BlockTreeProposer:
        for architecture in speculative_config.draft_model_config.architectures:
            proposer = _BY_ARCHITECTURE.get(architecture, proposer)
    return proposer(as_alone(vllm_config), device, req_states, tables, backend)
