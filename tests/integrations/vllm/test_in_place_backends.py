"""Attention backends that read documents, beside the source of vLLM: what they extend is what they were written for.

Nothing here needs a GPU: the source is read, not run.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvmosaic.vllm import plugin
from kvmosaic.vllm.settings import READS_VARIABLE
from kvmosaic.vllm.worker.in_place.attention import ReadsDocuments

EARLIER = Path(sys.prefix) / "earlier" / "vllm"
INSTALLED = Path(importlib.util.find_spec("vllm").origin).parent
SOURCES = [
    pytest.param(INSTALLED, id="installed"),
    pytest.param(
        EARLIER, id="0.23", marks=pytest.mark.skipif(not EARLIER.exists(), reason="make test-vllm brings vLLM 0.23")
    ),
]
CLASSES = {
    "CPU_ATTN": ("cpu_attn", "CPUAttentionBackend", "CPUAttentionBackendImpl"),
    "FLASH_ATTN": ("flash_attn", "FlashAttentionBackend", "FlashAttentionImpl"),
    "TRITON_ATTN": ("triton_attn", "TritonAttentionBackend", "TritonAttentionImpl"),
}
FORWARD = [
    "self",
    "layer",
    "query",
    "key",
    "value",
    "kv_cache",
    "attn_metadata",
    "output",
    "output_scale",
    "output_block_scale",
]
GPU = ("FLASH_ATTN", "TRITON_ATTN")


def classes_of(source, name):
    """The backend and its implementation, as syntax trees."""
    module, *names = CLASSES[name]
    tree = ast.parse((source / "v1" / "attention" / "backends" / f"{module}.py").read_text())
    by_name = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert set(names) <= set(by_name), f"{module}.py no longer has {names}"
    return [by_name[each] for each in names]


def method(node, name):
    """A method of a class, by its name; None: inherited."""
    return next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def assigned(node):
    """Attributes that the constructor of a class sets."""
    targets = [
        target
        for each in ast.walk(method(node, "__init__"))
        for target in (each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)])
    ]
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {target.attr for target in flat if isinstance(target, ast.Attribute)}


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("source", SOURCES)
def test_forward_takes_what_ours_hands_on(source, name):
    _, implementation = classes_of(source, name)
    arguments = method(implementation, "forward").args
    assert [each.arg for each in arguments.args] == FORWARD
    assert len(arguments.defaults) == 2 and not arguments.kwonlyargs and arguments.vararg is None
    ours = list(inspect.signature(ReadsDocuments.forward).parameters)
    assert ours[: len(FORWARD) - 2] == FORWARD[:-2] and ours[len(FORWARD) - 2 :] == ["args", "kwargs"]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("source", SOURCES)
def test_the_implementation_has_what_is_read_of_it(source, name):
    backend, implementation = classes_of(source, name)
    known = {"scale", "logits_soft_cap", "sinks", "sliding_window", "alibi_slopes"}
    assert known <= assigned(implementation), known - assigned(implementation)
    assert method(backend, "get_impl_cls").args.args == []
    assert not {"reader"} & assigned(implementation)


@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize("source", SOURCES)
def test_keys_of_the_step_are_stored_before_its_attention(source, name):
    """The Triton kernel reads a request's own keys from the cache, those of the step included."""
    backend, implementation = classes_of(source, name)
    flags = [
        each.value.value
        for each in backend.body
        if isinstance(each, ast.AnnAssign) and each.target.id == "forward_includes_kv_cache_update"
    ]
    assert flags == [False]
    assert [each.arg for each in method(implementation, "do_kv_cache_update").args.args] == [
        *("self", "layer", "key", "value", "kv_cache", "slot_mapping")
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_fused_output_quantization_is_asked_for_by_the_name_that_ours_denies(source):
    _, implementation = classes_of(source, "TRITON_ATTN")
    asked = method(implementation, "fused_output_quant_supported")
    assert [each.arg for each in asked.args.args] == list(
        inspect.signature(ReadsDocuments.fused_output_quant_supported).parameters
    )


@pytest.mark.parametrize("name", CLASSES)
def test_our_backend_is_vllms_with_another_implementation(name):
    module, class_name = plugin.BACKENDS[name].rsplit(".", 1)
    ours = getattr(import_module(module), class_name)
    vllm_module, backend, implementation = CLASSES[name]
    theirs = import_module(f"vllm.v1.attention.backends.{vllm_module}")
    assert issubclass(ours, getattr(theirs, backend)) and ours.get_name() == name
    found = ours.get_impl_cls()
    assert issubclass(found, getattr(theirs, implementation)) and found.forward is ReadsDocuments.forward
    assert found.fused_output_quant_supported is ReadsDocuments.fused_output_quant_supported
    assert found.__mro__.index(ReadsDocuments) < found.__mro__.index(getattr(theirs, implementation))


@pytest.fixture
def registry():
    """vLLM's overrides of backends, restored afterwards."""
    from vllm.v1.attention.backends import registry

    kept = dict(registry._ATTN_OVERRIDES)
    registry._ATTN_OVERRIDES.clear()
    yield registry
    registry._ATTN_OVERRIDES.clear()
    registry._ATTN_OVERRIDES.update(kept)


def test_backends_are_overridden_only_where_documents_are_read_in_place(registry, monkeypatch):
    monkeypatch.delenv(READS_VARIABLE, raising=False)
    plugin.register()
    assert not registry._ATTN_OVERRIDES
    monkeypatch.setenv(READS_VARIABLE, "in-place")
    for _ in range(2):
        plugin.register()
        found = {each.name: path for each, path in registry._ATTN_OVERRIDES.items()}
        assert found == plugin.BACKENDS
    for name, path in plugin.BACKENDS.items():
        assert registry.AttentionBackendEnum[name].get_path() == path
