"""What the parts on vLLM's Model Runner V2 override and rely on, on any device."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.entry import expected, instance, subclass, swap, table

_TREES = "vLLM's V2 runner drafts, scores and verifies token trees itself"
_TREE_MASK = "vLLM's metadata carries a tree mask"
_SPECULATOR_CLASS = "a speculative method of V2 brings its speculator and verifier"
_WHO_DRAFTS = "vLLM asks the speculative method which requests it drafts for"
_ADAPTERS = "vLLM's V2 runner maps all rows of logits to adapters"
_MASKS_OF_NODES = "vLLM's engine core sends one mask for each node, and makes room by its schedule"
_DRAFT_GRAPHS = "vLLM captures draft models' steps"

_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"

# What every proposer replaces, in the class of vLLM's that it finds it in.
_DRAFTING = (
    subclass("init_cudagraph_manager(self, cudagraph_mode)", _DRAFT_GRAPHS,
        "vLLM captures no graphs of draft models, and of heads those of chains"),
    subclass("capture(self)", _DRAFT_GRAPHS, "the whole growth of a tree is one graph"),
    subclass(
        "propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, "
        "aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, "
        "temperature, seeds, dp_sync_state, dummy_run, skip_attn_for_dummy_run, mm_inputs, "
        "is_profile, num_speculative_tokens)", _TREES,
        "grows trees, not chains"),
)  # fmt: skip
_LOADS = "load_draft_model(self, target_model, target_attn_layer_names)"

V2 = table({
    "vllm.config": ["VllmConfig.max_concurrent_batches"],
    "vllm.config.compilation:CUDAGraphMode": ["FULL_DECODE_ONLY", "decode_mode(self)"],
    "vllm.forward_context": ["BatchDescriptor(num_tokens, ...)"],
    "vllm.model_executor.layers.logits_processor": ["LogitsProcessor"],
    "vllm.model_executor.layers.vocab_parallel_embedding": [
        "pad_vocab_size(vocab_size, pad_to, ...)",
    ],
    "vllm.model_executor.offloader.base": ["get_offloader()", "NoopOffloader"],
    "vllm.utils.torch_utils": ["async_tensor_h2d(data, device, ...)"],
    "vllm.v1.attention.backends.utils": ["PAD_SLOT_ID"],
    "vllm.v1.core.sched.async_scheduler": [
        subclass("AsyncScheduler._update_after_schedule(self, scheduler_output)", _WHO_DRAFTS,
            "assumes drafts of every request while they are still being made; some requests get "
            "none"),
    ],
    "vllm.v1.core.sched.output": ["NewRequestData.sampling_params"],
    "vllm.v1.outputs:DraftTokenIds": ["req_ids", "draft_token_ids"],
    "vllm.v1.worker.gpu.block_table": [
        "BlockTables.compute_slot_mappings(self, idx_mapping, query_start_loc, positions, "
        "num_tokens_padded, out, ...)",
    ],
    "vllm.v1.worker.gpu.buffer_utils": [
        "UvaBackedTensor(size, dtype, ...)", "UvaBackedTensor.copy_to_uva(self, ...)",
    ],
    "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor": [
        "(size, dtype, device, max_concurrency, ...)", "stage_write_elem(self, index, x, ...)",
        "apply_write(self, ...)",
    ],
    "vllm.v1.worker.gpu.cudagraph_utils": [
        "BatchExecutionDescriptor(cg_mode, num_tokens, num_reqs, uniform_token_count, ...)",
    ],
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager": [
        "(vllm_config, device, cudagraph_mode, decode_query_len, ...)",
        "capture(self, create_forward_fn, progress_bar_desc)",
        "dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras, ...)",
        "run_fullgraph(self, desc, ...)",
        instance("_max_full_descs_to_capture", _DRAFT_GRAPHS, "few are captured on trial"),
        instance("_capture_mem_samples", _DRAFT_GRAPHS, "tells what they took"),
        instance("_capture_descs",
            "vLLM captures draft models' steps, and for each range of a schedule its own batches",
            "ours are for what a draft reads and for growth, and only for batches that draft; for "
            "the target only what the schedule can reach"),
        instance("_candidates",
            "vLLM looks graphs up by number of drafts",
            "gives a batch the next larger graph of any number of drafts, not the next of its "
            "own"),
    ],
    "vllm.v1.worker.gpu.input_batch": [
        "get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, "
        "prefill_len, ...)",
    ],
    "vllm.v1.worker.gpu.input_batch:InputBatch": [
        "req_ids", "num_reqs", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping",
        "expanded_local_pos", "num_scheduled_tokens", "num_tokens", "num_draft_tokens",
        "num_draft_tokens_per_req", "query_start_loc", "query_start_loc_np", "seq_lens",
        "seq_lens_cpu_upper_bound", "num_computed_tokens_np", "is_prefilling_np", "input_ids",
        "positions", "logits_indices", "cu_num_logits", "cu_num_logits_np",
    ],
    "vllm.v1.worker.gpu.lora_utils": [
        "LoraState(max_num_reqs)",
        subclass(
            "LoraState.make_lora_inputs(self, req_ids, idx_mapping, "
            "num_scheduled_tokens)", _ADAPTERS,
            "maps one row of logits of each request to its adapter; a tree has one for each node"),
    ],
    "vllm.v1.worker.gpu.metrics.logits": ["get_num_nans(logits, ...)"],
    "vllm.v1.worker.gpu.model_runner": [
        # Requests with drafts come first.
        "sort_batch_req_ids(num_tokens_per_req, draft_tokens, decode_query_len)",
        swap("init_speculator(vllm_config, device, req_states)", _SPECULATOR_CLASS,
            "the runner's constructor builds the speculator with it, by method"),
        swap("StructuredOutputsWorker", _MASKS_OF_NODES,
            "load_model builds it by this name, with room for the largest trees of all request "
            "slots: gigabytes"),
        instance(
            "GPUModelRunner.model_state.prepare_attn(self, input_batch, cudagraph_mode, "
            "block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture, ubatch_idx, "
            "model_specific_attn_metadata)", _TREE_MASK,
            "attention metadata has no place for a tree; the class of the model's state is vLLM's "
            "choice by model",
            checked_at="vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn"),
        instance("GPUModelRunner.sampler.logits_processors",
            "vLLM's sampler is told each row's history",
            "penalties and bad words take the rows before a node for its history"),
    ],
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": [
        "(vllm_config, device)",
        subclass("load_model(self, load_dummy_weights, args, model, kwargs)",
            "a backend can be chosen by the speculative method",
            "sets our attention backends while layers look theirs up; says how much is offloaded"),
        subclass("capture_model(self, profile_only)", _DRAFT_GRAPHS,
            "vLLM captures few of the target's graphs to profile memory, and all of a draft's"),
        subclass("add_requests(self, scheduler_output)", _SPECULATOR_CLASS,
            "notes what the draft has read of new requests, and how they sample"),
        subclass("prepare_inputs", _ADAPTERS,
            "tells the runner's adapters how many rows of logits each request has"),
        instance("lora_state", _ADAPTERS, "maps adapters to requests; ours to nodes"),
        subclass("prepare_attn(self, input_batch)", _TREES,
            "tree nodes have the RoPE position of their depth, and a slot of their own"),
        subclass("sample(self, hidden_states, input_batch, grammar_output)", _TREES,
            "commits the accepted paths' keys and values, before anything reads them"),
        instance("rejection_sampler", _SPECULATOR_CLASS, "verifies chains; ours walks down trees"),
        subclass("take_draft_token_ids(self)", _WHO_DRAFTS,
            "says that every request has drafts; some requests get none"),
    ],
    # The kernels of bad words and penalties take what ours take.
    "vllm.v1.worker.gpu.sample.bad_words": [
        "BadWordsState.apply(self, logits, ctx)",
        "apply_bad_words(logits, expanded_idx_mapping, bad_word_token_ids, bad_word_offsets, "
        "num_bad_words, all_token_ids, prompt_len, total_len, input_ids, expanded_local_pos, "
        "max_num_bad_words)",
    ],
    "vllm.v1.worker.gpu.sample.gumbel": [
        "gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, "
        "is_drafting, ...)",
    ],
    "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsContext": [
        "expanded_idx_mapping", "idx_mapping_np", "expanded_local_pos", "input_ids",
    ],
    "vllm.v1.worker.gpu.sample.logprob": [
        "compute_topk_scores(logits, num_logprobs, sampled_token_ids, cu_num_logits, "
        "logprob_token_ids_state, expanded_idx_mapping, max_per_req_token_ids, logits_mode, ...)",
    ],
    "vllm.v1.worker.gpu.sample.output": [
        "SamplerOutput(sampled_token_ids, logprobs_tensors, num_nans, num_sampled, num_rejected, "
        "sampling_mask_tensors, ...)",
    ],
    "vllm.v1.worker.gpu.sample.penalties": [
        "PenaltiesState.apply(self, logits, ctx)",
        "apply_penalties(logits, expanded_idx_mapping, token_ids, expanded_local_pos, "
        "repetition_penalty, frequency_penalty, presence_penalty, prompt_bin_mask, "
        "output_bin_counts)",
    ],
    "vllm.v1.worker.gpu.sample.sampler:Sampler": [
        "apply_sampling_params(self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, "
        "pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np, ...)",
        "get_logprobs_dims(self, idx_mapping_np, ...)",
    ],
    "vllm.v1.worker.gpu.sample.states": ["SamplingStates(max_num_reqs, vocab_size, ...)"],
    "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils": [
        "get_eagle3_aux_layers_from_config(spec_config, ...)",
    ],
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": [
        "RejectionSampler.__call__(self, logits, input_batch, draft_logits, invalid_drafts)",
        "get_max_chunk_logits(vocab_size, ...)",
        instance("RejectionSampler.sampler.add_request(self, req_idx, sampling_params)",
            "vLLM tells temperature and other processing apart",
            "one flag stands for all that a request's logits need; a temperature is the walk's "
            "work, for the few rows that it reads",
            checked_at="vllm.v1.worker.gpu.sample.sampler:Sampler.add_request"),
        instance(
            "RejectionSampler.sampler.sampling_states.add_request(self, req_idx, "
            "sampling_params)",
            "see RejectionSampler.sampler.add_request",
            "raises that flag for a temperature",
            checked_at="vllm.v1.worker.gpu.sample.states:SamplingStates.add_request"),
    ],
    "vllm.v1.worker.gpu.states": ["RequestState"],
    # No signature tells how the masks of several requests lie. It changed with these: read the
    # sources anew for a version that has others.
    "vllm.v1.worker.gpu.structured_outputs": [
        expected(
            "StructuredOutputsWorker(max_num_logits, vocab_size, device, mask_stride)",
            since=(0, 33)),
        expected(
            "StructuredOutputsWorker(max_num_logits, vocab_size, device, mask_stride, "
            "num_bonus_tokens)",
            before=(0, 33)),
        expected(
            "_build_grammar_mapping(req_ids, grammar_req_ids, cu_num_logits_np, "
            "num_draft_tokens_per_req, num_bonus_tokens, mask_stride)",
            before=(0, 33)),
        subclass(
            "StructuredOutputsWorker.apply_grammar_bitmask(self, logits, input_batch, "
            "grammar_req_ids, grammar_bitmask)", _MASKS_OF_NODES,
            "from 0.33 on each request has as many masks as the largest tree; ours as its own"),
    ],
    # vLLM's own for each draft, which only load; ours is one for all.
    f"{_SPECULATORS}": ["init_speculator(vllm_config, device, req_states)"],
    f"{_SPECULATORS}.speculator:BaseSpeculator": [
        "num_query_per_req", "num_extra_query_per_req", *_DRAFTING,
    ],
    f"{_SPECULATORS}.speculator:DraftModelSpeculator": [
        "(vllm_config, device)",
        "_build_attn_metadata(self, num_reqs, batch_desc, query_start_loc_np, "
        "seq_lens_cpu_upper_bound, step, causal, dcp_local_seq_lens, slot_mappings, ...)",
        subclass(_LOADS, _TREES, "vLLM has a speculator for each kind of draft; ours has parts"),
        subclass("attn_vllm_config", _TREES, "asks the speculator that loads the draft"),
        subclass(
            "set_attn(self, model_state, kv_cache_config, block_tables, target_input_buffers, "
            "target_attn_groups)", _TREES,
            "the draft's growth works on the caches that it is given"),
    ],
    f"{_SPECULATORS}.standalone_ar.speculator:StandaloneARSpeculator": [_LOADS],
    f"{_SPECULATORS}.eagle.speculator:EagleSpeculator": [_LOADS],
    f"{_SPECULATORS}.mtp.speculator:MTPSpeculator": [_LOADS],
    f"{_SPECULATORS}.dflash.speculator:DFlashSpeculator": [_LOADS],
    f"{_SPECULATORS}.lilicorr.speculator:LiLiCorrSpeculator": [_LOADS],
    # Their models.
    "vllm.model_executor.models.interfaces:SupportsEagle3": [
        "get_eagle3_default_aux_hidden_state_layers(self)",
    ],
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM": [
        "combine_hidden_states(self, hidden_states)", "compute_logits(self, hidden_states)",
        "forward(self, input_ids, positions, hidden_states, inputs_embeds)",
    ],
    "vllm.model_executor.models.mimo_mtp:MiMoMTP": [
        "compute_logits(self, hidden_states, ...)",
        "forward(self, input_ids, positions, hidden_states, ...)",
    ],
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM": [
        "combine_hidden_states(self, hidden_states)", "compute_logits(self, hidden_states)",
        "forward(self, input_ids, positions, inputs_embeds)", "get_draft_attn_causal(self)",
        "get_draft_kv_cache_layer_names(self)",
        "precompute_and_store_context_kv(self, context_states, context_positions, "
        "context_slot_mapping)",
    ],
    "vllm.model_executor.models.qwen3_dspark:Qwen3DSparkForCausalLM": [
        "compute_draft_logits(self, hidden_states)", "markov_embed(self, token_ids)",
        "markov_bias(self, markov_embed)",
    ],
    "vllm.model_executor.models.qwen3_dflash2": [
        "DFlash2Qwen3ForCausalLM.compute_candidates(self, hidden_states)",
        "CandidateSelector.forward(self, candidate_ids, unary_logits, hidden_states, "
        "anchor_token_ids)",
    ],
    "vllm.model_executor.models.lilicorr": [
        "LiLiCorrForCausalLM.compute_candidates(self, hidden_states)",
        "LiLiCorrHead.forward(self, token_embeddings, candidate_log_probs, pass_hidden, "
        "anchor_hidden, anchor_valid)",
    ],
})  # fmt: skip
