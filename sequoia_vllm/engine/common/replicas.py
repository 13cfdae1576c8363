"""Replicas of a mixture of experts, which run in lock step, and drafts, which do not."""

from copy import copy
from typing import Any

from vllm.platforms import current_platform

from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.compat.versions import cpus_can_gather


def in_lock_step(vllm_config: Any) -> bool:
    """Whether the engine's replicas meet in every forward pass of the target."""
    parallel = vllm_config.parallel_config
    return parallel.data_parallel_size > 1 and bool(vllm_config.model_config.is_moe)


def are_started_apart(parallel_config: Any, is_moe: bool) -> bool:
    """Whether ranks that run steps together may be started by several commands (Ray: by one)."""
    parallel = parallel_config
    replicas_apart = parallel.data_parallel_size > parallel.data_parallel_size_local
    return parallel.nnodes_within_dp > 1 or (is_moe and replicas_apart)


def fault_of_lock_step(vllm_config: Any) -> str | None:
    """Why the engine's replicas must not run in lock step; None: they do not, or may.

    They exchange rows of the target's layers, and before each pass numbers of rows and graphs: all
    take the largest. A replica without requests runs padding. Each drafts alone (`as_alone`).
    """
    if not in_lock_step(vllm_config):
        return None
    speculative = vllm_config.speculative_config
    has_passes = drafter(SequoiaSettings.on(speculative).drafter).has_weights
    if has_passes and speculative.draft_model_config.is_moe:
        return "which drafting passes do not, and the draft has experts, too"
    if current_platform.is_cpu() and not cpus_can_gather():
        return "which vLLM cannot do on CPUs (plain vLLM ends in the first request)"
    return None


def as_alone(vllm_config: Any) -> Any:
    """The configuration that a draft runs with: as if its engine had no other replicas.

    Replicas in lock step agree on a batch's size whenever a forward context is entered. A dense
    draft exchanges nothing, and has as many passes as its own replica's trees need.
    """
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1:
        return vllm_config
    alone = copy(vllm_config)
    alone.parallel_config = copy(parallel)
    alone.parallel_config.reconfigure_for_independent_dp_rank()
    return alone
