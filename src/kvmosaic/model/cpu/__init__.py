"""Faster forms of a model's modules on CPUs: packed linear layers, fused operations."""
