"""Codecs: fewer bytes for keys and values, at a measured loss."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from kvmosaic.entries.codec.codec import Along, Codec, Part, Plain, Shape
from kvmosaic.entries.codec.int4 import Int4
from kvmosaic.entries.codec.symmetric import FP8, INT8
from kvmosaic.entries.header import CodecName
from kvmosaic.errors import InvalidConfig

CODECS: Mapping[CodecName, Codec] = MappingProxyType({"none": Plain(), "fp8": FP8, "int8": INT8, "int4": Int4()})


def choose_codec(name: str, dtype: torch.dtype) -> Codec:
    """The codec of this name, for keys and values of this dtype.

    Raises:
        InvalidConfig: no such codec, or one that would throw away what float64 is used for.
    """
    found = next((codec for known, codec in CODECS.items() if known == name), None)
    if found is None:
        raise InvalidConfig(f"codec is {name!r:.80}; choose one of {', '.join(CODECS)}")
    if dtype == torch.float64 and found.name != "none":
        raise InvalidConfig(
            f"codec is {name!r}, but the model computes in float64, of which it would keep 2 digits; "
            "use codec 'none', or load the model in float32 or bfloat16"
        )
    return found


__all__ = ["CODECS", "Along", "Codec", "Part", "Shape", "choose_codec"]
