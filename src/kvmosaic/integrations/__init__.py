"""Integrations of the KV cache and document store into other engines."""
