"""What the proposers on vLLM's Model Runner V2 override and rely on of vLLM's speculators."""

from __future__ import annotations

from sequoia_vllm.engine.compat.ledger.expected import Expected
from sequoia_vllm.engine.compat.ledger.override import Override

_DECODE = "vllm.v1.worker.gpu.spec_decode"
_MODELS = f"{_DECODE}.standalone_ar.speculator:StandaloneARSpeculator"
_HEADS = f"{_DECODE}.eagle.speculator:EagleSpeculator"
_LAYERS = f"{_DECODE}.mtp.speculator:MTPSpeculator"
_BLOCKS = f"{_DECODE}.dflash.speculator:DFlashSpeculator"
_MARKOV = f"{_DECODE}.dspark.speculator:DSparkSpeculator"
_CANDIDATES = f"{_DECODE}.dflash2.speculator:DFlash2Speculator"
_LATTICES = f"{_DECODE}.lilicorr.speculator:LiLiCorrSpeculator"
_BLOCK_HEADS = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"
_ALL = f"{_DECODE}.speculator:DraftModelSpeculator"
_BASE = f"{_DECODE}.speculator:BaseSpeculator"

_TREES = "vLLM's V2 runner drafts, scores and verifies token trees itself"
_DRAFT_GRAPHS = "vLLM captures draft models' steps"


def _overrides(speculator: str) -> tuple[Override, ...]:
    """What every proposer replaces, by the class of vLLM's that it finds it in."""
    return (
        Override(
            f"{speculator}.init_cudagraph_manager", ("self", "cudagraph_mode"),
            kind="subclass",
            why="vLLM captures no graphs of draft models, and of heads those of chains",
            until=_DRAFT_GRAPHS,
        ),
        Override(
            f"{speculator}.capture", ("self",),
            kind="subclass",
            why="the whole growth of a tree is one graph",
            until=_DRAFT_GRAPHS,
        ),
        Override(
            f"{speculator}.propose",
            (
                "self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states",
                "aux_hidden_states", "num_sampled", "num_rejected", "last_sampled",
                "next_prefill_tokens", "temperature", "seeds", "dp_sync_state", "dummy_run",
                "skip_attn_for_dummy_run", "mm_inputs", "is_profile", "num_speculative_tokens",
            ),
            kind="subclass", why="grows trees, not chains", until=_TREES,
        ),
    )  # fmt: skip


def _loading(speculator: str) -> Override:
    return Override(
        f"{speculator}.load_model", ("self", "target_model"),
        kind="subclass",
        why="the draft stays on the device where the target's weights are offloaded; blocks are as "
        "wide as the tree is deep",
        until=_TREES,
    )  # fmt: skip


def _caches(speculator: str) -> Override:
    return Override(
        f"{speculator}.set_attn",
        (
            "self", "model_state", "kv_cache_config", "block_tables", "target_input_buffers",
            "target_attn_groups",
        ),
        kind="subclass",
        why="the draft's growth works on the caches that it is given",
        until=_TREES,
    )  # fmt: skip


V2_SPECULATORS: tuple[Expected | Override, ...] = (
    # v2/tree_speculator.py, v2/proposer.py
    Expected(_ALL, ("vllm_config", "device")),
    *_overrides(_BASE),
    _loading(_ALL),
    _caches(_ALL),
    Expected(
        f"{_ALL}._build_attn_metadata",
        (
            "self", "num_reqs", "batch_desc", "query_start_loc_np", "seq_lens_cpu_upper_bound",
            "step", "causal", "dcp_local_seq_lens", "slot_mappings",
        ),
        may_grow=True,
    ),
    # v2/model_proposer.py
    Expected(_MODELS, ("vllm_config", "device")),
    *_overrides(_MODELS),
    _caches(_MODELS),
    Expected(
        f"{_MODELS}._run_model",
        (
            "self", "input_ids", "positions", "attn_metadata", "slot_mappings",
            "num_tokens_across_dp",
        ),
        may_grow=True,
    ),
    # v2/head_proposer.py, v2/state_proposer.py
    Expected(_HEADS, ("vllm_config", "device")),
    *_overrides(_HEADS),
    _loading(_HEADS),
    Expected(
        f"{_DECODE}.eagle.eagle3_utils:get_eagle3_aux_layers_from_config",
        ("spec_config",),
        may_grow=True,
    ),
    Expected("vllm.forward_context:BatchDescriptor", ("num_tokens",), may_grow=True),
    *(
        Expected(
            f"vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM.{method}", parameters
        )
        for method, parameters in (
            ("combine_hidden_states", ("self", "hidden_states")),
            ("compute_logits", ("self", "hidden_states")),
            ("forward", ("self", "input_ids", "positions", "hidden_states", "inputs_embeds")),
        )
    ),
    Expected(
        "vllm.model_executor.models.interfaces:SupportsEagle3"
        ".get_eagle3_default_aux_hidden_state_layers",
        ("self",),
    ),
    Expected(_LAYERS, ("vllm_config", "device")),
    *_overrides(_LAYERS),
    _loading(_LAYERS),
    *(
        Expected(f"vllm.model_executor.models.mimo_mtp:MiMoMTP.{method}", parameters, may_grow=True)
        for method, parameters in (
            ("compute_logits", ("self", "hidden_states")),
            ("forward", ("self", "input_ids", "positions", "hidden_states")),
        )
    ),
    # v2/block_proposer.py
    Expected(_BLOCKS, ("vllm_config", "device")),
    *_overrides(_BLOCKS),
    _caches(_BLOCKS),
    *(
        Override(
            f"{speculator}.num_query_per_req",
            kind="instance",
            why="a block has a query per level of a tree, not per node",
            until=_TREES,
        )
        for speculator in (_BLOCKS, _MARKOV)
    ),
    *(
        Expected(f"{_BLOCK_HEADS}.{method}", parameters)
        for method, parameters in (
            ("combine_hidden_states", ("self", "hidden_states")),
            ("compute_logits", ("self", "hidden_states")),
            ("forward", ("self", "input_ids", "positions", "inputs_embeds")),
            ("get_draft_attn_causal", ("self",)),
            ("get_draft_kv_cache_layer_names", ("self",)),
            (
                "precompute_and_store_context_kv",
                ("self", "context_states", "context_positions", "context_slot_mapping"),
            ),
        )
    ),
    # v2/corrected_blocks.py
    *(
        Expected(speculator, ("vllm_config", "device"))
        for speculator in (_MARKOV, _CANDIDATES, _LATTICES)
    ),
    *(
        Override(
            f"{speculator}.load_draft_model",
            ("self", "target_model", "target_attn_layer_names"),
            kind="subclass",
            why="layers are built for blocks of as many levels as a tree has, not nodes",
            until=_TREES,
        )
        for speculator in (_BLOCKS, _LATTICES)
    ),
    *(
        Expected(f"vllm.model_executor.models.{method}", parameters)
        for method, parameters in (
            (
                "qwen3_dspark:Qwen3DSparkForCausalLM.compute_draft_logits",
                ("self", "hidden_states"),
            ),
            ("qwen3_dspark:Qwen3DSparkForCausalLM.markov_embed", ("self", "token_ids")),
            ("qwen3_dspark:Qwen3DSparkForCausalLM.markov_bias", ("self", "markov_embed")),
            (
                "qwen3_dflash2:DFlash2Qwen3ForCausalLM.compute_candidates",
                ("self", "hidden_states"),
            ),
            (
                "qwen3_dflash2:CandidateSelector.forward",
                ("self", "candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids"),
            ),
            ("lilicorr:LiLiCorrForCausalLM.compute_candidates", ("self", "hidden_states")),
            (
                "lilicorr:LiLiCorrHead.forward",
                (
                    "self", "token_embeddings", "candidate_log_probs", "pass_hidden",
                    "anchor_hidden", "anchor_valid",
                ),
            ),
        )
    ),
)  # fmt: skip
