"""What stands for each of vLLM's attention backends in the workers of a Sequoia engine on GPUs."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum

_PACKAGE = __name__.rpartition(".")[0]


class NoTreesBackend:
    """Registered for what trees cannot use: where vLLM prefers it, it takes the next one.

    Selection happens before loading, and calls only `validate_configuration` of this class.
    """

    @staticmethod
    def validate_configuration(**_selected: Any) -> list[str]:
        """Reasons why vLLM must not use it for any layer."""
        return [
            "trees cannot use it: leave --attention-backend out, or name FLASH_ATTN (for latent "
            "attention TRITON_MLA)"
        ]


CLASSES = {
    AttentionBackendEnum.FLASH_ATTN: f"{_PACKAGE}.attention_gpu.FlashTreeBackend",
    AttentionBackendEnum.TRITON_ATTN: f"{_PACKAGE}.attention_gpu.TritonTreeBackend",
    AttentionBackendEnum.TRITON_MLA: f"{_PACKAGE}.mla_layers.MLATreeBackend",
    **dict.fromkeys(
        (
            # Preferred on Blackwell; the next two where images attend in both directions.
            AttentionBackendEnum.FLASHINFER, AttentionBackendEnum.TRITON_FLASHINFER,
            AttentionBackendEnum.TRITON_FLASH_ATTN,
            AttentionBackendEnum.CUTLASS_MLA, AttentionBackendEnum.FLASH_ATTN_MLA,
            AttentionBackendEnum.FLASHINFER_MLA, AttentionBackendEnum.FLASHMLA,
            AttentionBackendEnum.TOKENSPEED_MLA,
        ),
        f"{__name__}.{NoTreesBackend.__qualname__}",
    ),
}  # fmt: skip
"""Paths of our classes."""
