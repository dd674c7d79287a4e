"""The C interface of llama.cpp: the functions and structures that we use, for each build of it that was tested.

Two packages bring the library, and neither is imported. A structure of another build would be read as garbage, so a
version that is not in the table is refused.

    package             library                     how it is installed
    llama-cpp-python    compiled for this machine   some minutes, with a compiler; preferred where both are
    xllamacpp           prebuilt                    seconds; CPUs, Metal; other wheels of it: CUDA, ROCm, Vulkan
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvmosaic.container import cpu_flags
from kvmosaic.errors import UnsupportedModel, pip_install

logger = logging.getLogger("kvmosaic.llama")

_ERROR = 4
"""ggml's level of errors."""


class Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


class ModelParams(ctypes.Structure):
    """`llama_model_params`."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class MetadataOverride(ctypes.Structure):
    """`llama_model_kv_override`, for whole numbers."""

    _fields_ = (("tag", c_int32), ("key", ctypes.c_char * 128), ("value", c_int64), ("_rest", ctypes.c_char * 120))


_CONTEXT_HEAD = (
    ("n_ctx", c_uint32),
    ("n_batch", c_uint32),
    ("n_ubatch", c_uint32),
    ("n_seq_max", c_uint32),
    ("n_rs_seq", c_uint32),
    ("n_outputs_max", c_uint32),
    ("n_outputs_max_per_seq", c_uint32),
    ("n_threads", c_int32),
    ("n_threads_batch", c_int32),
    ("ctx_type", c_int32),
    ("rope_scaling_type", c_int32),
    ("pooling_type", c_int32),
    ("attention_type", c_int32),
    ("flash_attn_type", c_int32),
    ("rope_freq_base", c_float),
    ("rope_freq_scale", c_float),
    ("yarn_ext_factor", c_float),
    ("yarn_attn_factor", c_float),
    ("yarn_beta_fast", c_float),
    ("yarn_beta_slow", c_float),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    ("cb_eval", c_void_p),
    ("cb_eval_user_data", c_void_p),
    ("type_k", c_int32),
    ("type_v", c_int32),
)
_CONTEXT_TAIL = (
    ("abort_callback", c_void_p),
    ("abort_callback_data", c_void_p),
    ("embeddings", c_bool),
    ("offload_kqv", c_bool),
    ("no_perf", c_bool),
    ("op_offload", c_bool),
    ("swa_full", c_bool),
    ("kv_unified", c_bool),
    ("samplers", c_void_p),
    ("n_samplers", c_size_t),
    ("ctx_other", c_void_p),
)


class ContextParams(ctypes.Structure):
    """`llama_context_params` of builds without a cache of experts."""

    _fields_ = (*_CONTEXT_HEAD, *_CONTEXT_TAIL)


class ContextParamsWithExperts(ctypes.Structure):
    """`llama_context_params` of builds with a cache of experts."""

    _fields_ = (*_CONTEXT_HEAD, ("moe_cache_size", c_size_t), *_CONTEXT_TAIL)


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LOG, c_void_p)),
    "llama_print_system_info": (c_char_p, ()),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParams)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_n_layer": (c_int32, (c_void_p,)),
    "llama_model_n_head_kv": (c_int32, (c_void_p,)),
    "llama_model_n_swa": (c_int32, (c_void_p,)),
    "llama_model_rope_type": (c_int32, (c_void_p,)),
    "llama_model_n_params": (c_uint64, (c_void_p,)),
    "llama_model_size": (c_uint64, (c_void_p,)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_model_desc": (c_int32, (c_void_p, c_char_p, c_size_t)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_free": (None, (c_void_p,)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits": (c_void_p, (c_void_p,)),
    "llama_memory_can_shift": (c_bool, (c_void_p,)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_add": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
}
"""Results and arguments; those of `llama_context_params` are added for each build."""


class Package(NamedTuple):
    """A package that brings llama.cpp."""

    name: str
    module: str
    libraries: tuple[str, ...]
    """Patterns of the library's file in the module's folder; the first that is there is opened."""
    tested: dict[str, type[ctypes.Structure]]
    """Versions that were tested, and their `llama_context_params`."""
    needs: frozenset[str] = frozenset()
    """Instruction sets of an x86 CPU for which it was built, by their names in Linux."""

    @property
    def version(self) -> str:
        """Of the installed package."""
        return metadata.version(self.name)

    def folder(self) -> Path | None:
        """Where it is installed; None if it is not."""
        spec = find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(spec.submodule_search_locations[0])


PACKAGES = (
    Package(
        "llama-cpp-python",
        "llama_cpp",
        ("lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll"),
        {"0.3.36": ContextParams},
    ),
    Package(
        "xllamacpp",
        "xllamacpp",
        ("xllamacpp*.so",),
        {"2026.10.11549": ContextParamsWithExperts},
        frozenset({"avx2", "fma", "f16c"}),
    ),
)


def is_installed() -> bool:
    """Whether any package that brings llama.cpp is there."""
    return any(package.folder() for package in PACKAGES)


def installed_package() -> Package:
    """The first package that is installed.

    Raises:
        UnsupportedModel: none is.
    """
    for package in PACKAGES:
        if package.folder():
            return package
    raise UnsupportedModel(
        f"llama.cpp is not installed; {pip_install('llama')}, or take engine='transformers', which dequantizes the file"
    )


def build_name() -> str:
    """Package and version of the library, for example "xllamacpp 2026.10.11549"."""
    package = installed_package()
    return f"{package.name} {package.version}"


def build_text() -> str:
    """The engine and its build, for people."""
    return f"llama.cpp ({build_name()})"


@functools.cache
def bindings() -> Any:
    """The library, initialized; its messages go to our log.

    Raises:
        UnsupportedModel: none is installed, its version was not tested, or it cannot be opened.
    """
    package = installed_package()
    context_params = package.tested.get(package.version)
    if context_params is None:
        raise UnsupportedModel(
            f"{package.name} {package.version} was not tested, and its structures may differ; tested: "
            f"{', '.join(package.tested)} ({pip_install('llama')}, or take engine='transformers')"
        )
    known = cpu_flags()
    if known and (lacking := package.needs - known):
        raise UnsupportedModel(
            f"{package.name} was built for CPUs with {', '.join(sorted(package.needs))}, and this one lacks "
            f"{', '.join(sorted(lacking))}; install llama-cpp-python, which is compiled for this machine, or take "
            "engine='transformers'"
        )
    library = _open(package)
    functions = {
        **_FUNCTIONS,
        "llama_context_default_params": (context_params, ()),
        "llama_init_from_model": (c_void_p, (c_void_p, context_params)),
    }
    for name, (result, arguments) in functions.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise UnsupportedModel(f"the library of {build_name()} has no {name}; {pip_install('llama')}") from error
        function.restype, function.argtypes = result, list(arguments)
    library.llama_log_set(_log, None)
    library.llama_backend_init()
    return library


def _open(package: Package) -> ctypes.CDLL:
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a file that makes it abort starts no debugger
    reason = "it has no library that can be opened on this system"
    for path in _candidates(package):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            reason = str(error)
    raise UnsupportedModel(f"llama.cpp of {package.name} {package.version} cannot be opened: {reason}")


def _candidates(package: Package) -> Iterator[Path]:
    folder = package.folder()
    assert folder is not None
    for pattern in package.libraries:
        yield from sorted(folder.glob(pattern))


class Message(NamedTuple):
    """What llama.cpp says."""

    level: int
    text: str

    @property
    def is_error(self) -> bool:
        """Whether something went wrong."""
        return self.level >= _ERROR


class _Heard(threading.local):
    """Messages of a thread, while it listens."""

    messages: list[Message] | None = None


_heard = _Heard()


@contextmanager
def messages_of_llama() -> Iterator[list[Message]]:
    """What llama.cpp says in this thread, from here on, whether it is logged or not."""
    _heard.messages = []
    try:
        yield _heard.messages
    finally:
        _heard.messages = None


def _write_log(level: int, text: bytes, _: Any) -> None:
    if message := text.decode("utf-8", "replace").strip(" .\n"):
        if _heard.messages is not None:
            _heard.messages.append(Message(level, message))
        logger.log(logging.WARNING if level == _ERROR else logging.DEBUG, "%s", message)  # it warns of what is no fault


_log = _LOG(_write_log)
"""Kept alive by the module: llama.cpp calls it for ever."""
