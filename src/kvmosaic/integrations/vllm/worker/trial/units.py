"""Modules around the attention layers of a model: what can be called again with its arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout


def units(places: KVLayout) -> dict[nn.Module, tuple[str, ...]]:
    """The modules around each attention layer, and the names of the attention layers in them."""
    found: dict[nn.Module, list[str]] = {}
    for name, modules in modules_around(places).items():
        for module in modules:
            found.setdefault(module, []).append(name)
    return {module: tuple(inside) for module, inside in found.items()}


def modules_around(places: KVLayout) -> dict[str, Sequence[nn.Module]]:
    """By name of an attention layer: the modules from the model's decoder layer down to its direct parent."""
    modules = dict(places.root.named_modules())
    names = {id(module): name for name, module in modules.items()}
    return {place.name: _around(names.get(id(place.layer), ""), modules) for place in places.layers}


def _around(path: str, modules: dict[str, nn.Module]) -> Sequence[nn.Module]:
    parts = path.split(".")
    above = [modules[".".join(parts[:end])] for end in range(1, len(parts))]
    lists = [number for number, module in enumerate(above) if isinstance(module, nn.ModuleList)]
    return [module for module in above[lists[0] + 1 :] if not isinstance(module, nn.ModuleList)] if lists else []
