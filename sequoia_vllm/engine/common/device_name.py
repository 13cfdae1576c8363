"""The name of the device that this engine runs on, as the driver or the system gives it."""

from sequoia_vllm.hardware.device import current_cpu_name


def current_device_name(index: int = 0) -> str:
    """Returns the name of the node's GPU ``index``, like "NVIDIA H200", or the CPU's model name."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return current_cpu_name()
    return current_platform.get_device_name(index)
