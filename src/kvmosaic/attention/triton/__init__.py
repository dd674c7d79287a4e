"""Triton backend: GPU kernels that read a layer's runs of keys in place. Importing it imports Triton."""

from kvmosaic.attention.triton.backend import PagedCache, TritonBackend, TritonReader, try_triton, why_not_paged

__all__ = ["PagedCache", "TritonBackend", "TritonReader", "try_triton", "why_not_paged"]
