"""What the parts on CPUs override and rely on: vLLM's V1 runner, and what V2 shares there."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.entry import instance, subclass, swap, table

_ASKS = "vLLM asks the speculative method"
_V2_ON_CPUS = "vLLM's V2 runner runs on CPUs (vllm-project/vllm#55847): v2/ has its part"
_RUNNER_CLASS = "the worker asks a method for its runner class"
_TREE_MASK = "vLLM's metadata carries a tree mask"
_CPU_KERNEL = "vLLM's CPU kernel takes a tree mask"
_DISK = "vLLM offloads weights on CPUs"
_NO_LAYERS = "a draft without layers takes slots of the target's first cache group"

CPU_V1 = table({
    "vllm.config.model": ["PROCESSED_LOGPROBS_MODES"],
    # It has no `all_gatherv`, which replicas in lock step need.
    "vllm.distributed.device_communicators.cpu_communicator": ["CpuCommunicator"],
    # If a layer has `_cpu_skip_gemm_dispatch`, vLLM does not pack its weights into memory that only
    # oneDNN knows. Our offloader notices where it does.
    "vllm.model_executor.layers.linear": [
        "UnquantizedLinearMethod.process_weights_after_loading(self, layer)",
    ],
    # On offloaded layers it is followed by the packed weight's way back to the file.
    "vllm.model_executor.layers.quantization.base_config": [
        "QuantizeMethodBase.process_weights_after_loading(self, layer)",
    ],
    "vllm.model_executor.offloader.base:BaseOffloader": [
        *(
            subclass(method, _DISK, "vLLM's offloaders are for GPUs")
            for method in (
                "wrap_modules(self, modules_generator, prefix)", "post_init(self)",
                "_wait_for_layer(self, layer_idx)", "_start_prefetch(self, layer_idx)",
            )
        ),
    ],
    "vllm.model_executor.offloader.prefetch_ops": [
        "_wait_prefetch_impl(input_tensor, layer_idx)",
        "_start_prefetch_impl(output_tensor, layer_idx)",
    ],
    "vllm.tokenizers.protocol": ["TokenizerLike.convert_ids_to_tokens(self, ids, ...)"],
    "vllm.v1.attention.backend": [
        "CommonAttentionMetadata(query_start_loc, query_start_loc_cpu, seq_lens, num_reqs, "
        "num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, slot_mapping, causal, "
        "...)",
        "CommonAttentionMetadata.positions",
    ],
    "vllm.v1.attention.backends.cpu_attn": [
        "CPUAttentionMetadata(num_actual_tokens, max_query_len, query_start_loc, max_seq_len, "
        "seq_lens, block_table, slot_mapping, scheduler_metadata, ...)",
        "CPUAttentionBackendImpl(num_heads, head_size, scale, num_kv_heads, alibi_slopes, "
        "sliding_window, kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name, "
        "sinks, ...)",
        subclass(
            "CPUAttentionBackendImpl.forward(self, layer, query, key, value, kv_cache, "
            "attn_metadata, output, output_scale, output_block_scale)", _CPU_KERNEL,
            "the kernel has no mask argument"),
    ],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": [
        subclass("get_impl_cls()", _CPU_KERNEL, "names the two classes above"),
        subclass("get_builder_cls()", _CPU_KERNEL, "names the two classes above"),
    ],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder": [
        "_set_isa_to_layers",
        instance("isa", _CPU_KERNEL, "the cache layout that our kernel reads"),
    ],
    "vllm.v1.attention.backends.registry": ["AttentionBackendEnum.CPU_ATTN.clear_override()"],
    "vllm.v1.core.sched.output": ["CachedRequestData.resumed_req_ids"],
    "vllm.v1.sample.logits_processor": [
        "BatchUpdate(batch_size, removed, added, moved)",
    ],
    "vllm.v1.sample.ops.topk_topp_sampler": ["apply_top_k_top_p(logits, k, p, ...)"],
    "vllm.v1.sample.sampler:Sampler": [
        "greedy_sample(logits, ...)", "gather_logprobs(logprobs, num_logprobs, token_ids, ...)",
    ],
    # A budget stays in the row of a request that ended (0.32): we tell it of rows without one.
    "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder": [
        "has_tracked_requests(self)", "sync_batch(self, batch_update)",
    ],
    "vllm.v1.spec_decode.draft_model:DraftModelProposer": [
        "(vllm_config, device, runner)",
        "build_per_group_and_layer_attn_metadata(self, common_attn_metadata, ...)",
        subclass(
            "dummy_run(self, num_tokens, use_cudagraphs, is_graph_capturing, "
            "slot_mappings)", _V2_ON_CPUS,
            "runs one forward per speculative token; a tree needs one per level"),
        subclass("_get_model(self)",
            "vLLM's heterogeneous vocabularies draw at any temperature",
            "matches vocabularies, and may trim the draft's output layer; drafts may be no models"),
    ],
    "vllm.v1.spec_decode.llm_base_proposer": [
        subclass("SpecDecodeBaseProposer.initialize_attn_backend(self, kv_cache_config, "
            "kernel_block_sizes)", _V2_ON_CPUS, "takes a draft to have layers"),
        instance("SpecDecodeBaseProposer.kv_cache_gid", _V2_ON_CPUS, _NO_LAYERS),
        instance("SpecDecodeBaseProposer.block_size", _V2_ON_CPUS, _NO_LAYERS),
    ],
    "vllm.v1.spec_decode.metadata": [
        "SpecDecodeMetadata(draft_token_ids, num_draft_tokens, cu_num_draft_tokens, "
        "cu_num_sampled_tokens, target_logits_indices, bonus_logits_indices, logits_indices)",
    ],
    "vllm.v1.worker.cpu.model_runner": [
        swap("CPUModelRunner(vllm_config, device)", _RUNNER_CLASS,
            "CPUWorker.init_device imports the V2 runner by this name"),
    ],
    "vllm.v1.worker.cpu_model_runner": [
        subclass("CPUModelRunner.load_model(self, load_dummy_weights)",
            "the CPU platform honours a backend chosen by the speculative method",
            "sets our attention backend while layers look theirs up; refuses attention features "
            "that trees cannot use"),
    ],
    "vllm.v1.worker.cpu_worker": [
        swap("CPUModelRunner(vllm_config, device)", _RUNNER_CLASS,
            "CPUWorker.init_device builds the runner by this name"),
    ],
    "vllm.v1.worker.cpu_worker:CPUWorker": [
        subclass("init_device(self)", _RUNNER_CLASS,
            "see cpu_worker.CPUModelRunner, and cpu.model_runner.CPUModelRunner for V2"),
        subclass("compile_or_warm_up_model(self)",
            "see gpu_worker.Worker", "see gpu_worker.Worker"),
        subclass("load_model(self, load_dummy_weights)", _DISK,
            "sets our offloader before models are built; vLLM's V1 runner on CPUs never calls "
            "post_init"),
        subclass("shutdown(self)", _DISK, "ends the threads that read weights"),
        *(
            subclass(method, _DISK, "refused by name where weights are on a disk: parameters of "
                "offloaded layers are buffers that layers share")
            for method in (
                "reload_weights", "reset_weights", "compute_weight_checksums",
                "save_sharded_state", "save_tensorized_model",
            )
        ),
    ],
    "vllm.v1.worker.gpu_model_runner": [
        swap(
            "build_logitsprocs(vllm_config, device, is_pin_memory, is_pooling_model, "
            "custom_logitsprocs)", _ASKS,
            "drops logits processors when speculating; requests that need them get no drafts "
            "here"),
        instance("GPUModelRunner.input_batch.generators",
            "see _bookkeeping_sync",
            "empty while _bookkeeping_sync rewinds what it finds there"),
        instance("GPUModelRunner.input_batch.thinking_budget_state_holder.in_spec_mode",
            "vLLM counts the rows that its sampler is given",
            "requests with a budget have no drafts, and in a step without any the holder counts no "
            "rows for them: it forces the first request's tokens"),
    ],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": [
        subclass("_update_states(self, scheduler_output)", _V2_ON_CPUS,
            "forgets drafts of finished requests"),
        subclass("_prepare_inputs(self, scheduler_output, num_scheduled_tokens)", _V2_ON_CPUS,
            "tree nodes have the RoPE position of their depth, and a slot of their own"),
        instance("speculative_config",
            "vLLM prepares no drafts where none are scheduled",
            "None while inputs without drafts are prepared, and in steps that draft nothing: vLLM "
            "would prepare drafts that are not there, which takes longer than such a step has to "
            "spare"),
        subclass("execute_model(self, scheduler_output, intermediate_tensors)",
            "vLLM prepares no drafts where none are scheduled",
            "a step that neither scores nor grows trees runs as without speculation"),
        subclass("sample_tokens(self, grammar_output)",
            "vLLM prepares no drafts where none are scheduled",
            "ends what execute_model began"),
        subclass(
            "_calc_spec_decode_metadata(self, num_draft_tokens, "
            "cu_num_scheduled_tokens)", _V2_ON_CPUS,
            "computes more than the rows of logits that we read, and takes longer than a step "
            "without drafts has to spare"),
        subclass(
            "_build_attention_metadata(self, num_tokens, num_reqs, max_query_len, "
            "num_tokens_padded, num_reqs_padded, ubatch_slices, logits_indices, "
            "max_num_sampled_tokens, use_spec_decode, for_cudagraph_capture, num_scheduled_tokens, "
            "slot_mappings)", _TREE_MASK,
            "attention metadata has no place for a tree"),
        instance("attn_groups",
            "vLLM builds no metadata for layers that do not run",
            "lacks the draft's while the target's metadata is built: the draft builds its own"),
        subclass(
            "_model_forward(self, input_ids, positions, intermediate_tensors, inputs_embeds, "
            "model_kwargs)", _V2_ON_CPUS,
            "timed for sequoia_stats"),
        subclass("_sample(self, logits, spec_decode_metadata)", _V2_ON_CPUS,
            "the Sequoia verifier in place of the rejection sampler, then the KV commit"),
        subclass(
            "_bookkeeping_sync(self, scheduler_output, sampler_output, logits, hidden_states, "
            "num_scheduled_tokens)",
            "vLLM stops rewinding on CPUs",
            "rewinds generators of unfinished prefills, which CPU generators cannot do; _sample "
            "does not advance them"),
        subclass("_input_fits_in_drafter(self, common_attn_metadata)", _V2_ON_CPUS,
            "stops drafting for the whole batch when one request is near the end"),
        subclass(
            "propose_draft_token_ids(self, scheduler_output, sampled_token_ids, sampling_metadata, "
            "hidden_states, sample_hidden_states, aux_hidden_states, spec_decode_metadata, "
            "common_attn_metadata, slot_mappings)", _V2_ON_CPUS,
            "grows trees, not chains"),
        instance("drafter", _V2_ON_CPUS, "the proposer of chains; ours grows trees"),
    ],
    "vllm.v1.worker.utils": ["AttentionGroup.layer_names"],
})  # fmt: skip
