"""What the parts on vLLM's Model Runner V2 override and rely on, on any device."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.expected import Expected
from sequoia_vllm.engine.compat.ledger.override import Override
from sequoia_vllm.engine.compat.ledger.v2_speculators import V2_SPECULATORS

_V2 = "vllm.v1.worker.gpu"
_RUNNER = f"{_V2}.model_runner:GPUModelRunner"
_GRAPHS = f"{_V2}.cudagraph_utils:CudaGraphManager"
_BATCH = f"{_V2}.input_batch:InputBatch"
_VERIFIER = f"{_V2}.spec_decode.rejection_sampler:RejectionSampler"
_MASKS = f"{_V2}.structured_outputs"
_OFFLOADER = "vllm.model_executor.offloader.base"

_TREES = "vLLM's V2 runner drafts, scores and verifies token trees itself"
_SPECULATOR_CLASS = "a speculative method of V2 brings its speculator and verifier"
_WHO_DRAFTS = "vLLM asks the speculative method which requests it drafts for"
_ADAPTERS = "vLLM's V2 runner maps all rows of logits to adapters"
_MASKS_OF_NODES = "vLLM's engine core sends one mask for each node, and makes room by its schedule"
_DRAFT_GRAPHS = "vLLM captures draft models' steps"

V2: tuple[Expected | Override, ...] = (
    *V2_SPECULATORS,
    # v2/adapters.py
    Expected(f"{_V2}.lora_utils:LoraState", ("max_num_reqs",)),
    Override(
        f"{_V2}.lora_utils:LoraState.make_lora_inputs",
        ("self", "req_ids", "idx_mapping", "num_scheduled_tokens"),
        kind="subclass",
        why="maps one row of logits of each request to its adapter; a tree has one for each node",
        until=_ADAPTERS,
    ),
    # v2/grammar_masks.py. How the masks of several requests lie is in no method's signature. It
    # changed with these: a version that has others is to be read anew.
    Expected(
        f"{_MASKS}:StructuredOutputsWorker",
        ("max_num_logits", "vocab_size", "device", "mask_stride"),
        since=(0, 33),
    ),
    Expected(
        f"{_MASKS}:StructuredOutputsWorker",
        ("max_num_logits", "vocab_size", "device", "mask_stride", "num_bonus_tokens"),
        before=(0, 33),
    ),
    Expected(
        f"{_MASKS}:_build_grammar_mapping",
        (
            "req_ids", "grammar_req_ids", "cu_num_logits_np", "num_draft_tokens_per_req",
            "num_bonus_tokens", "mask_stride",
        ),
        before=(0, 33),
    ),
    Override(
        f"{_MASKS}:StructuredOutputsWorker.apply_grammar_bitmask",
        ("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),
        kind="subclass",
        why="from 0.33.0 on each request has as many masks as the largest tree; ours as its own",
        until=_MASKS_OF_NODES,
    ),
    # v2/scheduler.py
    Override(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
        ("self", "scheduler_output"),
        kind="subclass",
        why="assumes drafts of every request while they are still being made; some requests get "
        "none",
        until=_WHO_DRAFTS,
    ),
    # v2/runner.py
    Expected(_RUNNER, ("vllm_config", "device")),
    Override(
        f"{_V2}.model_runner:init_speculator", ("vllm_config", "device", "req_states"),
        kind="swap",
        why="the runner's constructor builds the speculator with it, by method",
        until=_SPECULATOR_CLASS,
    ),
    Override(
        f"{_RUNNER}.load_model", ("self", "load_dummy_weights", "args", "model", "kwargs"),
        kind="subclass",
        why="our attention backends while layers look theirs up; says how much is offloaded",
        until="a backend can be chosen by the speculative method",
    ),
    Override(
        f"{_V2}.model_runner:StructuredOutputsWorker",
        kind="swap",
        why="load_model builds it by this name, with room for the largest trees of all request "
        "slots: gigabytes",
        until=_MASKS_OF_NODES,
    ),
    Override(
        f"{_RUNNER}.add_requests", ("self", "scheduler_output"),
        kind="subclass",
        why="notes what the draft has read of new requests, and how they sample",
        until=_SPECULATOR_CLASS,
    ),
    Override(
        f"{_RUNNER}.prepare_inputs",
        kind="subclass",
        why="tells the runner's adapters how many rows of logits each request has",
        until=_ADAPTERS,
    ),
    Override(
        f"{_RUNNER}.lora_state",
        kind="instance", why="maps adapters to requests; ours to nodes", until=_ADAPTERS,
    ),
    Override(
        f"{_RUNNER}.prepare_attn", ("self", "input_batch"),
        kind="subclass",
        why="tree nodes have the RoPE position of their depth, and a slot of their own",
        until=_TREES,
    ),
    Override(
        f"{_RUNNER}.model_state.prepare_attn",
        (
            "self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings",
            "attn_groups", "kv_cache_config", "for_capture", "ubatch_idx",
            "model_specific_attn_metadata",
        ),
        kind="instance",
        why="attention metadata has no place for a tree; the class of the model's state is vLLM's "
        "choice by model",
        until="vLLM's metadata carries a tree mask",
        checked_at=f"{_V2}.model_states.default:DefaultModelState.prepare_attn",
    ),
    Override(
        f"{_RUNNER}.sample", ("self", "hidden_states", "input_batch", "grammar_output"),
        kind="subclass",
        why="commits the accepted paths' keys and values, before anything reads them",
        until=_TREES,
    ),
    Override(
        f"{_RUNNER}.rejection_sampler",
        kind="instance", why="verifies chains; ours walks down trees", until=_SPECULATOR_CLASS,
    ),
    Override(
        f"{_RUNNER}.take_draft_token_ids", ("self",),
        kind="subclass",
        why="says that every request has drafts; some requests get none",
        until=_WHO_DRAFTS,
    ),
    Expected("vllm.v1.outputs:DraftTokenIds.req_ids"),
    Expected("vllm.v1.outputs:DraftTokenIds.draft_token_ids"),
    Expected("vllm.v1.core.sched.output:NewRequestData.sampling_params"),
    # the batch that v2/proposer.py, v2/tree_speculator.py and others of v2/ read
    Expected("vllm.config:VllmConfig.max_concurrent_batches"),
    Expected("vllm.utils.torch_utils:async_tensor_h2d", ("data", "device"), may_grow=True),
    Expected(f"{_V2}.states:RequestState"),
    *(Expected(f"{_BATCH}.{field}") for field in (
        "req_ids", "num_reqs", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping",
        "expanded_local_pos", "num_scheduled_tokens", "num_tokens", "num_draft_tokens",
        "num_draft_tokens_per_req", "query_start_loc", "query_start_loc_np", "seq_lens",
        "seq_lens_cpu_upper_bound", "num_computed_tokens_np", "is_prefilling_np", "input_ids",
        "positions", "logits_indices", "cu_num_logits", "cu_num_logits_np",
    )),
    # It is sorted: requests with drafts come first.
    Expected(
        f"{_V2}.model_runner:sort_batch_req_ids",
        ("num_tokens_per_req", "draft_tokens", "decode_query_len"),
    ),
    # v2/tree_memory.py
    Expected("vllm.model_executor.layers.logits_processor:LogitsProcessor"),
    # v2/draft_loading.py
    Expected(f"{_OFFLOADER}:get_offloader", ()),
    Expected(f"{_OFFLOADER}:NoopOffloader"),
    # v2/draft_model.py
    Expected(
        f"{_V2}.block_table:BlockTables.compute_slot_mappings",
        ("self", "idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "out"),
        may_grow=True,
    ),
    Expected("vllm.v1.attention.backends.utils:PAD_SLOT_ID"),
    # v2/draft_graphs.py
    Expected(
        _GRAPHS, ("vllm_config", "device", "cudagraph_mode", "decode_query_len"), may_grow=True
    ),
    Expected(f"{_GRAPHS}.capture", ("self", "create_forward_fn", "progress_bar_desc")),
    Expected(
        f"{_GRAPHS}.dispatch",
        ("self", "num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"),
        may_grow=True,
    ),
    Expected(f"{_GRAPHS}.run_fullgraph", ("self", "desc"), may_grow=True),
    Expected(
        f"{_V2}.cudagraph_utils:BatchExecutionDescriptor",
        ("cg_mode", "num_tokens", "num_reqs"),
        may_grow=True,
    ),
    Expected(
        f"{_V2}.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorBatchDescriptor"
        ".num_speculative_tokens"
    ),
    Expected("vllm.config.compilation:CUDAGraphMode.FULL_DECODE_ONLY"),
    Expected("vllm.config.compilation:CUDAGraphMode.decode_mode", ("self",)),
    # v2/draft_graphs.py, v2/target_graphs.py
    Override(
        f"{_GRAPHS}._capture_descs",
        kind="instance",
        why="shapes to capture: of growth also by number of drafts, and only batches that draft; "
        "of the target only what the schedule can reach",
        until=f"{_DRAFT_GRAPHS}, and for each range of a schedule its own batches",
    ),
    Override(
        f"{_GRAPHS}._candidates",
        kind="instance",
        why="gives a batch the next larger graph of any number of drafts, not the next of its own",
        until="vLLM looks graphs up by number of drafts",
    ),
    # v2/reading.py, v2/request_modes.py
    Expected(
        f"{_V2}.buffer_utils:StagedWriteTensor", ("size", "dtype", "device"), may_grow=True
    ),
    Expected(
        f"{_V2}.buffer_utils:StagedWriteTensor.stage_write_elem",
        ("self", "index", "x"),
        may_grow=True,
    ),
    Expected(f"{_V2}.buffer_utils:StagedWriteTensor.apply_write", ("self",), may_grow=True),
    Expected(f"{_V2}.buffer_utils:UvaBackedTensor", ("size", "dtype"), may_grow=True),
    Expected(f"{_V2}.buffer_utils:UvaBackedTensor.copy_to_uva", ("self",), may_grow=True),
    # v2/verifier.py, v2/logits_needs.py, v2/path_edits.py
    Expected(
        "vllm.model_executor.layers.vocab_parallel_embedding:pad_vocab_size",
        ("vocab_size", "pad_to"), may_grow=True,
    ),
    Expected(
        f"{_VERIFIER}.__call__",
        ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
    ),
    Expected(
        f"{_V2}.spec_decode.rejection_sampler:get_max_chunk_logits", ("vocab_size",), may_grow=True
    ),
    Expected(
        f"{_V2}.sample.sampler:Sampler.apply_sampling_params",
        (
            "self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos",
            "input_ids", "expanded_local_pos", "seq_lens_upper_bound_np",
        ),
        may_grow=True,
    ),
    Override(
        f"{_RUNNER}.sampler.logits_processors",
        kind="instance",
        why="penalties and bad words take the rows before a node for its history",
        until="vLLM's sampler is told each row's history",
    ),
    Override(
        f"{_VERIFIER}.sampler.add_request", ("self", "req_idx", "sampling_params"),
        kind="instance",
        why="one flag stands for all that a request's logits need; a temperature is the walk's "
        "work, for the few rows that it reads",
        until="vLLM tells temperature and other processing apart",
        checked_at=f"{_V2}.sample.sampler:Sampler.add_request",
    ),
    Override(
        f"{_VERIFIER}.sampler.sampling_states.add_request", ("self", "req_idx", "sampling_params"),
        kind="instance",
        why="raises that flag for a temperature",
        until="see RejectionSampler.sampler.add_request",
        checked_at=f"{_V2}.sample.states:SamplingStates.add_request",
    ),
    Expected(f"{_V2}.sample.states:SamplingStates", ("max_num_reqs", "vocab_size"), may_grow=True),
    *(
        Expected(f"{_V2}.sample.{kind}.apply", ("self", "logits", "ctx"))
        for kind in ("penalties:PenaltiesState", "bad_words:BadWordsState")
    ),
    *(
        Expected(f"{_V2}.sample.logits_processor.interface:LogitsContext.{field}")
        for field in ("expanded_idx_mapping", "idx_mapping_np", "expanded_local_pos", "input_ids")
    ),
    # Their kernels take what ours take.
    Expected(
        f"{_V2}.sample.penalties:apply_penalties",
        (
            "logits", "expanded_idx_mapping", "token_ids", "expanded_local_pos",
            "repetition_penalty", "frequency_penalty", "presence_penalty", "prompt_bin_mask",
            "output_bin_counts",
        ),
    ),
    Expected(
        f"{_V2}.sample.bad_words:apply_bad_words",
        (
            "logits", "expanded_idx_mapping", "bad_word_token_ids", "bad_word_offsets",
            "num_bad_words", "all_token_ids", "prompt_len", "total_len", "input_ids",
            "expanded_local_pos", "max_num_bad_words",
        ),
    ),
    Expected(
        f"{_V2}.sample.sampler:Sampler.get_logprobs_dims",
        ("self", "idx_mapping_np"),
        may_grow=True,
    ),
    Expected(
        f"{_V2}.sample.gumbel:gumbel_sample",
        (
            "logits", "expanded_idx_mapping", "temperature", "seed", "pos",
            "apply_temperature", "is_drafting",
        ),
        may_grow=True,
    ),
    Expected(
        f"{_V2}.sample.logprob:compute_topk_scores",
        (
            "logits", "num_logprobs", "sampled_token_ids", "cu_num_logits",
            "logprob_token_ids_state", "expanded_idx_mapping", "max_per_req_token_ids",
            "logits_mode",
        ),
        may_grow=True,
    ),
    Expected(
        f"{_V2}.sample.output:SamplerOutput",
        (
            "sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled", "num_rejected",
            "sampling_mask_tensors",
        ),
        may_grow=True,
    ),
    Expected(
        f"{_V2}.input_batch:get_num_sampled_and_rejected",
        ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),
        may_grow=True,
    ),
    Expected(f"{_V2}.metrics.logits:get_num_nans", ("logits",), may_grow=True),
)  # fmt: skip
