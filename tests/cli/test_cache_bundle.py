"""Bundles that were made to do harm, and bundles that were broken on the way."""

from __future__ import annotations

import io
import os
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.cache import Key
from kvmosaic.errors import InvalidBundle
from kvmosaic.tiers import bundle as bundles
from kvmosaic.tiers.bundle import MANIFEST, Bundle, write_bundle

KEYS = [Key(bytes([number]) * 32) for number in range(1, 4)]
ENTRIES = {KEYS[0]: b"one" * 500, KEYS[1]: b"", KEYS[2]: b"three" * 1000}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.bundle"
    write_bundle(path, ENTRIES.items())
    return path


def contents(path: Path) -> dict[Key, bytes]:
    with Bundle(path) as bundle:
        return {member.key: bundle.read(member) for member in bundle.members}


def test_what_is_written_is_read(path: Path) -> None:
    assert contents(path) == ENTRIES
    with Bundle(path) as bundle:
        assert (bundle.contents.num_entries, bundle.contents.num_bytes) == (3, 6500)


def test_any_tar_can_list_it(path: Path) -> None:
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [MANIFEST, *(f"{key.hex()}.safetensors" for key in KEYS)]
        assert all(member.isreg() and member.mode == 0o600 for member in members)
        file = tar.extractfile(members[3])
        assert file is not None and file.read() == ENTRIES[KEYS[2]]


def test_it_is_for_its_owner_only(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    before = path.read_bytes()

    def entries():
        yield KEYS[0], b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bundle(path, entries())
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_an_entry_twice_or_with_another_kind_of_key_is_not_written(tmp_path: Path) -> None:
    for entries in ([(KEYS[0], b"a"), (KEYS[0], b"a")], [(Key(b"short"), b"a")]):
        with pytest.raises(InvalidBundle):
            write_bundle(tmp_path / "a.bundle", entries)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidBundle, match="cannot be written: No such file"):
        write_bundle(tmp_path / "nowhere" / "a.bundle", ENTRIES.items())


def test_a_large_bundle_is_never_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    entry = b"x" * 2**20
    keys = [Key(number.to_bytes(32, "little")) for number in range(64)]
    tracemalloc.start()
    write_bundle(tmp_path / "a.bundle", ((key, entry) for key in keys))
    with Bundle(tmp_path / "a.bundle") as bundle:
        assert sum(len(bundle.read(member)) for member in bundle.members) == 64 * 2**20
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


# everything that is not exactly what `write_bundle` writes


def forged(path: Path, *members: tarfile.TarInfo, manifest: bytes | None = None) -> None:
    """A tar file with a manifest of ours and these members, whose bytes are zeros."""
    buffer = io.BytesIO()
    sizes = [member.size for member in members]
    if manifest is None:
        manifest = bundles._manifest(bundles.BundleContents(len(members), sum(sizes)))
    buffer.write(bundles._header(MANIFEST, 512) + manifest)
    for member in members:
        size = member.size if member.isreg() else 0
        buffer.write(member.tobuf(tarfile.GNU_FORMAT) + bytes(-(-size // 512) * 512))
    buffer.write(bytes(1024))
    path.write_bytes(buffer.getvalue())


def member(name: str = KEYS[0].hex() + ".safetensors", size: int = 100, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def refused(path: Path) -> str:
    with pytest.raises(InvalidBundle) as found:
        Bundle(path)
    return str(found.value)


def test_the_forger_can_make_a_bundle_that_is_read(tmp_path: Path) -> None:
    forged(tmp_path / "a", member())
    assert contents(tmp_path / "a") == {KEYS[0]: bytes(100)}


@pytest.mark.parametrize(
    "info",
    [
        member("../../etc/passwd"),
        member("/etc/passwd"),
        member("../" + KEYS[0].hex() + ".safetensors"),
        member(KEYS[0].hex().upper().replace("0", "A") + ".safetensors"),
        member(KEYS[0].hex() + ".safetensors/"),
        member(KEYS[0].hex() + ".pickle"),
        member(KEYS[0].hex()),
        member("ab" * 64 + ".safetensors"),
        member("ab.safetensors"),
        member(".safetensors"),
        member("\u00e9" * 10),
        member(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member(type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        member(type=tarfile.DIRTYPE),
        member(type=tarfile.FIFOTYPE),
        member(type=tarfile.CHRTYPE),
        member(type=tarfile.CONTTYPE),
        member(type=tarfile.GNUTYPE_SPARSE),
        member(type=tarfile.GNUTYPE_LONGNAME),
        member(type=tarfile.XHDTYPE),
        member(mode=0o4755),
        member(uid=1000),
        member(mtime=1),
        member(uname="root"),
        member(MANIFEST),
    ],
    ids=lambda info: f"{info.name[:16]}-{info.type.decode()}-{info.mode:o}",
)
def test_members_that_are_no_entries_are_refused(info: tarfile.TarInfo, tmp_path: Path) -> None:
    forged(tmp_path / "a", info)
    assert "is not a bundle" in refused(tmp_path / "a")


@pytest.mark.parametrize("size", [2**63, 2**36 + 1, 2**36, 2**33, 10_000])
def test_sizes_beyond_the_file_are_refused_before_anything_is_read(size: int, tmp_path: Path) -> None:
    header = member(size=size).tobuf(tarfile.GNU_FORMAT)
    manifest = bundles._manifest(bundles.BundleContents(1, size))
    (tmp_path / "a").write_bytes(bundles._header(MANIFEST, 512) + manifest + header + bytes(2048))
    assert "is not a bundle" in refused(tmp_path / "a")


def test_a_negative_size_is_refused(tmp_path: Path) -> None:
    block = bytearray(member().tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 12
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "a").write_bytes(
        bundles._header(MANIFEST, 512) + bundles._manifest(bundles.BundleContents(1, 0)) + block + bytes(1024)
    )
    assert "is not a bundle" in refused(tmp_path / "a")


def test_an_entry_twice_is_refused(tmp_path: Path) -> None:
    forged(tmp_path / "a", member(), member())
    assert "twice" in refused(tmp_path / "a")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'"text"',
        b"[" * 400,
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": 1, "bytes": 100, "more": 1}',
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": true, "bytes": 100}',
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": 1.0, "bytes": 100}',
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": -1, "bytes": 100}',
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": 1000001, "bytes": 100}',
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": 1, "bytes": 1' + b"0" * 300 + b"}",
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": 2, "bytes": 100}',
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": 0, "bytes": 100}',
        b'{"format": "kvmosaic-bundle", "version": 1, "entries": 1, "bytes": 101}',
        b'{"format": "other", "version": 1, "entries": 1, "bytes": 100}',
        b'{"format": "kvmosaic-bundle", "version": NaN, "entries": 1, "bytes": 100}',
        b"\xff\xfe",
    ],
)
def test_other_manifests_are_refused(text: bytes, tmp_path: Path) -> None:
    forged(tmp_path / "a", member(), manifest=text.ljust(511) + b"\n")
    assert "is not a bundle" in refused(tmp_path / "a")


def test_another_version_says_so(tmp_path: Path) -> None:
    text = b'{"format": "kvmosaic-bundle", "version": 2, "entries": 1, "bytes": 100}'
    forged(tmp_path / "a", member(), manifest=text.ljust(511) + b"\n")
    assert "is a bundle of version 2, expected 1" in refused(tmp_path / "a")


def test_every_truncation_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for length in [*range(0, len(data), 64), len(data) - 1]:
        path.write_bytes(data[:length])
        refused(path)
    path.write_bytes(data + b"\0")
    refused(path)


def test_every_changed_byte_of_the_frame_is_refused(path: Path) -> None:
    write_bundle(path, [(KEYS[0], ENTRIES[KEYS[0]])])
    data = path.read_bytes()
    with Bundle(path) as bundle:
        (entry,) = bundle.members
    for place in {*range(entry.begin), *range(entry.begin + entry.num_bytes, len(data))}:
        if data[place] in b"\0 " and place % 16:
            continue  # most of the frame is empty, and one part of it like the other
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        refused(path)


@given(data=st.binary(max_size=4096))
def test_no_bytes_make_it_fail_otherwise(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.bundle"
    path.write_bytes(data)
    refused(path)
    path.write_bytes(bundles._header(MANIFEST, 512) + bundles._manifest(bundles.BundleContents(1, 1)) + data)
    refused(path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: None], ids=["folder", "pipe", "nothing"])
def test_what_is_no_file_is_one_message(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "a")
    asking = threading.Thread(target=refused, args=(tmp_path / "a",))
    asking.start()
    asking.join(timeout=60)
    assert not asking.is_alive()


def test_a_file_that_is_cut_while_it_is_read_is_one_message(path: Path) -> None:
    with Bundle(path) as bundle:
        os.truncate(path, 1024)
        with pytest.raises(InvalidBundle, match="became shorter"):
            bundle.read(bundle.members[2])
