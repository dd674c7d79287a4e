"""transformers models: loading, detection of their attention layers, and access to their attention."""

from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec
from kvmosaic.model.hook import ATTENTION_NAME, Receiver, attention_scope, install
from kvmosaic.model.load import load_model
from kvmosaic.model.loaded import LoadedModel

__all__ = [
    "ATTENTION_NAME",
    "AttentionCall",
    "LayerSpec",
    "LoadedModel",
    "MaskSpec",
    "Receiver",
    "attention_scope",
    "install",
    "load_model",
]
