"""The worker of a Sequoia engine on CPUs."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker

from sequoia_vllm.engine.contract import check_contract
from sequoia_vllm.engine.online import attach_paths
from sequoia_vllm.engine.swap import swapped


class SequoiaCPUWorker(CPUWorker):
    """vLLM's CPU worker with our attention backend and model runner."""

    def init_device(self) -> None:
        """As vLLM's, which builds `CPUModelRunner` by that module-level name.

        The name is swapped meanwhile: no second runner, with its buffers, is
        built only to be thrown away.
        """
        from sequoia_vllm.engine.runner_v1 import SequoiaCPUModelRunner

        check_contract()
        with swapped(cpu_worker, "CPUModelRunner", SequoiaCPUModelRunner):
            super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """As vLLM's, with our attention backend under the name that CPU layers look up.

        Layers keep the class they find, so the entry is needed meanwhile only:
        a plain engine in the same process never sees it.
        """
        selector._cached_get_attn_backend.cache_clear()
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "sequoia_vllm.engine.cpu_attention.CPUTreeAttentionBackend",
        )
        try:
            super().load_model(load_dummy_weights=load_dummy_weights)
        finally:
            AttentionBackendEnum.CPU_ATTN.clear_override()
            selector._cached_get_attn_backend.cache_clear()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, timed as part of the step."""
        with self.model_runner.stats.timed("step"):
            return super().execute_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, timed as part of the step; its output says what became of its trees."""
        stats = self.model_runner.stats
        stats.steps += 1
        with stats.timed("step"):
            output = super().sample_tokens(*args, **kwargs)
        return attach_paths(output, stats.take_paths())

    def sequoia_stats(self, reset: bool = False, trace: bool = False) -> dict[str, Any]:
        """Counters since the last reset (`StepStats.to_dict`); called by ``collective_rpc``.

        Args:
            reset: Start counting anew.
            trace: With ``reset``: from now on record every model forward.
        """
        stats = self.model_runner.stats
        counted = stats.to_dict()
        if reset:
            stats.trace = [] if trace else None
            stats.reset()
        return counted

    def sequoia_limit_drafts(self, drafts: int) -> None:
        """Grows at most this many nodes from the next step on (a prefix of the tree)."""
        self.model_runner.max_drafts = drafts
