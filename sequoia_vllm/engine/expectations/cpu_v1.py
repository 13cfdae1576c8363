"""What the parts on vLLM's V1 model runner rely on: CPUs only."""

from __future__ import annotations

from sequoia_vllm.engine.expectations.expected import Expected

_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_PROPOSER = "vllm.v1.spec_decode.draft_model:DraftModelProposer"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_SAMPLER_V1 = "vllm.v1.sample.sampler:Sampler"

CPU_V1 = (
    # worker_cpu.py
    Expected("vllm.v1.worker.cpu_worker:CPUWorker.init_device", ("self",)),
    Expected("vllm.v1.worker.cpu_worker:CPUModelRunner", ("vllm_config", "device")),
    Expected("vllm.v1.worker.cpu.model_runner:CPUModelRunner", ("vllm_config", "device")),
    Expected("vllm.v1.worker.gpu_worker:Worker.load_model", ("self", "load_dummy_weights")),
    Expected(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN.clear_override", ()
    ),
    # v1/runner.py
    Expected(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
        ("self", "load_dummy_weights"),
    ),
    Expected(
        "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
    ),
    Expected("vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS"),
    Expected(f"{_RUNNER_V1}._update_states", ("self", "scheduler_output")),
    Expected("vllm.v1.core.sched.output:CachedRequestData.resumed_req_ids"),
    Expected("vllm.v1.core.sched.output:CachedRequestData.num_computed_tokens"),
    Expected(
        f"{_RUNNER_V1}._prepare_inputs", ("self", "scheduler_output", "num_scheduled_tokens")
    ),
    Expected(
        f"{_RUNNER_V1}._build_attention_metadata",
        (
            "self", "num_tokens", "num_reqs", "max_query_len", "num_tokens_padded",
            "num_reqs_padded", "ubatch_slices", "logits_indices", "max_num_sampled_tokens",
            "use_spec_decode", "for_cudagraph_capture", "num_scheduled_tokens", "slot_mappings",
        ),
    ),
    Expected(
        f"{_RUNNER_V1}._model_forward",
        (
            "self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds",
            "model_kwargs",
        ),
    ),
    Expected(f"{_RUNNER_V1}._sample", ("self", "logits", "spec_decode_metadata")),
    Expected(
        f"{_RUNNER_V1}._bookkeeping_sync",
        (
            "self", "scheduler_output", "sampler_output", "logits", "hidden_states",
            "num_scheduled_tokens",
        ),
    ),
    Expected(f"{_RUNNER_V1}._input_fits_in_drafter", ("self", "common_attn_metadata")),
    Expected(
        f"{_RUNNER_V1}.propose_draft_token_ids",
        (
            "self", "scheduler_output", "sampled_token_ids", "sampling_metadata",
            "hidden_states", "sample_hidden_states", "aux_hidden_states",
            "spec_decode_metadata", "common_attn_metadata", "slot_mappings",
        ),
    ),
    # v1/proposer.py
    Expected(_PROPOSER, ("vllm_config", "device", "runner")),
    Expected(
        f"{_PROPOSER}.dummy_run",
        ("self", "num_tokens", "use_cudagraphs", "is_graph_capturing", "slot_mappings"),
    ),
    Expected(
        f"{_PROPOSER}.build_per_group_and_layer_attn_metadata",
        ("self", "common_attn_metadata"),
        may_grow=True,
    ),
    Expected(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        (
            "query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs",
            "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor",
            "slot_mapping", "causal",
        ),
        may_grow=True,
    ),
    Expected("vllm.v1.attention.backend:CommonAttentionMetadata.positions"),
    Expected("vllm.forward_context:set_forward_context"),
    # cpu_attention.py, v2/backend_cpu.py
    Expected(
        f"{_CPU_ATTENTION}:CPUAttentionMetadata",
        (
            "num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens",
            "block_table", "slot_mapping", "scheduler_metadata",
        ),
        may_grow=True,
    ),
    Expected(
        f"{_CPU_ATTENTION}:CPUAttentionBackendImpl.forward",
        (
            "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
            "output_scale", "output_block_scale",
        ),
    ),
    Expected(
        f"{_CPU_ATTENTION}:CPUAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
    ),
    Expected(f"{_CPU_ATTENTION}:CPUAttentionMetadataBuilder._set_isa_to_layers"),
    Expected(f"{_CPU_ATTENTION}:CPUAttentionBackend.get_impl_cls", ()),
    # v1/verifier.py, v1/target_distribution.py, v1/sampler_output.py
    Expected("vllm.config.model:PROCESSED_LOGPROBS_MODES"),
    Expected(f"{_SAMPLER_V1}.greedy_sample", ("logits",), may_grow=True),
    Expected(
        f"{_SAMPLER_V1}.gather_logprobs", ("logprobs", "num_logprobs", "token_ids"), may_grow=True
    ),
    Expected(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        ("logits", "k", "p"),
        may_grow=True,
    ),
)  # fmt: skip
