"""Native backend: a small C kernel that reads a layer's runs of keys in place, several cores wide."""

from kvmosaic.attention.native.backend import NativeBackend
from kvmosaic.attention.native.library import LIBRARY, Library, load_library

__all__ = ["LIBRARY", "Library", "NativeBackend", "load_library"]
