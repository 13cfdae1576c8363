"""What the parts that run on every device override and rely on."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.entry import added_field, instance, patch, subclass, table

_NEW_METHOD = "vLLM lets plugins register a speculative method"
_ASKS = "vLLM asks the speculative method"
_SLOTS = "vLLM's look-ahead slots follow its schedule by batch size"
_TREE_GRAMMAR = "vLLM's manager is told the topology of drafts"
_METRICS = "vLLM carries a speculative method's own statistics from the worker to its loggers"

EVERYWHERE = table({
    "vllm.config": [
        "CacheConfig.kv_offloading_size", "CacheConfig.kv_sharing_fast_prefill",
        "get_layers_from_vllm_config(vllm_config, layer_type, ...)",
    ],
    "vllm.config.aux_output": ["AuxOutputConfig.enabled"],
    "vllm.config.offload": [
        "OffloadConfig.offload_backend", "PrefetchOffloadConfig.offload_group_size",
        "UVAOffloadConfig.cpu_offload_gb",
    ],
    "vllm.config.speculative": [
        "SpeculativeConfig.hf_config_override(hf_config, ...)",
    ],
    "vllm.config:CompilationConfig": ["cudagraph_capture_sizes", "max_cudagraph_capture_size"],
    "vllm.config:ModelConfig": [
        "hf_text_config", "hf_overrides", "config_format", "quantization", "trust_remote_code",
        "max_model_len", "skip_tokenizer_init", "tokenizer", "tokenizer_mode", "tokenizer_revision",
        "model", "revision", "get_vocab_size(self)", "enable_prompt_embeds", "use_fp64_gumbel",
        "return_sampling_mask", "enable_trace_replay",
    ],
    "vllm.config:ParallelConfig": [
        "nnodes_within_dp", "data_parallel_size_local", "reconfigure_for_independent_dp_rank(self)",
        "use_ubatching", "enable_batch_sharded_sampling", "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
    "vllm.config:SchedulerConfig": [
        "max_num_active_seqs", "async_scheduling", "scheduler_cls", "max_num_batched_tokens",
        "max_num_scheduled_tokens", "max_num_seqs",
    ],
    "vllm.config:SpeculativeConfig": [
        "method", "draft_model_config",
        "num_speculative_tokens", "num_speculative_tokens_per_batch_size",
        patch("max_num_new_slots_for_drafting",
            "0.32 is no longer supported: 0.33 counts none",
            "for block heads, in 0.32, counts these rows in the target's batch too, which then "
            "has room for fewer requests"),
        patch("verify_equal_vocab_size_if_draft_model(self)",
            "vLLM's heterogeneous vocabularies draw at any temperature, on V2 too",
            "refuses drafts with another vocabulary size, whenever a configuration is made or "
            "copied; ours are mapped, where vLLM's use_heterogeneous_vocab is greedy and for V1"),
        patch("__repr__(self)", _NEW_METHOD, "vLLM's log would name the method draft_model"),
    ],
    "vllm.config:VllmConfig": [
        "use_v2_model_runner", "watermark_config",
        patch("_set_max_num_scheduled_tokens(self)",
            "vLLM asks the speculative method how many requests it drafts for",
            "for block heads, from 0.33 on, lowers max_num_active_seqs so that a pass has a row "
            "for each draft; trees' passes need one for each level, and take part of a batch"),
        patch("_maybe_disable_dynamic_sd_for_data_parallel(self)",
            "vLLM asks whether the replicas draft in lock step, and speculative methods for a "
            "schedule",
            "takes schedules from data-parallel engines, whose replicas would run unequal numbers "
            "of drafting passes; with trees replicas draft alone. Ours fits the schedule and CUDA "
            "graph sizes to the engine's limits, which are known by then"),
        patch("_limit_max_model_len_to_draft(self)",
            "vLLM asks the speculative method whether it can stop drafting for a request",
            "cuts the engine's length to the draft's; ours gives requests beyond it no drafts",
            since=(0, 33)),
    ],
    "vllm.distributed.parallel_state": ["get_tp_group(...)", "get_world_group(...)"],
    "vllm.engine.arg_utils:EngineArgs": [
        "offload_backend", "cpu_offload_gb", "cpu_offload_params", "offload_group_size",
        "offload_num_in_group", "offload_prefetch_step", "offload_params",
        patch("create_engine_config(self, usage_context, headless)", _NEW_METHOD,
            "checks the contract and refuses unsupported set-ups in the user's own process"),
        patch(
            "create_speculative_config(self, target_model_config, "
            "target_parallel_config)", _NEW_METHOD,
            "translates method 'sequoia' into 'draft_model', whose scheduling trees need"),
        patch("add_cli_args(parser)", _NEW_METHOD,
            "parses --speculative-config as JSON, which the bare word sequoia is not"),
    ],
    "vllm.envs": ["environment_variables"],  # VLLM_USE_V2_MODEL_RUNNER is one of them
    "vllm.exceptions": ["VLLMValidationError(message, parameter, value, ...)"],
    "vllm.forward_context": [
        "set_forward_context(attn_metadata, vllm_config, num_tokens, num_tokens_across_dp, "
        "cudagraph_runtime_mode, batch_descriptor, ubatch_slices, slot_mapping, ...)",
    ],
    "vllm.model_executor.layers.attention_layer_base": ["AttentionLayerBase"],
    "vllm.model_executor.layers.linear": ["UnquantizedLinearMethod"],
    "vllm.model_executor.layers.logits_processor:LogitsProcessor": [
        "forward(self, lm_head, hidden_states, embedding_bias, ...)",
    ],
    "vllm.model_executor.layers.vocab_parallel_embedding": [
        "ParallelLMHead(num_embeddings, embedding_dim, bias, params_dtype, ...)",
        "UnquantizedEmbeddingMethod.process_weights_after_loading(self, layer)",
        "VocabParallelEmbeddingShardIndices.num_org_elements",
    ],
    "vllm.model_executor.offloader.base": ["set_offloader(instance)"],
    "vllm.platforms": ["CpuArchEnum.X86"],
    "vllm.platforms.interface": ["Platform.is_cpu(self, ...)"],
    "vllm.sampling_params": [
        patch("SamplingParams._validate_spec_decode(self, speculative_config)", _ASKS,
            "refuses min_p and logit_bias with any speculation; Sequoia serves them"),
    ],
    "vllm.transformers_utils.config": [
        "get_config(model, trust_remote_code, revision, code_revision, config_format, "
        "hf_overrides_kw, hf_overrides_fn, kwargs, ...)",
        "get_hf_text_config(config, ...)",
    ],
    "vllm.transformers_utils.configs.speculators": ["SpeculatorsConfig(kwargs)"],
    "vllm.v1.attention.backends.registry": ["register_backend(backend, class_path, ...)"],
    "vllm.v1.attention.selector": ["_cached_get_attn_backend.cache_clear"],
    "vllm.v1.core.sched.output:CachedRequestData": [
        "req_ids", "new_block_ids", "num_computed_tokens",
    ],
    "vllm.v1.core.sched.output:NewRequestData": [
        "req_id", "num_computed_tokens", "block_ids",
    ],
    "vllm.v1.core.sched.output:SchedulerOutput": [
        "num_scheduled_tokens", "finished_req_ids", "total_num_scheduled_tokens",
        "num_spec_tokens_to_schedule", "has_structured_output_requests",
        "scheduled_spec_decode_tokens", "scheduled_new_reqs", "scheduled_cached_reqs",
        "preempted_req_ids",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler": [
        "get_request_counts(self)", "update_draft_token_ids(self, draft_token_ids)",
        patch("schedule(self, throttle_prefills)", _SLOTS,
            "allocates slots for the largest number of drafts at any batch size, and looks the "
            "batch's number up later; ours sets both while it schedules a step"),
        instance("num_lookahead_tokens", _SLOTS,
            "slots for the drafts of a step's batch, while it is scheduled"),
        instance("dynamic_sd_lookup", _SLOTS,
            "cut to the drafts that there are slots for, while a step is scheduled"),
        patch("update_from_output(self, scheduler_output, model_runner_output)", _METRICS,
            "moves the counts from the model runner's output to the statistics"),
        patch("_handle_stopped_request(self, request)",
            "vLLM goes back to the turn's end",
            "continues a resumable request after all drafts that its last step accepted, although "
            "its turn ended before them"),
        patch(
            "make_stats(self, spec_decoding_stats, kv_connector_stats, cudagraph_stats, "
            "perf_stats, ec_connector_stats)", _METRICS,
            "counts accepted positions up to the number of nodes; a path ends at the tree's "
            "depth"),
    ],
    "vllm.v1.engine.core": [
        patch("EngineCore.post_step(self, model_executed)",
            "vLLM's engine core sends workers one message per step",
            "asks the workers for drafts, which the step's output has brought"),
    ],
    "vllm.v1.engine.llm_engine": [
        patch("LLMEngine.get_metrics(self)",
            "vLLM reads metrics of other names",
            "reads metrics that are named vllm:... only; ours are sequoia:..."),
    ],
    "vllm.v1.kv_cache_interface": ["KVCacheSpec.block_size", "SlidingWindowSpec.sliding_window"],
    "vllm.v1.kv_cache_interface:KVCacheConfig": ["kv_cache_groups"],
    "vllm.v1.metrics.loggers": [
        patch(
            "StatLoggerManager.__init__(self, vllm_config, engine_idxs, custom_stat_loggers, "
            "enable_default_loggers, aggregate_engine_logging, client_count)", _METRICS,
            "adds the logger of trees; the entry points for stat loggers are for AsyncLLM only, "
            "and having one turns statistics on in every engine"),
    ],
    "vllm.v1.metrics.loggers:AggregateStatLoggerBase": [
        subclass(
            "record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)", _METRICS,
            "counts trees and shows them"),
        subclass("log", _METRICS, "writes the trees' interval line"),
        subclass("log_engine_initialized", _METRICS, "abstract; there is nothing to say"),
    ],
    "vllm.v1.metrics.loggers:PrometheusStatLogger": ["_counter_cls", "_gauge_cls"],
    "vllm.v1.metrics.reader": [
        "Counter(name, labels, value, ...)", "Gauge(name, labels, value, ...)",
    ],
    "vllm.v1.metrics.stats:SchedulerStats": [
        "num_running_reqs",
        added_field("sequoia_report", _METRICS,
            "takes the counts of trees to the front end; decoders drop fields they do not know"),
    ],
    "vllm.v1.outputs": [
        "EMPTY_MODEL_RUNNER_OUTPUT", "DraftTokenIds(req_ids, draft_token_ids)",
    ],
    "vllm.v1.request": ["Request.num_tokens"],
    "vllm.v1.sample.logits_processor": ["LOGITSPROCS_GROUP"],
    "vllm.v1.spec_decode.metrics": [
        "SpecDecodingStats.num_accepted_tokens_per_pos",
        patch(
            "SpecDecodingProm.__init__(self, speculative_config, labelnames, "
            "per_engine_labelvalues, is_diffusion)", _METRICS,
            "makes a counter for each node; a path ends at the tree's depth"),
    ],
    "vllm.v1.structured_output.backend_types": [
        "StructuredOutputBackend.allocate_token_bitmask(self, max_num_seqs)",
    ],
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar": [
        "accept_tokens(self, request_id, tokens)", "rollback(self, num_tokens)",
        "fill_bitmask(self, bitmask, batch_index)", "is_terminated(self)",
    ],
    "vllm.v1.structured_output.utils": ["strip_speculative_padding"],
    "vllm.v1.structured_output:StructuredOutputManager": [
        patch("validate_tokens(self, request, spec_tokens)", _TREE_GRAMMAR,
            "drops drafts after the first that a grammar forbids, as in a chain"),
        patch(
            "grammar_bitmask(self, requests, structured_output_request_ids, "
            "scheduled_spec_decode_tokens)", _TREE_GRAMMAR,
            "fills the masks of a chain; a node's is by its own path"),
        instance("_grammar_bitmask", _TREE_GRAMMAR,
            "room for the largest trees of all request slots; ours asks for one request's root"),
    ],
    "vllm.v1.worker.gpu_worker:Worker": [
        "_maybe_get_memory_pool_context(self, tag)", "take_draft_token_ids(self)",
        subclass("init_device(self)",
            "vLLM compares versions of plugins between nodes, and one node configures all",
            "refuses nodes with other versions or another tree, and tensor-parallel groups of "
            "mixed devices"),
        subclass("load_model(self, load_dummy_weights)",
            "vLLM has a place for tensors of speculators that are not weights",
            "ours then makes what trees need besides weights, in memory that sleep keeps, and "
            "refuses attention features that trees cannot use"),
        subclass("compile_or_warm_up_model(self)",
            "its warm-up has a sampled request without penalties; for statistics: never",
            "warms up with no request that only has a temperature; ours also forgets what vLLM's "
            "own dummy requests left in our statistics"),
        subclass("execute_model(self, scheduler_output)",
            "vLLM tells plugins how long the parts of a step take; vLLM's engine core sends "
            "workers one message per step",
            "timed for sequoia_stats; samples at once, where vLLM's engine core would send a "
            "second message for it; a step without requests brings the last counts of trees"),
        subclass("sample_tokens(self, grammar_output)", _METRICS,
            "timed for sequoia_stats; its output takes the counts of trees along"),
    ],
})  # fmt: skip
