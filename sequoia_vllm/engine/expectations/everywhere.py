"""What the parts that run on every device rely on."""

from __future__ import annotations

from sequoia_vllm.engine.expectations.expected import Expected

_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_OUTPUT = "vllm.v1.core.sched.output"
_REGISTRY = "vllm.v1.attention.backends.registry"

EVERYWHERE = (
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
    Expected("vllm.platforms.interface:Platform.is_cpu", ("self",), may_grow=True),
    Expected("vllm.config:VllmConfig.use_v2_model_runner"),
    Expected("vllm.config:VllmConfig._maybe_disable_dynamic_sd_for_data_parallel", ("self",)),
    Expected(
        "vllm.config:VllmConfig._limit_max_model_len_to_draft", ("self",), since=(0, 33)
    ),
    Expected("vllm.config:SchedulerConfig.async_scheduling"),
    Expected("vllm.config:SchedulerConfig.scheduler_cls"),
    # load.py
    *(Expected(f"vllm.config:SchedulerConfig.{field}") for field in (
        "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs",
    )),
    *(Expected(f"vllm.config:SpeculativeConfig.{field}") for field in (
        "num_speculative_tokens", "num_speculative_tokens_per_batch_size",
    )),
    *(Expected(f"vllm.config:CompilationConfig.{field}") for field in (
        "cudagraph_capture_sizes", "max_cudagraph_capture_size",
    )),
    # refusals.py
    Expected("vllm.platforms:CpuArchEnum.X86"),
    # tree_reports.py
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
    Expected("vllm.v1.metrics.loggers:PrometheusStatLogger._counter_cls"),
    Expected("vllm.v1.metrics.loggers:PrometheusStatLogger._gauge_cls"),
    Expected("vllm.v1.metrics.stats:SchedulerStats.num_running_reqs"),
    Expected(f"{_OUTPUT}:SchedulerOutput.total_num_scheduled_tokens"),
    Expected(f"{_OUTPUT}:SchedulerOutput.num_spec_tokens_to_schedule"),
    Expected("vllm.v1.engine.llm_engine:LLMEngine.get_metrics", ("self",)),
    Expected("vllm.v1.metrics.reader:Counter", ("name", "labels", "value"), may_grow=True),
    Expected("vllm.v1.metrics.reader:Gauge", ("name", "labels", "value"), may_grow=True),
    # worker_base.py
    Expected(f"{_WORKER}.init_device", ("self",)),
    Expected("vllm.distributed.parallel_state:get_tp_group", (), may_grow=True),
    Expected(f"{_WORKER}.execute_model", ("self", "scheduler_output")),
    Expected(f"{_WORKER}.sample_tokens", ("self", "grammar_output")),
    # worker_cpu.py, v2/backend_cpu.py, v2/backend_gpu.py
    Expected("vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear"),
    Expected(f"{_REGISTRY}:register_backend", ("backend", "class_path"), may_grow=True),
    # v1/runner.py, v2/runner.py, v2/proposer.py
    *(Expected(f"{_OUTPUT}:SchedulerOutput.{field}") for field in (
        "scheduled_new_reqs", "scheduled_cached_reqs",
    )),
    *(Expected(f"{_OUTPUT}:NewRequestData.{field}") for field in (
        "req_id", "num_computed_tokens", "block_ids",
    )),
    *(Expected(f"{_OUTPUT}:CachedRequestData.{field}") for field in ("req_ids", "new_block_ids")),
    Expected("vllm.v1.kv_cache_interface:KVCacheConfig.kv_cache_groups"),
    Expected("vllm.v1.kv_cache_interface:KVCacheSpec.block_size"),
    Expected(
        "vllm.config:get_layers_from_vllm_config", ("vllm_config", "layer_type"), may_grow=True
    ),
    Expected("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"),
)  # fmt: skip
