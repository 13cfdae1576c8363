"""Set-ups that Sequoia refuses at start-up, each with its reason and the fix."""

from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.platforms import CpuArchEnum, current_platform

from sequoia_vllm.config import ConfigError
from sequoia_vllm.drafters.registry import drafter
from sequoia_vllm.engine.common.cluster import fault_of_lock_step, in_lock_step
from sequoia_vllm.engine.common.settings import SequoiaSettings
from sequoia_vllm.engine.offload import offloading_backend
from sequoia_vllm.hardware.budget import warm_up_length
from sequoia_vllm.hardware.families import refusal_of
from sequoia_vllm.hardware.support import (
    NOT_ON_CPUS,
    RUNS_ON,
    Kind,
    Role,
    as_error,
    has_only_attention,
    kinds_of,
)
from sequoia_vllm.tree import MOST_DYNAMIC_NODES, MOST_RECURRENT_NODES
from sequoia_vllm.verification.methods import DEFAULT_METHOD

_FP8_CAPABILITY = 89  # our kernel converts it there
_PIPELINE_V1 = (
    "pipeline parallelism is not supported, as accepted paths would have to reach every stage "
    "before its next step (on CPUs vLLM's own speculation does not start with it either)"
)
_PIPELINE_V2 = (
    "pipeline parallelism is not supported, as vLLM builds a draft model as a stage of the "
    "target's pipeline, without its first layers (its own method draft_model does not start "
    "with it either; vllm-project/vllm#50853 is on speculation in pipelines)"
)
# KV connectors that take committed tokens only, after the step that wrote them. Behind these lie a
# tree's nodes.
_COMMITTED_ONLY = frozenset({
    "OffloadingConnector", "SimpleCPUOffloadConnector", "NixlConnector", "NixlPullConnector",
    "NixlPushConnector",
})  # fmt: skip
_REASONS = {
    "ExampleConnector": "saves each layer within the target's forward, before a path is accepted",
    "LMCacheConnectorV1": "may save each layer within the target's forward, before a path is "
    "accepted, and does not count a draft model's layers",
    "ExampleHiddenStatesConnector": "takes hidden states of nodes that may be rejected",
}


def refuse_model(model: Any, role: Role) -> None:
    """Refuses a model that trees cannot serve, with every reason and the fix."""
    if message := refusal_of(model.model, role, model.architectures, kinds_in_vllm(model)):
        raise ConfigError(message)


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuses an engine that must not run, with every reason and its fix."""
    checks = (
        _platform_reasons, _drafter_reasons, _tree_reasons, _parallel_reasons, _feature_reasons,
        _size_reasons,
    )  # fmt: skip
    if reasons := [reason for check in checks for reason in check(vllm_config)]:
        raise ConfigError(as_error(reasons))


def kinds_in_vllm(model: Any) -> set[Kind]:
    """The kinds of model that vLLM takes this one for."""
    described = kinds_of(_configuration(model))  # as commands ask: vLLM knows once it makes layers
    is_served = "hybrid" in described
    # Of some classes only some checkpoints have such layers.
    layer_types = getattr(model.hf_text_config, "layer_types", None)
    has_states = model.has_inner_state and not has_only_attention(layer_types)
    recurrent = model.is_hybrid or model.is_attention_free or has_states
    found: dict[Kind, bool] = {
        "mla": model.use_mla, "sparse": model.use_mla and "sparse" in described,
        "indexed": model.use_mla and "indexed" in described,
        "ngram": "ngram" in described, "attention": "attention" in described,
        "chunked": model.attention_chunk_size is not None, "alibi": model.uses_alibi,
        "recurrent": recurrent and not is_served, "hybrid": recurrent and is_served,
        "diffusion": model.is_diffusion,
        "realtime": any("Realtime" in name for name in model.architectures),
        "mrope": model.uses_mrope, "multimodal": model.is_multimodal_model,
        "encoder-decoder": model.is_encoder_decoder, "pooling": model.runner_type == "pooling",
    }  # fmt: skip
    return {kind for kind, is_so in found.items() if is_so}


def _configuration(model: Any) -> dict[str, Any]:
    parts = vars(model.hf_text_config) | vars(model.hf_config)
    return {**parts, "architectures": model.architectures}


def _present(check: Callable[[Any], dict[str, Any]]) -> Callable[[Any], list[str]]:
    """Makes a check of an engine's configuration return the reasons that hold."""
    return lambda vllm_config: [reason for reason, holds in check(vllm_config).items() if holds]


@_present
def _platform_reasons(vllm_config: Any) -> dict[str, Any]:
    if current_platform.is_cpu():
        known = current_platform.get_cpu_architecture() == CpuArchEnum.X86
        return {
            "the KV cache layout is known on x86 CPUs only": not known,
            **{
                reason: not vllm_config.use_v2_model_runner
                and kind in kinds_in_vllm(vllm_config.model_config)
                for kind, reason in NOT_ON_CPUS.items()
            },
            "vLLM offloads weights from GPUs to the host's memory, and nothing on CPUs: drop "
            "--cpu-offload-gb and --offload-group-size (from a disk: "
            '"offload": {"weights": "disk", "directory": ...} in the speculative config)': (
                offloading_backend(vllm_config.offload_config) is not None
            ),
        }
    if not current_platform.is_cuda():
        return {RUNS_ON.format(current_platform.device_type): True}
    return {
        "on GPUs it needs vLLM's Model Runner V2: unset VLLM_USE_V2_MODEL_RUNNER, and see "
        "in vLLM's log which option turned it off": not vllm_config.use_v2_model_runner,
        "outputs depend on what is batched together, as how much is drafted does: unset "
        "VLLM_BATCH_INVARIANT": envs.VLLM_BATCH_INVARIANT,
        "batch-sharded sampling hides other ranks' trees: drop --enable-batch-sharded-sampling": (
            vllm_config.parallel_config.enable_batch_sharded_sampling
        ),
    }


@_present
def _drafter_reasons(vllm_config: Any) -> dict[str, Any]:
    kind = drafter(SequoiaSettings.of(vllm_config).drafter)
    if not kind.is_head:
        return {}
    return {
        f"heads and MTP layers need vLLM's Model Runner V2, which GPUs use, and the draft is "
        f'{kind.name}: give "model" a draft model here': not vllm_config.use_v2_model_runner,
    }


@_present
def _tree_reasons(vllm_config: Any) -> dict[str, Any]:
    settings = SequoiaSettings.of(vllm_config)
    kind, fix = drafter(settings.drafter), 'leave "dynamic_tree" out, and trees are static'
    if not settings.dynamic_tree:
        return {}
    on_v2 = vllm_config.use_v2_model_runner
    return {
        f"{kind.name} drafts static trees only: {fix}": kind.in_one_pass or not kind.has_weights,
        f"verification by {settings.verification} needs one tree for all requests: {fix}": (
            on_v2 and settings.verification != DEFAULT_METHOD
        ),
        f"on GPUs dynamic trees have at most {MOST_DYNAMIC_NODES} nodes: {fix}, or give a smaller "
        "tree": (on_v2 and settings.tree.size > MOST_DYNAMIC_NODES),
    }


@_present
def _parallel_reasons(vllm_config: Any) -> dict[str, Any]:
    parallel, fault = vllm_config.parallel_config, fault_of_lock_step(vllm_config)
    fix = "run one engine per replica, without --data-parallel-size"
    draft_size = vllm_config.speculative_config.draft_parallel_config.tensor_parallel_size
    pipeline = _PIPELINE_V2 if vllm_config.use_v2_model_runner else _PIPELINE_V1
    return {
        f"{pipeline}; use tensor parallelism within an engine, and more engines "
        "(--data-parallel-size)": parallel.pipeline_parallel_size > 1,
        f"replicas of a mixture of experts run in lock step, {fault}: {fix}": fault is not None,
        "micro-batches would cut trees in two: drop --enable-dbo and --ubatch-size": (
            in_lock_step(vllm_config) and parallel.use_ubatching
        ),
        "context parallelism is not supported: set decode_context_parallel_size to 1": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        f"vLLM runs draft models at the target's tensor parallel size: give no "
        f"draft_tensor_parallel_size, or {parallel.tensor_parallel_size}": (
            draft_size != parallel.tensor_parallel_size
        ),
    }


@_present
def _feature_reasons(vllm_config: Any) -> dict[str, Any]:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    draft = vllm_config.speculative_config.draft_model_config
    transfer = vllm_config.kv_transfer_config
    connectors = None if transfer is None else _fault_of_connectors(transfer)
    is_hybrid, on_v1 = "hybrid" in kinds_in_vllm(model), not vllm_config.use_v2_model_runner
    return {
        "a KV connector must take committed tokens only, after their step, and "
        f"{connectors}: drop {_asks_for_transfer(cache)}, or use OffloadingConnector": connectors,
        "KV connectors were not tried with trees over recurrent layers: drop "
        f"{_asks_for_transfer(cache)}": transfer is not None and is_hybrid,
        "encoder-cache transfer is not supported: drop --ec-transfer-config": (
            vllm_config.ec_transfer_config is not None
        ),
        f"the KV cache dtype {cache.cache_dtype!r} is not supported here: use "
        f"{_plain_cache(model)}": cache.cache_dtype not in _cache_dtypes(),
        "a checkpoint asks for a quantized KV cache of a kind that is not supported here: use "
        f"{_plain_cache(model)}": cache.cache_dtype == "auto"
        and any(_asks_for_other_cache(which) for which in (model, draft)),
        "KV sharing for fast prefill is not supported: drop --kv-sharing-fast-prefill": (
            cache.kv_sharing_fast_prefill
        ),
        "on CPUs vLLM cannot divide a KV cache beside a draft where layers share keys and have "
        "heads of two sizes: serve it without Sequoia": on_v1
        and getattr(model.hf_text_config, "num_kv_shared_layers", 0)
        and getattr(model.hf_text_config, "global_head_dim", None) is not None,
        "vLLM's V1 runner moves what follows a pruned video after trees have their positions: "
        "drop --video-pruning-rate": on_v1
        and model.multimodal_config is not None
        and model.multimodal_config.is_multimodal_pruning_enabled(),
        "prompt embeddings cannot be read by the draft: drop --enable-prompt-embeds": (
            model.enable_prompt_embeds
        ),
        "float64 Gumbel noise is not supported: drop --use-fp64-gumbel": model.use_fp64_gumbel,
        "sampling masks are not supported: drop --return-sampling-mask": (
            model.return_sampling_mask
        ),
        "trace replay is not supported: drop --enable-trace-replay": model.enable_trace_replay,
        "routed experts are those of the first rows, which in a tree are not the accepted "
        "ones: drop --enable-return-routed-experts": vllm_config.aux_output_config.enabled,
        "watermarking changes the sampler: drop --watermark-config": (
            vllm_config.watermark_config is not None
        ),
        "a model's specialized decoder passes by the layers that trees need: drop decode_backend "
        "from --additional-config": _specialized_decoder(vllm_config.additional_config),
    }


def _specialized_decoder(additional: Any) -> bool:
    """Whether a model's own decoder is asked for (Kimi K3's: the newest vLLM has it)."""
    return isinstance(additional, dict) and additional.get("decode_backend", "auto") != "auto"


def _fault_of_connectors(transfer: Any) -> str | None:
    """Says why a connector of vLLM's `KVTransferConfig` must not run beside trees; None: it may."""
    several = transfer.kv_connector_extra_config.get("connectors", ())
    chosen = several if transfer.kv_connector == "MultiConnector" else [vars(transfer)]
    return next(filter(None, map(_fault_of_connector, chosen)), None)


def _fault_of_connector(connector: dict[str, Any]) -> str | None:
    name = connector["kv_connector"]
    if connector.get("kv_connector_module_path") or name not in _COMMITTED_ONLY:
        return f"{name} {_REASONS.get(name, 'was not read')}"
    options = connector.get("kv_connector_extra_config", {})
    if name.startswith("Nixl") and options.get("bidirectional_kv_xfer"):
        return (
            f"{name} with bidirectional_kv_xfer hands on what was accepted behind an answer's end"
        )
    return None


def _asks_for_transfer(cache: Any) -> str:
    # vLLM makes a connector's configuration of the second one.
    return "--kv-transfer-config" if cache.kv_offloading_size is None else "--kv-offloading-size"


def _plain_cache(model: Any) -> str:
    """The option; "auto" takes a quantized one where the checkpoint asks for it."""
    dtype = str(model.dtype).removeprefix("torch.")
    return f"--kv-cache-dtype {dtype if dtype in ('bfloat16', 'float16') else 'auto'}"


def _cache_dtypes() -> tuple[str, ...]:
    """Names the caches that trees read here: e4m3 too, where the GPU can convert it."""
    whole = ("auto", "bfloat16", "float16")
    has_fp8 = current_platform.is_cuda() and current_platform.has_device_capability(_FP8_CAPABILITY)
    return (*whole, "fp8", "fp8_e4m3") if has_fp8 else whole


def _asks_for_other_cache(model: Any) -> bool:
    """Whether vLLM quantizes the cache unasked, as for compressed-tensors, but not to e4m3."""
    if _cache_scheme(model) is None:
        return False
    return not (asks_for_fp8_cache(model) and "fp8" in _cache_dtypes())


def asks_for_fp8_cache(model: Any) -> bool:
    """Whether a checkpoint asks for a KV cache in e4m3 with a scale per layer."""
    scheme = _cache_scheme(model) or {}
    stated = scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy")
    return stated == ("float", 8, "tensor")


def _cache_scheme(model: Any) -> dict[str, Any] | None:
    config = getattr(model.hf_config, "quantization_config", None) or {}
    return config.get("kv_cache_scheme") if isinstance(config, dict) else None


@_present
def _size_reasons(vllm_config: Any) -> dict[str, Any]:
    nodes = vllm_config.speculative_config.num_speculative_tokens + 1
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    length = vllm_config.model_config.max_model_len
    return {
        f"a tree of {nodes} nodes does not fit in max_num_batched_tokens={budget}: choose a "
        "smaller tree or a larger budget": nodes >= budget,
        f"a tree of {nodes} nodes does not fit in max_model_len={length}: choose a smaller "
        "tree": nodes >= length,
        f"a tree of {nodes} nodes is too large for recurrent layers: choose one of "
        f"{MOST_RECURRENT_NODES} nodes at most": nodes > MOST_RECURRENT_NODES
        and "hybrid" in kinds_in_vllm(vllm_config.model_config),
        f"on GPUs vLLM warms up with requests of {warm_up_length(nodes)} tokens for a tree of "
        f"{nodes} nodes, and max_model_len={length} has no room for them: choose a smaller "
        "tree, or longer requests": nodes < length < warm_up_length(nodes)
        and current_platform.is_cuda(),
    }
