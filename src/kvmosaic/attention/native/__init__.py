"""Native backend: a small multi-threaded C kernel that reads a layer's runs of keys in place."""

from kvmosaic.attention.native.backend import LIBRARY, Library, NativeBackend, load_library

__all__ = ["LIBRARY", "Library", "NativeBackend", "load_library"]
