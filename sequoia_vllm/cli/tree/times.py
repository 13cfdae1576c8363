"""The times that ``sequoia-vllm tree build`` chooses with."""

from __future__ import annotations

from pathlib import Path

from sequoia_vllm.cli.common import fail
from sequoia_vllm.cli.tree.roofline import device_of, predict
from sequoia_vllm.hardware.device import InterconnectKind
from sequoia_vllm.hardware.offloading import Offload
from sequoia_vllm.hardware.step_profile import Profile


def times_of(
    profile: Path | None,
    device: str | None,
    model_class: str | None,
    tensor_parallel_size: int | None,
    interconnect_gb_s: float | None,
    interconnect_kind: InterconnectKind | None,
    offload: Offload | None,
) -> Profile | None:
    """The profile of `build`'s options, measured or predicted; None: it has neither."""
    links = interconnect_gb_s, interconnect_kind
    if device is None and model_class is None:
        if tensor_parallel_size is not None or links != (None, None) or offload:
            fail(
                "--tensor-parallel-size, --interconnect-... and --offload-gb are of predicted "
                "times: give --device and --class with them (a --profile has its own)"
            )
        return None if profile is None else Profile.load(profile)
    if profile is not None:
        fail("times are measured (--profile) or predicted (--device and --class): give one")
    if device is None or model_class is None:
        fail("predicted times need both --device and --class (sequoia-vllm tree roofline --help)")
    size = 1 if tensor_parallel_size is None else tensor_parallel_size
    return predict(device_of(device, *links, size), model_class, size, offload=offload)
