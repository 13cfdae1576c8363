"""What the parts on CPUs override and rely on: vLLM's V1 runner, and what V2 shares there."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.expected import Expected
from sequoia_vllm.engine.compat.ledger.override import Override

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_PROPOSER = "vllm.v1.spec_decode.draft_model:DraftModelProposer"
_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_SAMPLER = "vllm.v1.sample.sampler:Sampler"

_TREE_HOOKS = "vLLM's V2 runner runs on CPUs (vllm-project/vllm#55847): v2/ has its part"
_RUNNER_CLASS = "the worker asks a method for its runner class"
_TREE_MASK = "vLLM's metadata carries a tree mask"
_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_OFFLOADER = "vllm.model_executor.offloader.base"
_DISK = "vLLM offloads weights on CPUs"
_CPU_KERNEL = "vLLM's CPU kernel takes a tree mask"

CPU_V1: tuple[Expected | Override, ...] = (
    # replicas.py: it has no `all_gatherv`, which replicas in lock step need.
    Expected("vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator"),
    # stand_ins.py
    Expected(
        "vllm.tokenizers.protocol:TokenizerLike.convert_ids_to_tokens", ("self", "ids"),
        may_grow=True,
    ),
    # worker_cpu.py
    Override(
        f"{_WORKER}.init_device", ("self",),
        kind="subclass",
        why="see cpu_worker.CPUModelRunner and, with V2, cpu_model_runner_v2.CPUModelRunner",
        until=_RUNNER_CLASS,
    ),
    Override(
        "vllm.v1.worker.cpu_worker:CPUModelRunner", ("vllm_config", "device"),
        kind="swap",
        why="CPUWorker.init_device builds the runner by this name",
        until=_RUNNER_CLASS,
    ),
    Override(
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner", ("vllm_config", "device"),
        kind="swap",
        why="CPUWorker.init_device imports the V2 runner by this name",
        until=_RUNNER_CLASS,
    ),
    Override(
        f"{_WORKER}.compile_or_warm_up_model", ("self",),
        kind="subclass", why="see gpu_worker.Worker", until="see gpu_worker.Worker",
    ),
    Expected(
        "vllm.v1.attention.backends.registry:AttentionBackendEnum.CPU_ATTN.clear_override", ()
    ),
    # offload/
    Override(
        f"{_WORKER}.load_model", ("self", "load_dummy_weights"),
        kind="subclass",
        why="our offloader before models are built; vLLM's V1 runner on CPUs never calls post_init",
        until=_DISK,
    ),
    Override(
        f"{_WORKER}.shutdown", ("self",),
        kind="subclass", why="ends the threads that read weights", until=_DISK,
    ),
    *(
        Override(
            f"{_OFFLOADER}:BaseOffloader.{name}", parameters,
            kind="subclass", why="vLLM's offloaders are for GPUs", until=_DISK,
        )
        for name, parameters in (
            ("wrap_modules", ("self", "modules_generator", "prefix")),
            ("post_init", ("self",)),
            ("_wait_for_layer", ("self", "layer_idx")),
            ("_start_prefetch", ("self", "layer_idx")),
        )
    ),
    Expected(
        "vllm.model_executor.offloader.prefetch_ops:_wait_prefetch_impl",
        ("input_tensor", "layer_idx"),
    ),
    Expected(
        "vllm.model_executor.offloader.prefetch_ops:_start_prefetch_impl",
        ("output_tensor", "layer_idx"),
    ),
    # Followed, on the methods of offloaded layers, by the packed weight's way back to the file.
    Expected(
        "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase."
        "process_weights_after_loading",
        ("self", "layer"),
    ),
    # Where it finds `_cpu_skip_gemm_dispatch` on a layer, vLLM does not pack its weights into
    # memory that only oneDNN knows; our offloader notices where it does.
    Expected(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading",
        ("self", "layer"),
    ),
    # v1/runner.py
    Override(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
        ("self", "load_dummy_weights"),
        kind="subclass",
        why="our attention backend while layers look theirs up; then refuses attention features "
        "that trees cannot use",
        until="the CPU platform honours a backend chosen by the speculative method",
    ),
    Override(
        "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
        kind="swap",
        why="drops logits processors when speculating; requests that need them get no drafts here",
        until="vLLM asks the speculative method",
    ),
    Expected("vllm.v1.sample.logits_processor:BUILTIN_LOGITS_PROCESSORS"),
    Override(
        f"{_RUNNER}._update_states", ("self", "scheduler_output"),
        kind="subclass", why="forgets drafts of finished requests", until=_TREE_HOOKS,
    ),
    Expected("vllm.v1.core.sched.output:CachedRequestData.resumed_req_ids"),
    Override(
        f"{_RUNNER}._prepare_inputs", ("self", "scheduler_output", "num_scheduled_tokens"),
        kind="subclass",
        why="tree nodes have the RoPE position of their depth, and a slot of their own",
        until=_TREE_HOOKS,
    ),
    Override(
        f"{_RUNNER}.speculative_config",
        kind="instance",
        why="none while inputs without drafts are prepared: what vLLM prepares of drafts that are "
        "not there takes longer than such a step has to spare",
        until="vLLM prepares no drafts where none are scheduled",
    ),
    Override(
        f"{_RUNNER}._calc_spec_decode_metadata",
        ("self", "num_draft_tokens", "cu_num_scheduled_tokens"),
        kind="subclass",
        why="only the rows of logits are read: the rest of it takes longer than a step without "
        "drafts has to spare",
        until=_TREE_HOOKS,
    ),
    Expected(
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata",
        (
            "draft_token_ids", "num_draft_tokens", "cu_num_draft_tokens", "cu_num_sampled_tokens",
            "target_logits_indices", "bonus_logits_indices", "logits_indices",
        ),
    ),
    Override(
        f"{_RUNNER}._build_attention_metadata",
        (
            "self", "num_tokens", "num_reqs", "max_query_len", "num_tokens_padded",
            "num_reqs_padded", "ubatch_slices", "logits_indices", "max_num_sampled_tokens",
            "use_spec_decode", "for_cudagraph_capture", "num_scheduled_tokens", "slot_mappings",
        ),
        kind="subclass", why="attention metadata has no place for a tree", until=_TREE_MASK,
    ),
    Override(
        f"{_RUNNER}.attn_groups",
        kind="instance",
        why="without the draft's while the target's metadata is built: the draft builds its own",
        until="vLLM builds no metadata for layers that do not run",
    ),
    Expected("vllm.v1.worker.utils:AttentionGroup.layer_names"),
    Override(
        f"{_RUNNER}._model_forward",
        (
            "self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds",
            "model_kwargs",
        ),
        kind="subclass", why="timed for sequoia_stats", until=_TREE_HOOKS,
    ),
    Override(
        f"{_RUNNER}._sample", ("self", "logits", "spec_decode_metadata"),
        kind="subclass",
        why="the Sequoia verifier in place of the rejection sampler, then the KV commit",
        until=_TREE_HOOKS,
    ),
    Override(
        f"{_RUNNER}._bookkeeping_sync",
        (
            "self", "scheduler_output", "sampler_output", "logits", "hidden_states",
            "num_scheduled_tokens",
        ),
        kind="subclass",
        why="rewinds generators of unfinished prefills, which CPU generators cannot do; "
        "_sample does not advance them",
        until="vLLM stops rewinding on CPUs",
    ),
    Override(
        f"{_RUNNER}.input_batch.generators",
        kind="instance",
        why="empty while _bookkeeping_sync rewinds what it finds there",
        until="see _bookkeeping_sync",
    ),
    Override(
        f"{_RUNNER}.input_batch.thinking_budget_state_holder.in_spec_mode",
        kind="instance",
        why="requests with a budget have no drafts, and in a step without any the holder counts "
        "no rows for them: it forces the first request's tokens",
        until="vLLM counts the rows that its sampler is given",
    ),
    Override(
        f"{_RUNNER}._input_fits_in_drafter", ("self", "common_attn_metadata"),
        kind="subclass",
        why="stops drafting for the whole batch when one request is near the end",
        until=_TREE_HOOKS,
    ),
    Override(
        f"{_RUNNER}.propose_draft_token_ids",
        (
            "self", "scheduler_output", "sampled_token_ids", "sampling_metadata",
            "hidden_states", "sample_hidden_states", "aux_hidden_states",
            "spec_decode_metadata", "common_attn_metadata", "slot_mappings",
        ),
        kind="subclass", why="grows trees, not chains", until=_TREE_HOOKS,
    ),
    Override(
        f"{_RUNNER}.drafter",
        kind="instance", why="the proposer of chains; ours grows trees", until=_TREE_HOOKS,
    ),
    # v1/proposer.py
    Expected(_PROPOSER, ("vllm_config", "device", "runner")),
    Override(
        f"{_PROPOSER}.dummy_run",
        ("self", "num_tokens", "use_cudagraphs", "is_graph_capturing", "slot_mappings"),
        kind="subclass",
        why="runs one forward per speculative token; a tree needs one per level",
        until=_TREE_HOOKS,
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
    # cpu_attention.py, v2/backend_cpu.py
    Expected(
        f"{_ATTENTION}:CPUAttentionMetadata",
        (
            "num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens",
            "block_table", "slot_mapping", "scheduler_metadata",
        ),
        may_grow=True,
    ),
    Override(
        f"{_ATTENTION}:CPUAttentionBackendImpl.forward",
        (
            "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
            "output_scale", "output_block_scale",
        ),
        kind="subclass", why="the kernel has no mask argument", until=_CPU_KERNEL,
    ),
    Expected(
        f"{_ATTENTION}:CPUAttentionBackendImpl",
        (
            "num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
            "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name",
            "sinks",
        ),
        may_grow=True,
    ),
    Override(
        f"{_ATTENTION}:CPUAttentionMetadataBuilder.build",
        ("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
        kind="subclass", why="metadata that can carry a tree", until=_TREE_MASK,
    ),
    Override(
        f"{_ATTENTION}:CPUAttentionMetadataBuilder.isa",
        kind="instance", why="the cache layout that our kernel reads", until=_CPU_KERNEL,
    ),
    Expected(f"{_ATTENTION}:CPUAttentionMetadataBuilder._set_isa_to_layers"),
    Override(
        f"{_ATTENTION}:CPUAttentionBackend.get_impl_cls", (),
        kind="subclass", why="names the two classes above", until=_CPU_KERNEL,
    ),
    Override(
        f"{_ATTENTION}:CPUAttentionBackend.get_builder_cls", (),
        kind="subclass", why="names the two classes above", until=_CPU_KERNEL,
    ),
    # v1/verifier.py, v1/target_distribution.py, v1/sampler_output.py
    Expected("vllm.config.model:PROCESSED_LOGPROBS_MODES"),
    Expected(f"{_SAMPLER}.greedy_sample", ("logits",), may_grow=True),
    Expected(
        f"{_SAMPLER}.gather_logprobs", ("logprobs", "num_logprobs", "token_ids"), may_grow=True
    ),
    Expected(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        ("logits", "k", "p"),
        may_grow=True,
    ),
)  # fmt: skip
