"""Triton backend: GPU kernels that read a layer's runs of keys in place. Importing it imports Triton."""

from kvmosaic.attention.triton.backend import TritonBackend, try_triton

__all__ = ["TritonBackend", "try_triton"]
