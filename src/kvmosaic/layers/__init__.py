"""Layer facts: what storage, attention, the engine and capacity planning know of each attention layer of a model.

geometry    what a layer stores per token: heads and dimensions
mask        which earlier positions a token sees
bias        what is added to its scores by distance (ALiBi)
spec        all facts of a layer: its geometry and mask, its rotation, whether its keys can be moved
call        one attention call of a layer in a forward
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.layers.bias import DistanceBias
    from kvmosaic.layers.call import AttentionCall
    from kvmosaic.layers.geometry import LayerGeometry, LayerShape, geometry_of, stored_layers
    from kvmosaic.layers.mask import MaskKind, MaskSpec
    from kvmosaic.layers.spec import LayerSpec

__all__ = [
    "AttentionCall",
    "DistanceBias",
    "LayerGeometry",
    "LayerShape",
    "LayerSpec",
    "MaskKind",
    "MaskSpec",
    "geometry_of",
    "stored_layers",
]

# Names are imported on first use: geometry and masks are read without torch, by `kvmosaic cache` for instance.
_HOMES = {
    "bias": ("DistanceBias",),
    "call": ("AttentionCall",),
    "geometry": ("LayerGeometry", "LayerShape", "geometry_of", "stored_layers"),
    "mask": ("MaskKind", "MaskSpec"),
    "spec": ("LayerSpec",),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
