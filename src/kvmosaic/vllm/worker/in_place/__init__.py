"""Attention that reads documents where vLLM's cache stores them: see `step`."""
