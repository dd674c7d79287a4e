"""Triton backend: GPU kernels that read a layer's runs of keys in place. Its module `backend` imports Triton."""
