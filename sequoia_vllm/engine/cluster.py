"""What must be alike wherever one engine runs: versions on all nodes, devices in a TP group.

The front end writes down its own versions, and the device that it chose a tree
for; each worker compares at start-up, before any weight is loaded.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sequoia_vllm import __version__
from sequoia_vllm.config import ConfigError
from sequoia_vllm.engine.contract import vllm_version
from sequoia_vllm.engine.settings import SequoiaSettings


def current_versions() -> dict[str, str]:
    """Versions of the plugin and of vLLM in this process."""
    return {"sequoia-vllm": __version__, "vLLM": vllm_version() or "unknown"}


def check_versions(front_end: Mapping[str, str], here: Mapping[str, str], node: str) -> None:
    """Raises unless this node has the front end's versions.

    Args:
        front_end: `current_versions` of the process that the user started.
        here: Those of this one.
        node: Its node's name, for the message.

    Raises:
        ConfigError: Naming both versions of each package that differs.
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
    """Raises unless a tensor-parallel group has one type of device, the tree's if it has one.

    Args:
        group: Device name of each rank.
        chosen_for: The device that the tree was chosen for; None: the user gave the tree.

    Raises:
        ConfigError: Naming the devices and the fix.
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


def check_worker(vllm_config: Any) -> None:
    """`check_versions` for this worker."""
    check_versions(SequoiaSettings.of(vllm_config).versions, current_versions(), platform.node())


def check_group(vllm_config: Any, device_name: str, group: Any) -> None:
    """`check_devices` for the tensor-parallel group of this worker.

    Args:
        vllm_config: vLLM's.
        device_name: This rank's device.
        group: The ranks' process group, on the CPU.
    """
    names = [""] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(names, device_name, group=group)
    check_devices(names, SequoiaSettings.of(vllm_config).chosen_for)
