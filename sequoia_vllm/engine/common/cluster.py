"""Checks of an engine's nodes and ranks: alike must be versions, trees, and devices of a TP group.

The front end writes down its versions, and the device of its tree; each worker compares at
start-up. Each node of ``--nnodes``, and of data parallelism with ``--headless``, has a command of
its own, which chooses a tree by the files of its node. Unequal trees would be scored as one.
Replicas of a mixture of experts run in lock step, and drafts do not.
"""

import platform
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any
from zlib import crc32

import torch
from vllm.platforms import current_platform

from sequoia_vllm import __version__
from sequoia_vllm.config import ConfigError
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common.draft_schedule import scheduled_drafts
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.compat.versions import cpus_can_gather, vllm_version
from sequoia_vllm.hardware.budget import in_ranges
from sequoia_vllm.hardware.device import current_cpu_name


def current_versions() -> dict[str, str]:
    """Versions of the plugin and of vLLM in this process."""
    return {"sequoia-vllm": __version__, "vLLM": vllm_version() or "unknown"}


def check_versions(front_end: Mapping[str, str], here: Mapping[str, str], node: str) -> None:
    """Checks that a ``node`` has ``here`` the versions of the front end (`current_versions`).

    Raises:
        ConfigError: It has others; the message names both.
    """
    differing = [
        f"{name} {here.get(name, 'unknown')} here and {version} there"
        for name, version in front_end.items()
        if here.get(name, "unknown") != version
    ]
    if differing:
        raise ConfigError(
            f"node {node} does not have the versions of the node that started the engine: "
            f"{'; '.join(differing)}. Install the same versions on every node"
        )


def check_devices(group: Sequence[str], chosen_for: str | None) -> None:
    """Checks that a tensor-parallel group has one type of device: the one its tree is for, if any.

    Args:
        chosen_for: The device that the tree was chosen for; None: the user gave the tree.

    Raises:
        ConfigError: It has others; the message names them and the fix.
    """
    types = sorted(set(group))
    if len(types) > 1:
        raise ConfigError(
            f"the ranks of one tensor-parallel group run on different devices ({', '.join(types)}"
            "): every step would wait for the slowest, and no tree fits both. Place each group "
            "on devices of one type"
        )
    if chosen_for is not None and types != [chosen_for]:
        raise ConfigError(
            f"the tree was chosen for {chosen_for}, but this replica runs on {types[0]}: start "
            f"one engine per type of device (on a node that has it), or give the tree: "
            '{"tree": NAME or FILE}'
        )


def decisions(vllm_config: Any) -> dict[str, str]:
    """Decisions that all ranks must have alike, in words; an engine without trees has one."""
    if not SequoiaSettings.enabled(vllm_config):
        return {"tree": "none"}
    settings = SequoiaSettings.of(vllm_config)
    tree, schedule = settings.tree, in_ranges(scheduled_drafts(vllm_config))
    return {
        "tree": f"{tree.size} nodes, depth {tree.depth}, checksum {tree.checksum:08x}",
        "drafts by batch size": ", ".join(f"{first} to {last}: {n}" for first, last, n in schedule),
        "verification": settings.verification,
        "drafter": settings.drafter,
        "draft with another vocabulary": "yes" if settings.maps_vocabulary else "no",
        "draft_vocabulary": f"checksum {crc32(repr(settings.draft_tokens).encode()):08x}",
        "retrieval": "yes" if settings.retrieval else "no",
        "recycling": "yes" if settings.recycling else "no",
        "dynamic_tree": str(settings.dynamic_tree),
        "adapts": "no" if settings.adapts_as is None else "yes",
    }


def check_decisions(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Checks that ranks, each given with its node, have the same `decisions`.

    Raises:
        ConfigError: They have not; the message names each difference.
    """
    differing = []
    for name in set.intersection(*(set(decided) for _, decided in ranks)):
        first: dict[str, str] = {}  # first rank by decision
        for rank, (node, decided) in enumerate(ranks):
            first.setdefault(decided[name], f"rank {rank} on {node}")
        if len(first) > 1:
            found = "; ".join(f"{value} ({where})" for value, where in first.items())
            differing.append(f"{name}: {found}")
    if differing:
        raise ConfigError(
            "the commands that started this engine's ranks chose differently, and its steps "
            f"would hang or give wrong tokens. {'. '.join(sorted(differing))}. Each chooses by "
            'what lies on its own node: give all of them the same tree ("tree": the name of one of '
            'the library, or {"parents": [...]}; and the same schedule, if any), or one directory '
            "of trees that all nodes share ($SEQUOIA_VLLM_TREES)"
        )


def check_group(vllm_config: Any, device_name: str, cpu_group: Any) -> None:
    """Calls `check_devices` for the tensor-parallel group of this worker; every rank must call."""
    names = [""] * torch.distributed.get_world_size(cpu_group)
    torch.distributed.all_gather_object(names, device_name, group=cpu_group)
    check_devices(names, SequoiaSettings.of(vllm_config).chosen_for)


def check_ranks(vllm_config: Any, cpu_group: Any) -> None:
    """Calls `check_decisions` for all ranks that run steps together; every rank must call."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size(cpu_group)
    here = platform.node(), decisions(vllm_config)
    torch.distributed.all_gather_object(ranks, here, group=cpu_group)
    check_decisions(ranks)


def current_device_name(index: int = 0) -> str:
    """Returns the name of the node's GPU ``index``, like "NVIDIA H200", or the CPU's model name."""
    if current_platform.is_cpu():
        return current_cpu_name()
    return current_platform.get_device_name(index)


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
