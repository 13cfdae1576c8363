"""What the worker and attention on GPUs rely on."""

from __future__ import annotations

from sequoia_vllm.engine.expectations.expected import Expected

_BACKENDS = "vllm.v1.attention.backends"
_REGISTRY = f"{_BACKENDS}.registry:AttentionBackendEnum"
_FORWARD = (
    "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
    "output_scale", "output_block_scale",
)  # fmt: skip
_CLASSES = (f"{_BACKENDS}.flash_attn:FlashAttention", f"{_BACKENDS}.triton_attn:TritonAttention")

GPU = (
    # worker_gpu.py
    Expected("vllm.v1.worker.gpu_worker:Worker._make_model_runner", ("self",)),
    # v2/attention_gpu.py
    *(
        expected
        for prefix in _CLASSES
        for expected in (
            Expected(f"{prefix}Impl.forward", _FORWARD),
            Expected(f"{prefix}MetadataBuilder._cudagraph_support"),
            Expected(f"{prefix}Backend.get_impl_cls", ()),
            Expected(f"{prefix}Backend.get_builder_cls", ()),
        )
    ),
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
)  # fmt: skip
