"""Hardware: times of a step, the tree and schedule that are fastest on them."""

from sequoia_vllm.hardware.assumptions import Assumptions
from sequoia_vllm.hardware.choose import (
    Schedule,
    ScheduleEstimate,
    choose_schedule,
    choose_tree,
)
from sequoia_vllm.hardware.cost import CostModel, Estimate
from sequoia_vllm.hardware.device import (
    Device,
    DeviceError,
    DeviceSpec,
    current_cpu_name,
    identify,
)
from sequoia_vllm.hardware.roofline import roofline_profile
from sequoia_vllm.hardware.step_profile import Curve, Overhead, Profile, ProfileError

__all__ = [
    "Assumptions",
    "CostModel",
    "Curve",
    "Device",
    "DeviceError",
    "DeviceSpec",
    "Estimate",
    "Overhead",
    "Profile",
    "ProfileError",
    "Schedule",
    "ScheduleEstimate",
    "choose_schedule",
    "choose_tree",
    "current_cpu_name",
    "identify",
    "roofline_profile",
]
