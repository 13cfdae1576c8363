"""What the worker, the runner's graphs and attention on GPUs override and rely on."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.entry import subclass, swap, table

_RUNNER_CLASS = "the worker asks a method for its runner class"
_KERNELS = "vLLM's attention kernels take a tree mask per request"
_TREE_MASK = "vLLM's metadata carries a tree mask"
_RANGES = "vLLM captures for each range of a schedule its own batches"

_FLASH = "vllm.v1.attention.backends.flash_attn"
_TRITON = "vllm.v1.attention.backends.triton_attn"

# What each of vLLM's attention backends has; the classes' names begin with the backend's.
_IMPLEMENTATION = (
    # What layers may ask of attention, all of which trees know or refuse.
    "(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, "
    "logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks, ...)",
    subclass(
        "forward(self, layer, query, key, value, kv_cache, attn_metadata, output, "
        "output_scale, output_block_scale)", _KERNELS,
        "kernels treat requests as chains; rows of tree nodes go through ours"),
    subclass("fused_output_quant_supported(self, quant_key)", _KERNELS,
        "no: where vLLM's kernels write quantised outputs, ours would write the trees' rows as "
        "the queries are"),
)  # fmt: skip
_METADATA_BUILDER = subclass(
    "_cudagraph_support", _TREE_MASK,
    "a full CUDA graph holds trees of one size, or one token per request",
)  # fmt: skip
_BACKEND = (
    subclass("get_impl_cls()", _KERNELS, "names the two classes above"),
    subclass("get_builder_cls()", _KERNELS, "names the two classes above"),
    subclass("supports_kv_cache_update_bypass", _KERNELS,
        "off: layers may pass no keys and values to forward", since=(0, 33)),
)  # fmt: skip

GPU = table({
    "vllm.config.compilation": ["CUDAGraphMode.separate_routine(self)"],
    "vllm.model_executor.offloader.prefetch": [
        "_ModuleOffloader.get_param_infos(self)", "ParamInfo.num_bytes",
    ],
    "vllm.utils.torch_utils": ["canonicalize_singleton_dim_strides(t)"],
    "vllm.v1.attention.backend": ["AttentionCGSupport.UNIFORM_BATCH"],
    "vllm.v1.attention.backends.registry": [
        "AttentionBackendEnum.FLASH_ATTN.clear_override()",
        "AttentionBackendEnum.TRITON_ATTN.clear_override()",
        "AttentionBackendEnum.FLASHINFER.clear_override()",
    ],
    "vllm.v1.worker.gpu.cudagraph_utils": [
        subclass("CudaGraphManager._init_candidates(self)", _RANGES,
            "full graphs of the schedule's batches, found by number of drafts"),
    ],
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor": [
        "cg_mode", "num_tokens", "num_reqs", "uniform_token_count", "num_active_loras",
    ],
    "vllm.v1.worker.gpu.model_runner": [
        swap("ModelCudaGraphManager", _RANGES,
            "initialize_kv_cache builds the manager of the target's graphs by this name"),
        subclass(
            "GPUModelRunner.initialize_kv_cache(self, kv_cache_config, is_profiling, "
            "kv_cache_allocation_context, ...)", _RANGES,
            "see model_runner.ModelCudaGraphManager"),
    ],
    "vllm.v1.worker.gpu_worker": [
        subclass("Worker._make_model_runner(self)", _RUNNER_CLASS,
            "makes vLLM's runner; ours serves trees"),
        swap("warmup_kernels(model_runner, worker_execute_model, worker_sample_tokens)",
            "vLLM's warm-up follows its schedule by batch size",
            "scores the largest number of drafts for max_num_seqs requests after the KV cache has "
            "taken the memory: many times the logits of any scheduled step, and no smaller trees. "
            "Ours shows it a runner with fewer requests, once for each size of trees"),
    ],
    # Attention. Rows after the trees get metadata of their own: fields about requests are cut.
    _FLASH: [
        "FlashAttentionMetadata(num_actual_tokens, max_query_len, query_start_loc, max_seq_len, "
        "seq_lens, block_table, slot_mapping, max_dcp_context_kv_len, dcp_context_kv_lens, "
        "num_decode_reqs, num_prefill_reqs, num_decode_tokens, num_prefill_tokens, "
        "scheduler_metadata, max_num_splits, causal, mm_prefix_query_range_tensor, "
        "rswa_prefix_lens, rswa_window, rswa_window_tensor)",
    ],
    f"{_FLASH}:FlashAttentionImpl": _IMPLEMENTATION,
    f"{_FLASH}:FlashAttentionMetadataBuilder": [_METADATA_BUILDER],
    f"{_FLASH}:FlashAttentionBackend": _BACKEND,
    _TRITON: [
        "TritonAttentionMetadata(num_actual_tokens, max_query_len, query_start_loc, max_seq_len, "
        "seq_lens, block_table, slot_mapping, seq_threshold_3D, num_par_softmax_segments, "
        "softmax_segm_output, softmax_segm_max, softmax_segm_expsum, causal, scheduler_metadata, "
        "mm_prefix_range, mm_prefix_range_tensor, rswa_prefix_lens, rswa_window)",
    ],
    f"{_TRITON}:TritonAttentionImpl": _IMPLEMENTATION,
    f"{_TRITON}:TritonAttentionMetadataBuilder": [_METADATA_BUILDER],
    f"{_TRITON}:TritonAttentionBackend": _BACKEND,
    # Last: without its libraries (CPU builds) only the backends, loaded first, leave it there.
    "vllm.vllm_flash_attn.flash_attn_interface": [
        "flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, "
        "seqused_k, q_v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, "
        "deterministic, return_attn_probs, block_table, return_softmax_lse, out, "
        "scheduler_metadata, q_descale, k_descale, v_descale, num_splits, output_scale, "
        "fa_version, ...)",
    ],
})  # fmt: skip
