"""Assembly of an `LLM` from its parts, and parsing of its arguments."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast, get_args

from kvmosaic.attention import BackendName, ChosenBackend, PoolName
from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig, TierConfig, parse_bytes
from kvmosaic.container import available_memory, blocks_within, memory_limit
from kvmosaic.engine import Engine, not_movable
from kvmosaic.engine.self_check import SelfCheck
from kvmosaic.errors import InvalidAdapter, InvalidConfig, InvalidPrompt, KeepsState, NotMovable, pip_install
from kvmosaic.layout import ChunkContext
from kvmosaic.layout.span import CHUNK_CONTEXT_KEY
from kvmosaic.layout.strategies import AUTO, choose_strategy, strategy_named
from kvmosaic.model.formats import FORMATS, find_format
from kvmosaic.prompt import Prompt, PromptEncoder
from kvmosaic.prompt.conversation import schemas_of
from kvmosaic.prompt.patterns import always_fits, read_find_documents
from kvmosaic.prompt.segment import has_segments
from kvmosaic.repair import FirstTokens, repair_policy
from kvmosaic.tiers import TieredStore, open_tiers, parse_tier_url
from kvmosaic.tools import ToolRequest, read_tool_request
from kvmosaic.tuned_settings import PROFILE_NAME

if TYPE_CHECKING:
    from kvmosaic.attention import AttentionBackend
    from kvmosaic.engine.chunk_offloader import ChunkOffloader
    from kvmosaic.engine.model_runner import EngineModel, StepRunner
    from kvmosaic.entries.header import StateShape
    from kvmosaic.llama.model import LlamaModel
    from kvmosaic.model import LoadedModel

logger = logging.getLogger("kvmosaic")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine, and the numbers it computes with."""

    name: str
    """"transformers" or "llama.cpp"."""
    build: str
    """Package and version of the engine."""
    attention: str
    """The attention backend; that of llama.cpp is its own."""
    weights: str
    """Type of the weights in memory: "bfloat16", "Q4_K - Medium"."""
    cache: str
    """Type of cached keys and values."""
    device: str
    """Where the weights are: "cpu", "cuda:0", "gpu"."""

    @classmethod
    def of(cls, model: AnyModel, attention: str) -> EngineFacts:
        """Those of a loaded model with this attention backend."""
        types = model.weight_type, model.cache_type
        return cls(model.engine_name, model.engine_build, attention, *types, model.weight_device)

    def __str__(self) -> str:
        engine = self.build if self.build.startswith(self.name) else f"{self.name} ({self.build})"
        attention = "" if self.attention == self.name else f", {self.attention} attention"
        return f"{engine}{attention}, weights {self.weights}, cache {self.cache}"


AnyModel: TypeAlias = "LoadedModel | LlamaModel"
"""A model of either engine."""
EngineName = Literal["auto", "transformers", "llama"]
PromptLike = str | Prompt | Sequence[Any] | Mapping[str, Any]
"""A text, a prompt, token ids, or a mapping with "prompt" or "prompt_token_ids"."""
AdapterPlaces = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
"""Folders of adapters: a mapping by name, or texts "[NAME=]FOLDER"."""
Continuation = str | Sequence[int]
"""A given answer: a text, or token ids."""
Settings = TypeVar("Settings")

_FREE_SHARE_CPU, _FREE_SHARE_GPU = 0.25, 0.7
"""Of the free memory, for a chunk cache whose size is `auto`. A computer has other programs, a GPU has activations."""
_MIN_CACHE_BYTES = 64 * 2**20
_TURN_TOKENS, _DOCUMENT_TOKENS = 2048, 512
"""Of models with states: how much text there is to one of them, in the request cache and in the chunk cache."""
BUNDLED_READER = "reader"
"""The name of the small model that comes with the package."""


class ModelEngine(Protocol):
    """What runs models: a module with these functions, imported when a model of its kind is opened."""

    @property
    def max_cells(self) -> int | None:
        """The most tokens of requests, and of documents, that lie in working memory; None: in the pools alone."""

    @property
    def no_codec_reason(self) -> str:
        """Why chunks in tiers cannot be rounded, and the way out; empty when they can."""

    def open_model(self, name: str | Path, **settings: Any) -> AnyModel:
        """Loads a model; see `LLM` for the settings."""

    def choose_attention(self, model: Any, wanted: AttentionBackend | BackendName | None) -> ChosenBackend:
        """The attention backend of a model, and why."""

    def check_model(self, model: Any, config: EngineConfig, backend: Any) -> SelfCheck:
        """Compares composed prompts with ordinary ones."""

    def working_cells(self, num_blocks: Mapping[PoolName, int], block_size: int) -> int:
        """Tokens that working memory has room for, beside the slots of both pools."""

    def build_runner(
        self, model: Any, num_blocks: Mapping[PoolName, int], block_size: int, config: EngineConfig, backend: Any
    ) -> StepRunner:
        """Allocates the slots of both pools."""


_ENGINES = {"transformers": "kvmosaic.transformers_engine", "llama.cpp": "kvmosaic.llama.engine"}


def engine_named(name: str) -> ModelEngine:
    """An engine by the name that its models have."""
    return cast(ModelEngine, import_module(_ENGINES[name]))


def checked(settings: Settings, kind: type[Settings]) -> Settings:
    """The settings themselves, if they are of their kind.

    Raises:
        InvalidConfig: something else was given.
    """
    if not isinstance(settings, kind):
        name = kind.__name__
        raise InvalidConfig(f"settings must be a {name}, got {type(settings).__name__}; write {name}(name=value, …)")
    return settings


def check_tiers(config: TierConfig, enable_chunk_cache: bool) -> None:
    """Checks the tiers before anything is loaded; opens none.

    Raises:
        InvalidConfig: an invalid URL, or tiers without a chunk cache.
    """
    if config.chunk_tier and not enable_chunk_cache:
        raise InvalidConfig("tiers keep what is in the chunk cache, which is switched off; leave out one of the two")
    for place in config.chunk_tier:
        if isinstance(place, str):
            parse_tier_url(place)


def adapter_folders(places: AdapterPlaces) -> dict[str, Path]:
    """Folders of adapters by name, in order.

    Raises:
        InvalidAdapter: two with the same name, or no name.
    """
    if isinstance(places, Mapping):
        return {str(name): Path(folder) for name, folder in places.items()}
    found: dict[str, Path] = {}
    for place in [places] if isinstance(places, str | Path) else places:
        name, is_named, folder = str(place).partition("=")
        path = Path(folder if is_named else place)
        name = name if is_named else path.expanduser().absolute().name
        if not name:
            raise InvalidAdapter(f"the adapter {str(place)!r:.200} has no name; write NAME=FOLDER")
        if name in found:
            raise InvalidAdapter(
                f"two adapters have the name {name!r:.80} ({found[name]} and {path}); write NAME=FOLDER for one of them"
            )
        found[name] = path
    return found


def prompts_of(prompts: PromptLike | Sequence[PromptLike]) -> list[str | Prompt | Sequence[Any]]:
    """The prompts of one call, as a list.

    Raises:
        InvalidPrompt: something that is not a prompt, naming its type.
    """
    if isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes) and not has_segments(prompts):
        is_token_ids = bool(prompts) and isinstance(prompts[0], int)
        return [_prompt_of(prompts)] if is_token_ids else [_prompt_of(prompt) for prompt in prompts]
    return [_prompt_of(prompts)]


def _prompt_of(prompt: object) -> str | Prompt | Sequence[Any]:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str | Prompt):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return prompt
    raise InvalidPrompt(
        "a prompt is a text, a Prompt, a list of chunk handles and texts, a list of token ids, or a mapping with "
        "'prompt' or 'prompt_token_ids', "
        f"got {type(prompt).__name__}"
    )


def continuations_of(
    continuations: Continuation | Sequence[Continuation], count: int, encoder: PromptEncoder
) -> list[Sequence[int]]:
    """The token ids of the given answers to `count` prompts.

    Raises:
        InvalidPrompt: another number of them, or something that is no continuation.
    """
    is_one = isinstance(continuations, str) or (bool(continuations) and isinstance(continuations[0], int))
    items: list[Any] = [continuations] if is_one else list(continuations)
    if len(items) != count:
        raise InvalidPrompt(f"{len(items)} continuations for {count} prompts; give one for each prompt")
    for item in items:
        if not isinstance(item, str | Sequence) or isinstance(item, bytes):
            raise InvalidPrompt(f"a continuation is a text or token ids, got {item!r:.80}")
    return [encoder.continuation(item) if isinstance(item, str) else item for item in items]


def read_tools(tools: object, choice: object, is_parallel: bool, model: EngineModel) -> ToolRequest | None:
    """The tools of a call, functions described by their signatures and docstrings; None without tools.

    Raises:
        InvalidTools: tools that cannot be called.
        InvalidMessages: a function that cannot be described.
    """
    if isinstance(tools, list | tuple) and any(map(callable, tools)):
        described = schemas_of(tools, model.tokenizer)
        tools = [
            _without_return(tool) if callable(given) else tool for given, tool in zip(tools, described, strict=True)
        ]
    return read_tool_request(tools, choice, is_parallel)


def _without_return(tool: Any) -> Any:
    """A described function without what it returns, which no model is asked for."""
    function = {key: value for key, value in tool["function"].items() if key != "return"}
    return {**tool, "function": function}


def bundled_reader() -> Path:
    """The folder of the small model that comes with the package."""
    return Path(__file__).parent / "bundled" / "reader"


def usual_context(model: str | Path | AnyModel) -> ChunkContext:
    """What documents saw where nothing is set: as the model's configuration says, or companions.

    The small readers say "system": they know texts of their own kind only, and a paragraph of prose confuses them.
    """
    said = getattr(getattr(getattr(model, "module", None), "config", None), CHUNK_CONTEXT_KEY, None)
    if isinstance(model, str | Path):
        path = (bundled_reader() if model == BUNDLED_READER else Path(model)) / "config.json"
        with suppress(OSError, ValueError, KeyError, TypeError):  # not a folder, or it cannot be loaded either
            said = json.loads(path.read_bytes())[CHUNK_CONTEXT_KEY]
    return "system" if said == "system" else "companions"


def profile_place(model: str | Path | AnyModel) -> Path | None:
    """The file of a model's profile: in its folder, or beside its file under the name of that file.

    None if the model was loaded already or comes from the hub.
    """
    if not isinstance(model, str | Path):
        return None
    model_format, source = find_format(bundled_reader() if model == BUNDLED_READER else model)
    return model_format.profile_path(source, PROFILE_NAME)


def check_movable(model: EngineModel, config: ChunkCacheConfig) -> None:
    """Raises NotMovable if the settings move documents and the model does not allow that."""
    if model.is_movable:
        return
    if not always_fits(read_find_documents(config.find_documents)):
        raise NotMovable(
            f"find_documents={config.find_documents!r} places documents after other text, and this model does not "
            f"allow that ({model.immovable_reason}); use find_documents='none'"
        )
    name = config.position_strategy
    chosen = choose_strategy(0, None, is_movable=False) if name == AUTO else name
    context = config.context_in(chosen)
    if strategy_named(chosen).moves(context):
        raise not_movable(model, config.position_strategy, context)


def runs_in_llama(name: str | Path, engine: EngineName, dtype: str, kv_cache_dtype: str = "auto") -> bool:
    """Whether llama.cpp is to run a model; `auto` takes it if nothing is asked for that it does not do.

    Raises:
        InvalidConfig: it was asked for, and the model is no GGUF file, or the dtype is for transformers; or settings
            are for llama.cpp, which does not run it.
    """
    is_gguf = find_format(name)[0] is FORMATS["gguf"]
    if engine == "llama" and not is_gguf:
        raise InvalidConfig(
            f"engine='llama' runs GGUF files, and {name} is none; give a .gguf file, or take engine='transformers'"
        )
    if engine == "llama" and dtype != "auto":
        raise InvalidConfig(
            f"dtype={dtype!r:.80} is for transformers: llama.cpp computes with the weights of the file; leave it out, "
            "or take engine='transformers'"
        )
    if engine == "llama":
        return True

    def is_installed() -> bool:
        return find_spec("kvmosaic.llama") is not None and cast(Any, engine_named("llama.cpp")).is_installed()

    if is_gguf and engine == "auto" and dtype == "auto" and is_installed():
        return True
    if kv_cache_dtype != "auto":
        way_out = "leave it out" if not is_gguf or is_installed() else pip_install("llama")
        raise InvalidConfig(
            f"kv_cache_dtype={kv_cache_dtype!r:.80} is for llama.cpp, and transformers runs {name}; {way_out} (its "
            "cache has the dtype of the model)"
        )
    return False


def may_leave_llama(engine: EngineName, kv_cache_dtype: str) -> bool:
    """Whether a file that llama.cpp refuses may run in transformers: nothing was asked for that only llama.cpp does."""
    return engine == "auto" and kv_cache_dtype == "auto"


def open_model(
    name: str | Path,
    *,
    engine: EngineName = "auto",
    kv_cache_dtype: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    max_positions: int | None = None,
    num_threads: int | None = None,
    **options: Any,
) -> AnyModel:
    """Loads a model into the engine that is to run it.

    Args:
        name: see `LLM`, and so for the settings.
        engine: what is to run it.
        kv_cache_dtype: for llama.cpp.
        dtype: for transformers.
        device: where weights are to be.
        max_positions: the longest sequence to run.
        num_threads: compute threads; None: as the engine chooses.
        options: more of `load_model`, for transformers.

    Raises:
        ModelNotFound, UnsupportedModel, InvalidConfig: see `load_model` and `load_llama`.
    """
    if engine not in get_args(EngineName):
        raise InvalidConfig(f"engine is {engine!r:.80}; choose 'auto', 'transformers' or 'llama' (llama.cpp)")
    if options.get("adapters"):
        if engine == "llama":
            raise InvalidConfig(
                "adapters are for transformers: llama.cpp applies an adapter to all prompts of a context; take "
                "engine='transformers', or merge the adapter into the weights before the file is written"
            )
        engine = "transformers"
    is_llama = runs_in_llama(name, engine, dtype, kv_cache_dtype)
    settings: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "max_positions": max_positions,
        "num_threads": num_threads,
        "kv_cache_dtype": kv_cache_dtype,
        **options,
    }
    if is_llama:
        try:
            return engine_named("llama.cpp").open_model(name, **settings)
        except KeepsState as error:
            if not may_leave_llama(engine, kv_cache_dtype):
                raise
            logger.warning("%s: it runs in transformers, dequantized", str(error).partition(",")[0])
    return engine_named("transformers").open_model(bundled_reader() if name == BUNDLED_READER else name, **settings)


def build_engine(
    model: AnyModel,
    config: ChunkCacheConfig,
    engine_config: EngineConfig,
    backend: AttentionBackend | None = None,
    has_chunk_cache: bool = True,
    tier_config: TierConfig | None = None,
) -> Engine:
    """Gives a model its pools, its KV cache and its engine, in the memory that the settings allow.

    Raises:
        InvalidConfig: a setting that cannot work, a tier that cannot be opened among them.
    """
    bytes_per_block = model.bytes_per_token() * config.block_size
    request_bytes, max_states = parse_bytes(engine_config.request_cache_size), 0
    if model.state_bytes:
        max_states = _states_within(request_bytes, model.state_bytes, _TURN_TOKENS * model.bytes_per_token())
        request_bytes -= max_states * model.state_bytes
    policy = repair_policy(config.repair)
    repaired_tokens = policy.tokens if model.map_bytes and isinstance(policy, FirstTokens) else 0
    num_maps = 2 if repaired_tokens else 1  # of a whole document, and of what is never repaired
    fingerprint = f"{model.fingerprint} after {repaired_tokens}" if repaired_tokens else model.fingerprint
    request_blocks = blocks_within(request_bytes, bytes_per_block, "request_cache_size")
    engine = engine_named(model.engine_name)
    if engine.max_cells is not None:
        request_blocks = min(request_blocks, -(-engine.max_cells // config.block_size))
    chunk_blocks = 1
    if has_chunk_cache:
        capacity = _chunk_capacity(model, config, request_blocks * bytes_per_block)
        if model.map_bytes:
            map_bytes = model.map_bytes * num_maps
            most = _states_within(capacity, map_bytes, _DOCUMENT_TOKENS * model.bytes_per_token())
            config = replace(config, max_chunks=min(config.max_chunks, most))
            capacity -= config.max_chunks * map_bytes
        chunk_blocks = blocks_within(capacity, bytes_per_block, "the chunk cache's capacity")
    num_blocks: dict[PoolName, int] = {"request": request_blocks, "chunk_cache": chunk_blocks}
    num_tokens = sum(num_blocks.values()) * config.block_size + engine.working_cells(num_blocks, config.block_size)
    check_fits(num_tokens * model.bytes_per_token(), model.device)
    kv_cache = KVCache(
        fingerprint,
        config,
        request_blocks=request_blocks,
        chunk_blocks=chunk_blocks,
        prefix_caching=engine_config.enable_prefix_caching,
        bytes_per_block=bytes_per_block,
        max_states=max_states,
        repaired_tokens=repaired_tokens,
    )
    runner = engine.build_runner(model, num_blocks, config.block_size, engine_config, backend)
    offloader = None
    if tier_config is not None and tier_config.chunk_tier and has_chunk_cache:
        if tier_config.chunk_codec != "none" and (reason := engine.no_codec_reason):
            raise InvalidConfig(f"chunk_codec={tier_config.chunk_codec!r} rounds numbers, and {reason}")
        offloader = _build_offloader(runner, model, kv_cache, tier_config, model.map_shapes * num_maps)
    return Engine(runner, kv_cache, config, engine_config, offloader=offloader)


def _states_within(num_bytes: int, state_bytes: int, text_bytes: int) -> int:
    """How many states a cache has room for, beside the keys and values of their texts.

    Raises:
        InvalidConfig: not even for two.
    """
    count = num_bytes // (state_bytes + text_bytes)
    if count < 2:
        raise InvalidConfig(
            f"a state of this model takes {_mib(state_bytes)}, the text that belongs to it {_mib(text_bytes)}, and a "
            f"cache has {_mib(num_bytes)}; give it {_mib(4 * (state_bytes + text_bytes))} or more"
        )
    return count


def _chunk_capacity(model: AnyModel, config: ChunkCacheConfig, request_bytes: int) -> int:
    """Bytes of the chunk cache.

    Raises:
        InvalidConfig: weights and request cache alone take more than `memory_utilization` allows.
    """
    if config.chunk_cache_fraction is not None:
        return int(config.chunk_cache_fraction * device_memory_bytes(model.device))
    if config.memory_utilization is None:
        capacity = config.capacity_bytes
        return _share_of_free_memory(model, request_bytes) if capacity is None else capacity
    total, weights = device_memory_bytes(model.device), model.weight_bytes
    allowed = int(config.memory_utilization * total)
    if weights + request_bytes >= allowed:
        raise InvalidConfig(
            f"memory_utilization={config.memory_utilization:g} allows {_gib(allowed)} of the {_gib(total)} of "
            f"{model.device}, but the weights take {_gib(weights)} and the request cache {_gib(request_bytes)}; "
            "raise it, or make request_cache_size smaller"
        )
    return allowed - weights - request_bytes


def check_fits(num_bytes: int, device: object) -> None:
    """Raises InvalidConfig if caches are larger than the device.

    A system that overcommits memory would allocate them, and kill the process when they fill.
    """
    total = device_memory_bytes(device)
    if num_bytes > total:
        raise InvalidConfig(
            f"the chunk cache and the request cache are to take {num_bytes / 2**30:.1f} GiB, but {device} has "
            f"{total / 2**30:.1f} GiB in all, and the model needs some of it; make the caches smaller"
        )


def device_memory_bytes(device: object) -> int:
    """Total memory of a device: of the GPU, or for the CPU that of the machine, or of the container if it is less."""
    if str(device).startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(str(device)).total_memory)
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(of_machine, memory_limit() or of_machine)


def free_memory_bytes(device: object) -> int:
    """Memory of a device that nothing uses: for the CPU, of the machine, or of the container if it is less."""
    if str(device).startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(str(device))[0])
    return available_memory() or device_memory_bytes(device)


def _share_of_free_memory(model: AnyModel, request_bytes: int) -> int:
    """The size of a chunk cache that is `auto`."""
    share = _FREE_SHARE_CPU if str(model.device) == "cpu" else _FREE_SHARE_GPU
    return max(int(share * (free_memory_bytes(model.device) - request_bytes)), _MIN_CACHE_BYTES)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _build_offloader(
    runner: StepRunner, model: AnyModel, kv_cache: KVCache, config: TierConfig, states: Sequence[StateShape]
) -> ChunkOffloader:
    from kvmosaic.engine.chunk_entries import ChunkEntries
    from kvmosaic.engine.chunk_offloader import ChunkOffloader
    from kvmosaic.engine.model_runner import StateStorage
    from kvmosaic.memory import pinned_bytes

    storage = runner.storages["chunk_cache"]
    entries = ChunkEntries(kv_cache.fingerprint, storage, config, states)
    allocate = pinned_bytes if str(model.device).startswith("cuda") else None
    return ChunkOffloader(
        kv_cache,
        storage,
        TieredStore(
            open_tiers(config.chunk_tier, allocate=allocate),
            max_pending_bytes=parse_bytes(config.chunk_pending),
            loading=config.chunk_loading,
        ),
        entries,
        max_staged_bytes=parse_bytes(config.chunk_staged),
        states=runner if model.map_bytes and isinstance(runner, StateStorage) else None,
    )
