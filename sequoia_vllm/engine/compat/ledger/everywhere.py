"""What the parts that run on every device override and rely on."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.expected import Expected
from sequoia_vllm.engine.compat.ledger.override import Override
from sequoia_vllm.engine.compat.ledger.scheduling import SCHEDULING

_ARGS = "vllm.engine.arg_utils:EngineArgs"
_CONFIG = "vllm.config:VllmConfig"
_LOGGER = "vllm.v1.metrics.loggers:AggregateStatLoggerBase"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_OUTPUT = "vllm.v1.core.sched.output"
_REGISTRY = "vllm.v1.attention.backends.registry"

_MANAGER = "vllm.v1.structured_output:StructuredOutputManager"
_TREE_GRAMMAR = "vLLM's manager is told the topology of drafts"
_NEW_METHOD = "vLLM lets plugins register a speculative method"
_METRICS = "vLLM carries a speculative method's own statistics from the worker to its loggers"
_ONE_MESSAGE = "vLLM's engine core sends workers one message per step"
_TIMES = "vLLM tells plugins how long the parts of a step take"

EVERYWHERE: tuple[Expected | Override, ...] = (
    *SCHEDULING,
    # hooks.py, request.py, engine_config.py
    Override(
        f"{_ARGS}.create_engine_config", ("self", "usage_context", "headless"),
        kind="patch",
        why="checks the contract and refuses unsupported set-ups in the user's own process",
        until=_NEW_METHOD,
    ),
    Override(
        f"{_ARGS}.create_speculative_config",
        ("self", "target_model_config", "target_parallel_config"),
        kind="patch",
        why="translates method 'sequoia' into 'draft_model', whose scheduling trees need",
        until=_NEW_METHOD,
    ),
    Override(
        f"{_ARGS}.add_cli_args", ("parser",),
        kind="patch",
        why="--speculative-config is parsed by json.loads, which 'sequoia' alone is not for",
        until=_NEW_METHOD,
    ),
    Override(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        ("self", "speculative_config"),
        kind="patch",
        why="refuses min_p and logit_bias with any speculation; Sequoia serves them",
        until="vLLM asks the speculative method",
    ),
    Expected(
        "vllm.exceptions:VLLMValidationError", ("message", "parameter", "value"), may_grow=True
    ),
    # offload/weight_source.py
    Expected(f"{_ARGS}.offload_backend"),
    Expected(f"{_ARGS}.cpu_offload_gb"),
    Expected(f"{_ARGS}.cpu_offload_params"),
    Expected(f"{_ARGS}.offload_group_size"),
    Expected(f"{_ARGS}.offload_num_in_group"),
    Expected(f"{_ARGS}.offload_prefetch_step"),
    Expected(f"{_ARGS}.offload_params"),
    # replicas.py
    Expected("vllm.config:ParallelConfig.nnodes_within_dp"),
    Expected("vllm.config:ParallelConfig.data_parallel_size_local"),
    Expected("vllm.config:ParallelConfig.reconfigure_for_independent_dp_rank", ("self",)),
    # refusals.py: vLLM does so only where replicas run in lock step.
    Expected("vllm.config:ParallelConfig.use_ubatching"),
    # grammar.py
    Override(
        f"{_MANAGER}.validate_tokens", ("self", "request", "spec_tokens"),
        kind="patch",
        why="drops drafts after the first that a grammar forbids, as in a chain",
        until=_TREE_GRAMMAR,
    ),
    Override(
        f"{_MANAGER}.grammar_bitmask",
        ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
        kind="patch",
        why="fills the masks of a chain; a node's is by its own path",
        until=_TREE_GRAMMAR,
    ),
    Override(
        f"{_MANAGER}._grammar_bitmask",
        kind="instance",
        why="room for the largest trees of all request slots; ours asks for one request's root",
        until=_TREE_GRAMMAR,
    ),
    Expected(
        "vllm.v1.structured_output.backend_types:StructuredOutputBackend.allocate_token_bitmask",
        ("self", "max_num_seqs"),
    ),
    Expected("vllm.v1.structured_output.utils:strip_speculative_padding"),
    *(
        Expected(
            f"vllm.v1.structured_output.backend_types:StructuredOutputGrammar.{name}", parameters
        )
        for name, parameters in (
            ("accept_tokens", ("self", "request_id", "tokens")),
            ("rollback", ("self", "num_tokens")),
            ("fill_bitmask", ("self", "bitmask", "batch_index")),
            ("is_terminated", ("self",)),
        )
    ),
    Expected("vllm.platforms.interface:Platform.is_cpu", ("self",), may_grow=True),
    Expected(f"{_CONFIG}.use_v2_model_runner"),
    Override(
        f"{_CONFIG}._maybe_disable_dynamic_sd_for_data_parallel", ("self",),
        kind="patch",
        why="takes schedules from data-parallel engines, lest replicas meet in unequal numbers of "
        "drafting passes; replicas with trees meet in none. Ours fits schedule and CUDA graph "
        "sizes to the engine's limits, known by then",
        until="vLLM asks whether the replicas draft in lock step, and speculative methods for a "
        "schedule",
    ),
    Override(
        f"{_CONFIG}._limit_max_model_len_to_draft", ("self",),
        kind="patch",
        why="cuts the engine's length to the draft's, from 0.33 on; requests beyond get no drafts "
        "here",
        until="vLLM asks the speculative method whether it can stop drafting for a request",
        since=(0, 33),
    ),
    Override(
        "vllm.config:SpeculativeConfig.verify_equal_vocab_size_if_draft_model", ("self",),
        kind="patch",
        why="refuses drafts with another vocabulary size, whenever a configuration is made or "
        "copied; ours are mapped, where vLLM's use_heterogeneous_vocab is greedy and for V1",
        until="vLLM's heterogeneous vocabularies draw at any temperature, on V2 too",
    ),
    Expected("vllm.config:SchedulerConfig.async_scheduling"),  # of messages.py, too
    Expected("vllm.config:SchedulerConfig.scheduler_cls"),
    # draft_config.py, model_shapes.py
    Expected("vllm.transformers_utils.configs.speculators:SpeculatorsConfig", ("kwargs",)),
    Expected(
        "vllm.transformers_utils.config:get_config",
        (
            "model", "trust_remote_code", "revision", "code_revision", "config_format",
            "hf_overrides_kw", "hf_overrides_fn", "kwargs",
        ),
        may_grow=True,
    ),
    Expected(
        "vllm.transformers_utils.config:get_hf_text_config", ("config",), may_grow=True
    ),
    *(Expected(f"vllm.config:ModelConfig.{field}") for field in (
        "hf_text_config", "hf_overrides", "config_format", "quantization", "trust_remote_code",
        "max_model_len", "skip_tokenizer_init", "tokenizer", "tokenizer_mode",
        "tokenizer_revision",
    )),
    # drafter_kind.py
    Expected(
        "vllm.config.speculative:SpeculativeConfig.hf_config_override", ("hf_config",),
        may_grow=True,
    ),
    Expected("vllm.config.speculative:MTPModelTypes"),
    Expected("vllm.envs:environment_variables"),  # VLLM_USE_V2_MODEL_RUNNER is one of them
    Expected("vllm.config:SpeculativeConfig.method"),
    # vocabulary.py
    Expected("vllm.config:ModelConfig.model"),
    Expected("vllm.config:ModelConfig.revision"),
    Expected("vllm.config:ModelConfig.get_vocab_size", ("self",)),
    Expected("vllm.config:SpeculativeConfig.draft_model_config"),
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
    Expected("vllm.config.aux_output:AuxOutputConfig.enabled"),
    Expected("vllm.config:CacheConfig.kv_offloading_size"),
    # eligibility.py
    Expected("vllm.v1.sample.logits_processor:LOGITSPROCS_GROUP"),
    # offload/vllms.py, for refusals.py and v2/runner_gpu.py
    *(Expected(f"vllm.config.offload:{field}") for field in (
        "OffloadConfig.offload_backend", "PrefetchOffloadConfig.offload_group_size",
        "UVAOffloadConfig.cpu_offload_gb",
    )),
    # offload/worker.py, v2/draft_loading.py
    Expected("vllm.model_executor.offloader.base:set_offloader", ("instance",)),
    # tree_reports.py
    Override(
        "vllm.v1.metrics.stats:SchedulerStats.sequoia_report",
        kind="field",
        why="takes the counts of trees to the front end; decoders drop fields they do not know",
        until=_METRICS,
    ),
    Override(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        kind="patch",
        why="moves the counts from the model runner's output to the statistics",
        until=_METRICS,
    ),
    Override(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        (
            "self", "vllm_config", "engine_idxs", "custom_stat_loggers",
            "enable_default_loggers", "aggregate_engine_logging", "client_count",
        ),
        kind="patch",
        why="adds the logger of trees; the entry points for stat loggers are for AsyncLLM only, "
        "and having one turns statistics on in every engine",
        until=_METRICS,
    ),
    # messages.py
    Override(
        "vllm.v1.engine.core:EngineCore.post_step", ("self", "model_executed"),
        kind="patch",
        why="asks the workers for drafts, which the step's output has brought",
        until=_ONE_MESSAGE,
    ),
    Expected(
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        ("self", "draft_token_ids"),
    ),
    # sessions.py
    Override(
        "vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request", ("self", "request"),
        kind="patch",
        why="a resumable request goes on behind the drafts that its last step accepted, though its "
        "turn ended before them",
        until="vLLM goes back to the turn's end",
    ),
    Expected("vllm.v1.request:Request.num_tokens"),
    # shown.py
    Override(
        "vllm.config:SpeculativeConfig.__repr__", ("self",),
        kind="patch",
        why="vLLM's log would name the method draft_model",
        until=_NEW_METHOD,
    ),
    Override(
        "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
        (
            "self", "spec_decoding_stats", "kv_connector_stats", "cudagraph_stats", "perf_stats",
            "ec_connector_stats",
        ),
        kind="patch",
        why="counts accepted positions up to the number of nodes; a path ends at the tree's depth",
        until=_METRICS,
    ),
    Override(
        "vllm.v1.spec_decode.metrics:SpecDecodingProm.__init__",
        (
            "self", "speculative_config", "labelnames", "per_engine_labelvalues",
            "is_diffusion",
        ),
        kind="patch",
        why="likewise: a counter for each of them",
        until=_METRICS,
    ),
    Expected(
        "vllm.v1.spec_decode.metrics:SpecDecodingStats.num_accepted_tokens_per_pos"
    ),
    Override(
        "vllm.v1.engine.llm_engine:LLMEngine.get_metrics", ("self",),
        kind="patch",
        why="reads metrics that are named vllm:... only; ours are sequoia:...",
        until="vLLM reads metrics of other names",
    ),
    Override(
        f"{_LOGGER}.record",
        ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        kind="subclass", why="counts trees and shows them", until=_METRICS,
    ),
    Override(
        f"{_LOGGER}.log",
        kind="subclass", why="writes the trees' interval line", until=_METRICS,
    ),
    Override(
        f"{_LOGGER}.log_engine_initialized",
        kind="subclass", why="abstract; there is nothing to say", until=_METRICS,
    ),
    Expected("vllm.v1.metrics.loggers:PrometheusStatLogger._counter_cls"),
    Expected("vllm.v1.metrics.loggers:PrometheusStatLogger._gauge_cls"),
    Expected("vllm.v1.metrics.stats:SchedulerStats.num_running_reqs"),
    # adapting.py
    *(Expected(f"{_OUTPUT}:SchedulerOutput.{field}") for field in (
        "num_scheduled_tokens", "finished_req_ids",
    )),
    Expected(f"{_OUTPUT}:SchedulerOutput.total_num_scheduled_tokens"),
    Expected(f"{_OUTPUT}:SchedulerOutput.num_spec_tokens_to_schedule"),
    Expected("vllm.v1.metrics.reader:Counter", ("name", "labels", "value"), may_grow=True),
    Expected("vllm.v1.metrics.reader:Gauge", ("name", "labels", "value"), may_grow=True),
    # worker_base.py
    Override(
        f"{_WORKER}.init_device", ("self",),
        kind="subclass",
        why="refuses nodes with other versions or another tree, and tensor-parallel groups of "
        "mixed devices",
        until="vLLM compares versions of plugins between nodes, and one node configures all",
    ),
    Expected("vllm.distributed.parallel_state:get_tp_group", (), may_grow=True),
    Expected("vllm.distributed.parallel_state:get_world_group", (), may_grow=True),
    Override(
        f"{_WORKER}.load_model", ("self", "load_dummy_weights"),
        kind="subclass",
        why="what trees need besides weights is made after it, in memory that sleep keeps; "
        "refuses attention features that trees cannot use",
        until="vLLM has a place for tensors of speculators that are not weights",
    ),
    Expected(f"{_WORKER}._maybe_get_memory_pool_context", ("self", "tag")),
    Override(
        f"{_WORKER}.compile_or_warm_up_model", ("self",),
        kind="subclass",
        why="vLLM warms up with no request that needs its temperature only; and what its own dummy "
        "requests left in our statistics is forgotten",
        until="its warm-up has a sampled request without penalties; for statistics: never",
    ),
    Override(
        f"{_WORKER}.execute_model", ("self", "scheduler_output"),
        kind="subclass",
        why="timed for sequoia_stats; samples at once, where vLLM's engine core would send a "
        "second message for it",
        until=f"{_TIMES}; {_ONE_MESSAGE}",
    ),
    Expected(f"{_OUTPUT}:SchedulerOutput.has_structured_output_requests"),
    Expected("vllm.v1.outputs:EMPTY_MODEL_RUNNER_OUTPUT"),
    Override(
        f"{_WORKER}.sample_tokens", ("self", "grammar_output"),
        kind="subclass",
        why="timed for sequoia_stats; its output takes the counts of trees along",
        until=_METRICS,
    ),
    Expected(f"{_OUTPUT}:SchedulerOutput.scheduled_spec_decode_tokens"),
    Expected(f"{_WORKER}.take_draft_token_ids", ("self",)),
    Expected("vllm.v1.outputs:DraftTokenIds", ("req_ids", "draft_token_ids")),
    # worker_cpu.py, v2/backend_cpu.py, v2/backend_gpu.py
    Expected("vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear"),
    Expected(f"{_REGISTRY}:register_backend", ("backend", "class_path"), may_grow=True),
    # v1/runner.py, v2/runner.py, v2/tree_speculator.py
    *(Expected(f"{_OUTPUT}:SchedulerOutput.{field}") for field in (
        "scheduled_new_reqs", "scheduled_cached_reqs",
    )),
    *(Expected(f"{_OUTPUT}:NewRequestData.{field}") for field in (
        "req_id", "num_computed_tokens", "block_ids",
    )),
    *(Expected(f"{_OUTPUT}:CachedRequestData.{field}") for field in ("req_ids", "new_block_ids")),
    Expected("vllm.v1.kv_cache_interface:KVCacheConfig.kv_cache_groups"),
    Expected("vllm.v1.kv_cache_interface:KVCacheSpec.block_size"),
    Expected("vllm.v1.kv_cache_interface:SlidingWindowSpec.sliding_window"),
    Expected(
        "vllm.config:get_layers_from_vllm_config", ("vllm_config", "layer_type"), may_grow=True
    ),
    Expected("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"),
    # v1/proposer.py, v2/state_proposer.py
    Expected(
        "vllm.forward_context:set_forward_context",
        (
            "attn_metadata", "vllm_config", "num_tokens", "num_tokens_across_dp",
            "cudagraph_runtime_mode", "batch_descriptor", "ubatch_slices", "slot_mapping",
        ),
        may_grow=True,
    ),
)  # fmt: skip
