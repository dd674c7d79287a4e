"""Imports vLLM before any test module does, as its warnings become errors; without it none of these is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["*"]
if importlib.util.find_spec("vllm"):
    from support.vllm.loading import load_vllm

    load_vllm()
    collect_ignore_glob = []
