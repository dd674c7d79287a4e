"""vLLM's attention in Triton for GPUs, with documents read in place."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from kvmosaic.integrations.vllm.worker.in_place.attention import ReadsDocuments


class InPlaceTritonAttention(ReadsDocuments, TritonAttentionImpl):
    """TRITON_ATTN, and rows that read documents."""


class InPlaceTritonBackend(TritonAttentionBackend):
    """Takes the place of TRITON_ATTN, under its name."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """Class of the layers' implementations."""
        return InPlaceTritonAttention
