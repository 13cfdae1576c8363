"""What the worker, the runner's graphs and attention on GPUs override and rely on."""

from __future__ import annotations

from collections.abc import Iterator

from sequoia_vllm.engine.compat.ledger.expected import Expected
from sequoia_vllm.engine.compat.ledger.override import Override

_BACKENDS = "vllm.v1.attention.backends"
_REGISTRY = f"{_BACKENDS}.registry:AttentionBackendEnum"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_PREFETCH = "vllm.model_executor.offloader.prefetch"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"

_KERNELS = "vLLM's attention kernels take a tree mask per request"
_TREE_MASK = "vLLM's metadata carries a tree mask"
_RANGES = "vLLM captures for each range of a schedule its own batches"


# The rows after the trees get metadata of their own: what a field says of requests or rows is cut.
_METADATA = (
    "num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens",
    "block_table", "slot_mapping",
)  # fmt: skip
_FLASH_METADATA = (
    *_METADATA, "max_dcp_context_kv_len", "dcp_context_kv_lens", "num_decode_reqs",
    "num_prefill_reqs", "num_decode_tokens", "num_prefill_tokens", "scheduler_metadata",
    "max_num_splits", "causal", "mm_prefix_query_range_tensor", "rswa_prefix_lens", "rswa_window",
    "rswa_window_tensor",
)  # fmt: skip
_TRITON_METADATA = (
    *_METADATA, "seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output",
    "softmax_segm_max", "softmax_segm_expsum", "causal", "scheduler_metadata", "mm_prefix_range",
    "mm_prefix_range_tensor", "rswa_prefix_lens", "rswa_window",
)  # fmt: skip


def _attention(prefix: str, metadata: tuple[str, ...]) -> Iterator[Expected | Override]:
    """Of one of vLLM's attention backends, whose five classes begin with ``prefix``."""
    yield Expected(f"{prefix}Metadata", metadata)
    yield Override(
        f"{prefix}Impl.forward",
        (
            "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
            "output_scale", "output_block_scale",
        ),
        kind="subclass",
        why="kernels treat requests as chains; rows of tree nodes go through ours",
        until=_KERNELS,
    )  # fmt: skip
    yield Override(
        f"{prefix}Impl.fused_output_quant_supported", ("self", "quant_key"),
        kind="subclass",
        why="no: where vLLM's kernels write quantised outputs, ours would write the trees' rows as "
        "the queries are",
        until=_KERNELS,
    )  # fmt: skip
    # What layers may ask of attention, all of which trees know or refuse.
    yield Expected(
        f"{prefix}Impl",
        (
            "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
            "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
            "sinks",
        ),
        may_grow=True,
    )  # fmt: skip
    yield Override(
        f"{prefix}MetadataBuilder._cudagraph_support",
        kind="subclass",
        why="a full CUDA graph holds trees of one size, or one token per request",
        until=_TREE_MASK,
    )
    for name in ("get_impl_cls", "get_builder_cls"):
        yield Override(
            f"{prefix}Backend.{name}",
            (),
            kind="subclass",
            why="names the two classes above",
            until=_KERNELS,
        )
    yield Override(
        f"{prefix}Backend.supports_kv_cache_update_bypass",
        kind="subclass",
        why="off: from 0.33.0 on layers may pass no keys and values to forward",
        until=_KERNELS,
        since=(0, 33),
    )


GPU: tuple[Expected | Override, ...] = (
    # worker_gpu.py
    Override(
        "vllm.v1.worker.gpu_worker:Worker._make_model_runner", ("self",),
        kind="subclass",
        why="makes vLLM's runner; ours has trees",
        until="the worker asks a method for its runner class",
    ),
    # worker_gpu.py, v2/warming_up.py
    Override(
        "vllm.v1.worker.gpu_worker:warmup_kernels",
        ("model_runner", "worker_execute_model", "worker_sample_tokens"),
        kind="swap",
        why="scores the largest number of drafts for max_num_seqs requests, or as many as the "
        "token budget has room for, when the KV cache has taken the memory: many times the logits "
        "that a schedule comes to; ours has fewer requests in the runner's scheduler_config",
        until="vLLM's warm-up follows its schedule by batch size",
    ),
    # v2/runner_gpu.py
    Override(
        f"{_RUNNER}:ModelCudaGraphManager",
        kind="swap",
        why="initialize_kv_cache builds the manager of the target's graphs by this name",
        until=_RANGES,
    ),
    Override(
        f"{_RUNNER}:GPUModelRunner.initialize_kv_cache",
        ("self", "kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        kind="subclass",
        why="see model_runner.ModelCudaGraphManager",
        until=_RANGES,
        may_grow=True,
    ),
    # offload/vllms.py
    Expected(f"{_PREFETCH}:_ModuleOffloader.get_param_infos", ("self",)),
    Expected(f"{_PREFETCH}:ParamInfo.num_bytes"),
    # v2/target_graphs.py
    Override(
        f"{_GRAPHS}:CudaGraphManager._init_candidates", ("self",),
        kind="subclass",
        why="full graphs of the schedule's batches, found by number of drafts",
        until=_RANGES,
    ),
    *(Expected(f"{_GRAPHS}:BatchExecutionDescriptor.{field}") for field in (
        "cg_mode", "num_tokens", "num_reqs", "uniform_token_count", "num_active_loras",
    )),
    Expected("vllm.config.compilation:CUDAGraphMode.separate_routine", ("self",)),
    # v2/attention_gpu.py
    *_attention(f"{_BACKENDS}.flash_attn:FlashAttention", _FLASH_METADATA),
    *_attention(f"{_BACKENDS}.triton_attn:TritonAttention", _TRITON_METADATA),
    Expected("vllm.v1.attention.backend:AttentionCGSupport.UNIFORM_BATCH"),
    Expected("vllm.utils.torch_utils:canonicalize_singleton_dim_strides", ("t",)),
    Expected(
        "vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",
        (
            "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k",
            "seqused_k", "q_v", "dropout_p", "softmax_scale", "causal", "window_size", "softcap",
            "alibi_slopes", "deterministic", "return_attn_probs", "block_table",
            "return_softmax_lse", "out", "scheduler_metadata", "q_descale", "k_descale",
            "v_descale", "num_splits", "output_scale", "fa_version",
        ),
        may_grow=True,
    ),
    # v2/backend_gpu.py
    Expected(f"{_REGISTRY}.FLASH_ATTN.clear_override", ()),
    Expected(f"{_REGISTRY}.TRITON_ATTN.clear_override", ()),
    Expected(f"{_REGISTRY}.FLASHINFER.clear_override", ()),
)  # fmt: skip
