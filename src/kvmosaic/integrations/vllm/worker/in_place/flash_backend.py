"""vLLM's FlashAttention for GPUs, with documents read in place."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from kvmosaic.integrations.vllm.worker.in_place.attention import ReadsDocuments


class InPlaceFlashAttention(ReadsDocuments, FlashAttentionImpl):
    """FLASH_ATTN, and rows that read documents."""


class InPlaceFlashBackend(FlashAttentionBackend):
    """Takes the place of FLASH_ATTN, under its name."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """Class of the layers' implementations."""
        return InPlaceFlashAttention
