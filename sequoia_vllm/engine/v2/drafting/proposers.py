"""The class that drafts with each kind of drafter, by the dotted path that the kind gives."""

from __future__ import annotations

from pkgutil import resolve_name

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.states import RequestState

from sequoia_vllm.drafters import drafter
from sequoia_vllm.drafting.tree_tables import TreeTables
from sequoia_vllm.engine.common.replicas import as_alone
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.v2.attention.backend import TreeBackend
from sequoia_vllm.engine.v2.drafting.proposer import TreeProposerV2


def new_proposer(
    vllm_config: VllmConfig,
    device: torch.device,
    req_states: RequestState,
    tables: TreeTables,
    backend: TreeBackend,
) -> TreeProposerV2:
    """The proposer of an engine's kind of drafter.

    Raises:
        TypeError: The kind names a class that is no `TreeProposerV2`.
    """
    kind = drafter(SequoiaSettings.of(vllm_config).drafter)
    path = kind.proposer_for(vllm_config.speculative_config.draft_model_config.architectures)
    proposer = resolve_name(path)
    if not issubclass(proposer, TreeProposerV2):
        raise TypeError(f"{path}, which drafts with {kind.name}, is no TreeProposerV2")
    return proposer(as_alone(vllm_config), device, req_states, tables, backend)
