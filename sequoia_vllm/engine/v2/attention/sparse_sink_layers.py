"""Hy4's sparse latent attention with trees: its heads have sinks, which vLLM's own class lacks.

Its class lies in vLLM's package of that model. Other engines need not import it.
"""

from __future__ import annotations

from vllm.models.hy_v4.nvidia.flashmla_sparse import HYV4FlashMLASparseImpl

from sequoia_vllm.engine.v2.attention.sparse_layers import SparseTreeBackend, SparseTreeImpl


class SinkTreeImpl(SparseTreeImpl, HYV4FlashMLASparseImpl):
    """vLLM's sparse latent attention of Hy4, as it is."""


class SinkTreeBackend(SparseTreeBackend):
    """Registered for FLASHMLA_SPARSE where the target is Hy4: its layers ask for sinks."""

    get_impl_cls = staticmethod(lambda: SinkTreeImpl)

    @classmethod
    def supports_sink(cls) -> bool:
        """True: vLLM's layers of Hy4 keep a backend that says so."""
        return True
