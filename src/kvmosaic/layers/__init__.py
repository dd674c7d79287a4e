"""Layer facts: what storage, attention, the engine and capacity planning know of each attention layer of a model.

geometry    what a layer stores per token, heads and dimensions, and which earlier positions a token sees
spec        all facts of a layer: its geometry and mask, its rotation, what is added to its scores by distance (ALiBi),
            whether its keys can be moved; and one attention call of it in a forward
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.layers.geometry import LayerGeometry, LayerShape, MaskKind, MaskSpec, geometry_of, stored_layers
    from kvmosaic.layers.spec import AttentionCall, DistanceBias, LayerSpec

# Names are imported on first use: geometry and masks are read without torch, by `kvmosaic cache` for instance.
_HOMES = {
    "geometry": ("LayerGeometry", "LayerShape", "MaskKind", "MaskSpec", "geometry_of", "stored_layers"),
    "spec": ("AttentionCall", "DistanceBias", "LayerSpec"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
