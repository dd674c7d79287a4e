"""Which llama.cpp is opened, and what is refused."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from kvmosaic.errors import UnsupportedModel, pip_install
from kvmosaic.llama import interface
from kvmosaic.llama.interface import Package

ANY = {"1.0": ctypes.Structure}


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, library: bytes | None = None) -> Package:
    """A package on the path with this version, and this content as its library."""
    (folder / "someplace").mkdir()
    (folder / "someplace" / "__init__.py").write_text("raise AssertionError('it is opened, not imported')")
    about = folder / f"some_llama-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: some-llama\nVersion: {version}\n")
    if library is not None:
        (folder / "someplace" / "llama.so").write_bytes(library)
    monkeypatch.syspath_prepend(str(folder))
    package = Package("some-llama", "someplace", ("llama*.so",), ANY)
    monkeypatch.setattr(interface, "PACKAGES", (Package("absent", "absent_llama", (), ANY), package))
    return package


def test_without_any_package_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "PACKAGES", (Package("absent", "absent_llama", (), ANY),))
    assert not interface.is_installed()
    with pytest.raises(UnsupportedModel, match=rf"not installed; {re.escape(pip_install('llama'))}, or take engine="):
        interface.bindings.__wrapped__()


def test_a_version_that_was_not_tested_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "2.0")
    assert interface.is_installed() and interface.build_name() == "some-llama 2.0"
    with pytest.raises(UnsupportedModel, match=r"2\.0 was not tested.*tested: 1\.0"):
        interface.bindings.__wrapped__()


@pytest.mark.parametrize(("library", "reason"), [(None, "no library"), (b"text", "cannot be opened")])
def test_a_library_that_cannot_be_opened_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bytes | None, reason: str
) -> None:
    installed(tmp_path, monkeypatch, "1.0", library)
    with pytest.raises(UnsupportedModel, match=reason):
        interface.bindings.__wrapped__()


def test_a_cpu_that_would_meet_an_illegal_instruction_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = installed(tmp_path, monkeypatch, "1.0", b"text")
    monkeypatch.setattr(interface, "PACKAGES", (package._replace(needs=frozenset({"avx2", "fma"})),))
    monkeypatch.setattr(interface, "cpu_flags", lambda: frozenset({"sse4_2", "fma"}))
    with pytest.raises(UnsupportedModel, match=r"this one lacks avx2; install llama-cpp-python"):
        interface.bindings.__wrapped__()
    monkeypatch.setattr(interface, "cpu_flags", frozenset)  # unknown: it is tried
    with pytest.raises(UnsupportedModel, match="cannot be opened"):
        interface.bindings.__wrapped__()


def test_every_tested_build_lays_out_its_defaults_as_declared() -> None:
    """Of the installed one: what its own defaults are, read through our declaration."""
    if not interface.is_installed():
        pytest.skip("llama.cpp is not installed")
    params = interface.bindings().llama_context_default_params()
    assert (params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max) == (512, 2048, 512, 1)
    assert (params.type_k, params.type_v, params.n_samplers, params.ctx_other) == (1, 1, 0, None)
    assert (params.offload_kqv, params.kv_unified, params.embeddings) == (True, False, False)
