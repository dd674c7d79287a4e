"""Faster forms of a model's modules on CPUs: packed and 8-bit linear layers, fused operations."""
