"""Our KV cache and store inside other engines."""
