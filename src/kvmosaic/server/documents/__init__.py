"""Stored documents of this server, which prompts name, and where their KV cache is; the routes are in `web`."""
