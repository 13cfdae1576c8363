"""What the engines measured here have on their workers: methods, and made-up weights."""

from collections import defaultdict
from typing import Any

from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from sequoia_vllm.measuring.step_recorder import StepRecorder

_MOST_KERNELS = 25


class MeasuringWorker(StepRecorder):
    """Records steps, and the device's kernels one by one."""

    _profiler: Any = None

    def gpu_start_profiler(self) -> None:
        """Records all kernels from now on, by torch's profiler; drops the steps recorded so far."""
        from torch import profiler

        self.sequoia_take_steps()
        self._profiler = profiler.profile(activities=profiler.supported_activities())
        self._profiler.start()

    def gpu_stop_profiler(self) -> dict[str, Any]:
        """What the device did since `gpu_start_profiler`.

        Returns:
            "steps": how many there were; "busy_ms": time of all kernels and copies together;
            "kernels": the longest, ``[name, ms, calls]``. Where there is no GPU, these are
            operators of the host.
        """
        from torch.autograd import DeviceType

        self._profiler.stop()
        steps = self.sequoia_take_steps()
        events, self._profiler = self._profiler.events(), None
        on_device = [
            event
            for event in events
            if event.device_type == DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        times: defaultdict[str, list[float]] = defaultdict(list)
        for event in on_device or events:
            times[event.name].append(event.time_range.elapsed_us() / 1e3)
        longest = sorted(times, key=lambda name: -sum(times[name]))[:_MOST_KERNELS]
        return {
            "steps": len(steps),
            "busy_ms": sum(map(sum, times.values())),
            "kernels": [[name[:120], sum(times[name]), len(times[name])] for name in longest],
        }


@register_model_loader("dummy")
class MadeUpWeights(DummyModelLoader):
    """vLLM's loader of ``load_format="dummy"``, but heads keep their own output layer.

    vLLM lets a head share the target's output layer unless the head's checkpoint has one, and
    nothing is loaded where weights are made up. A level would then read 1.05 GB for the 128,256
    tokens of Llama 3 instead of 0.26 GB for the 32,000 of its head.
    """

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Makes all weights up."""
        super().load_weights(model, model_config)
        if getattr(model, "draft_id_to_target_id", None) is not None:
            model.has_own_lm_head = True
