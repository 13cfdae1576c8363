"""Weights that stay on a disk and are read ahead of each layer: no vLLM in here."""

from sequoia_vllm.offload.layer_ring import LayerRing, keep_freed_memory
from sequoia_vllm.offload.weight_file import OffloadError, Region, WeightFile

__all__ = ["LayerRing", "OffloadError", "Region", "WeightFile", "keep_freed_memory"]
