"""Tier keys of a chunk prompt's runs. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from kvmosaic.cache.keys import KeyChain, encode_tokens
from kvmosaic.integrations.vllm.operations import StoredRun
from kvmosaic.integrations.vllm.scheduler.chunk_prompts import ChunkPrompt

_ENGINE = b"kvmosaic-vllm-1"


def engine_fingerprint(workers: Sequence[str]) -> str:
    """One fingerprint for all workers' weights, in the order of their ranks; empty if one has none."""
    if not workers or not all(workers):
        return ""
    digest = sha256(_ENGINE)
    for fingerprint in workers:
        digest.update(len(fingerprint).to_bytes(4, "little") + fingerprint.encode())
    return digest.hexdigest()


def stored_runs(prompt: ChunkPrompt, fingerprint: str, salt: str) -> tuple[StoredRun, ...]:
    """The runs of a chunk prompt without its padding: what the chunk saw, if anything, and the chunk.

    Keys are built as in our own engine: from the model, the salt, the run's tokens, its start and what it saw, but not
    from the block size.
    """
    chain = KeyChain(fingerprint, salt)
    seen = encode_tokens(prompt.token_ids[: prompt.num_seen])
    chunk = encode_tokens(prompt.token_ids[prompt.num_seen : prompt.num_tokens])
    runs, views = [], []
    if seen:
        root = chain.root(0)
        key = chain.run_encoded(root, seen)
        runs.append(StoredRun(fingerprint, key, root, 0, seen))
        views.append((key, prompt.num_seen))
    root = chain.root(prompt.num_seen, views)
    runs.append(StoredRun(fingerprint, chain.run_encoded(root, chunk), root, prompt.num_seen, chunk))
    return tuple(runs)
