"""An entry gives back what was stored, to those who ask for exactly that."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from entries.entries import LAYERS, STATES, expectation, header, same_bits, stored, tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.cpu_time import least_cpu_seconds

from kvmosaic.entries import (
    EntryBound,
    decode_entry,
    encode_entry,
)
from kvmosaic.entries.entry import read_file_header
from kvmosaic.entries.header import MAX_NAMES, MAX_TEXT
from kvmosaic.entries.verification import num_file_header_bytes
from kvmosaic.errors import DamagedEntry, ForeignEntry, InvalidConfig, OtherSecret
from kvmosaic.layers import LayerGeometry

widths = st.integers(1, 70)


@st.composite
def geometries(draw) -> tuple[LayerGeometry, ...]:
    layers: list[LayerGeometry] = []
    for index in range(draw(st.integers(1, 4))):
        owners = [number for number, layer in enumerate(layers) if layer.source_layer == number]
        if owners and draw(st.integers(0, 3)) == 0:
            source = draw(st.sampled_from(owners))
            layers.append(replace(layers[source], source_layer=source))
            continue
        in_key, key_dim = draw(st.booleans()), draw(widths)
        value_dim = draw(st.integers(1, key_dim)) if in_key else draw(widths)
        layers.append(LayerGeometry(index, draw(st.integers(1, 3)), key_dim, value_dim, in_key))
    return tuple(layers)


dtypes = st.sampled_from(["float64", "float32", "bfloat16", "float16"])


@given(layers=geometries(), dtype=dtypes, num_tokens=st.integers(1, 130), data=st.data())
def test_without_a_codec_every_bit_comes_back(layers, dtype, num_tokens, data):
    head = header(num_tokens, layers, dtype=dtype, states=data.draw(st.sampled_from([(), STATES])))
    chunk = tensors(head, data.draw(st.integers(0, 1000)))
    chunk[0][0].view(-1)[0] = data.draw(st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 1e-45]))
    secret = data.draw(st.sampled_from([None, "secret"]))
    entry = encode_entry(head, chunk, secret)
    found = decode_entry(entry, expectation(head), secret)
    assert same_bits(found.layers, chunk)
    assert found.header == head
    assert read_file_header(entry[: num_file_header_bytes(entry[:128])]).header == found.header


@given(layers=geometries(), codec=st.sampled_from(["none", "int8"]), num_tokens=st.integers(1, 130))
def test_an_entry_is_within_the_bound_of_its_chunk(layers, codec, num_tokens):
    for dtype in ("bfloat16", "float32"):
        names = [chr(1 + number) * MAX_TEXT for number in range(MAX_NAMES - 1)] + ["\U0001f600" * MAX_TEXT]
        for states in ((), STATES):
            named = {"names": tuple(names), "tenant": names[-1], "states": states}
            head = header(num_tokens, layers, dtype=dtype, codec=codec, **named)
            entry = encode_entry(head, tensors(head))
            assert len(entry) <= EntryBound(layers, dtype, states).max_bytes(num_tokens)


def test_the_bound_of_an_entry_is_near_its_size():
    layers = tuple(LayerGeometry(index, 3, 64, 64, False) for index in range(30))
    head = header(500, layers, dtype="bfloat16")
    most = EntryBound(layers, "bfloat16").max_bytes(500)
    assert len(encode_entry(head, tensors(head))) < most < 1.02 * 500 * 30 * 2 * 192 * 2


def test_an_entry_is_read_from_any_kind_of_bytes_and_cannot_be_written_to():
    chunk = stored()
    for kind in (bytes, bytearray, memoryview, lambda entry: memoryview(b"x" + entry)[1:]):
        assert same_bits(chunk.decode(kind(chunk.entry)).layers, chunk.layers)
    entry = encode_entry(chunk.header, chunk.layers)
    assert entry.readonly and bytes(entry) == chunk.entry


def test_an_entry_outlives_the_names_of_its_bytes():
    layers = stored(300).decode(bytearray(stored(300).entry)).layers
    assert same_bits(layers, stored(300).layers)


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_an_entry_is_a_safetensors_file(tmp_path, codec):
    chunk = stored(70, codec=codec, dtype="bfloat16")
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(chunk.entry)
    with safe_open(path, "pt") as file:
        texts = file.metadata()
        found = {name: file.get_tensor(name) for name in sorted(file.keys())}
    assert texts["fingerprint"] == "f" * 64 and texts["tenant"] == "team-a" and texts["version"] == "1"
    assert texts["names"] == '["Kiel.txt","n\\u00e4chster \\"Name\\""]'
    assert len(texts["blake3"]) == 64
    if codec == "none":
        assert torch.equal(found["layers.0.key"], chunk.layers[0][0])
        assert set(found) == {"layers.0.key", "layers.0.value", "layers.1.key"}
    else:
        assert found["layers.0.key.scale"].dtype == torch.bfloat16 and "layers.1.key.code" in found


def test_the_checksum_is_plain_blake3_of_the_file_with_zeros_in_its_place():
    entry = stored().entry
    blank = entry[:35] + b"0" * 64 + entry[99:]
    assert entry[35:99] == blake3(blank).hexdigest().encode()


def test_the_payload_is_aligned():
    for names in range(20):
        assert stored(names=("x" * names,)).num_header_bytes % 64 == 0


def test_long_and_strange_names_are_cut_not_refused():
    names = tuple(f"{number}" + "n" * 1000 for number in range(40))
    found = stored(names=(*names, "lone \ud800 half"), tenant="t" * 1000).decode().header
    assert found.names == (*(name[:MAX_TEXT] for name in names[-MAX_NAMES + 1 :]), "lone ? half")
    assert found.tenant == "t" * MAX_TEXT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "e" * 64}, "fingerprint .* another model"),
        ({"key": b"k" * 32}, "key .* renamed or swapped"),
        ({"root": b"r" * 32}, "root .* another system text"),
        ({"start": 8}, "start 7, expected 8: its keys were turned"),
        ({"tokens": struct.pack("<5I", 100, 101, 102, 103, 105)}, "tokens .* another text with the same key"),
        ({"tokens": struct.pack("<4I", 100, 101, 102, 103)}, "tokens"),
        ({"layers": LAYERS[:2]}, "layers"),
        ({"layers": (LAYERS[0], replace(LAYERS[1], value_dim=7), LAYERS[2])}, "layers"),
        ({"dtype": "bfloat16"}, "dtype 'float32', expected 'bfloat16'"),
        ({"states": STATES}, "states .* another state"),
    ],
)
def test_an_entry_that_is_not_what_was_asked_for_is_foreign(change, message):
    chunk = stored()
    with pytest.raises(ForeignEntry, match=message):
        decode_entry(chunk.entry, expectation(chunk.header, **change))


def test_more_loss_than_allowed_is_foreign_and_less_is_welcome():
    chunk = stored(codec="int8")
    with pytest.raises(ForeignEntry, match=r"codec 'int8', expected 'none';"):
        decode_entry(chunk.entry, expectation(chunk.header, codec="none"))
    exact = stored()
    assert same_bits(decode_entry(exact.entry, expectation(exact.header, codec="int8")).layers, exact.layers)


@pytest.mark.parametrize(("written", "read"), [("a", "b"), ("a", None), (None, "a")])
def test_an_entry_with_another_secret_is_foreign(written, read):
    chunk = stored(secret=written)
    with pytest.raises(OtherSecret, match=r"sealed with .* secret"):
        decode_entry(chunk.entry, expectation(chunk.header), read)


@pytest.mark.parametrize("secret", ["a", None])
@pytest.mark.parametrize("place", range(111, 127))
def test_a_changed_label_is_damage_and_not_the_secret_of_others(secret, place):
    chunk = stored(secret=secret)
    changed = bytearray(chunk.entry)
    changed[place] ^= 1
    with pytest.raises(DamagedEntry, match="it was changed"):
        decode_entry(bytes(changed), expectation(chunk.header), secret)


def test_without_the_secret_nobody_can_make_an_entry():
    chunk = stored(secret="right")
    forged = stored(secret="wrong").entry
    pasted = bytearray(forged)
    pasted[111:127] = chunk.entry[111:127]
    with pytest.raises(DamagedEntry):
        chunk.decode(bytes(pasted))


def test_an_empty_secret_is_refused():
    with pytest.raises(InvalidConfig, match="secret of the cache tiers is empty"):
        stored(secret="")


@pytest.mark.parametrize("version", ["2", "0", "1.0", "999999999999999999999"])
def test_another_version_is_foreign(version):
    chunk = stored()
    changed = chunk.resealed(chunk.text.replace(b'"version":"1"', f'"version":"{version}"'.encode()))
    with pytest.raises(ForeignEntry, match=rf"version '{version[:30]}"):
        chunk.decode(changed)


@pytest.mark.parametrize("codec", ["none", "fp8", "int8", "int4"])
def test_codecs_of_other_versions_are_foreign(codec):
    chunk = stored(70, codec="none" if codec == "none" else "int8")
    said = chunk.table["__metadata__"] | {"codec": codec}
    text = json.dumps(chunk.table | {"__metadata__": said}, separators=(",", ":")).encode()
    entry = chunk.resealed(text + b" " * (-(8 + len(text)) % 64))
    if codec in ("none", "int8"):
        assert entry == chunk.entry
        return
    for read in (chunk.decode, read_file_header):
        with pytest.raises(ForeignEntry, match=f"codec '{codec}'.*computed again"):
            read(entry)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "f" * 257},
        {"fingerprint": "\ud800"},
        {"key": b""},
        {"root": b"r" * 65},
        {"start": -1},
        {"tokens": b"abc"},
        {"tokens": b""},
        {"tokens": b"\0" * (4 * 2**21 + 4)},
        {"compute_seconds": float("nan")},
        {"created": float("inf")},
        {"codec": "int2"},
        {"layers": ()},
        {"states": (("int8", (1, 2)),)},
        {"states": (("float32", (1, 0)),)},
        {"states": (("float32", (1,) * 9),)},
        {"layers": (LayerGeometry(1, 1, 1, 1, False),)},
    ],
)
def test_a_header_that_could_not_be_read_again_is_not_written(change):
    name = next(iter(change))
    with pytest.raises(InvalidConfig, match=f"cannot have {name} .* at most"):
        encode_entry(header(**change), [])


def test_a_chunk_larger_than_any_entry_is_refused_before_it_is_copied():
    wide = (LayerGeometry(0, 2**16, 2**16, 1, True),)
    head = header(layers=wide, num_tokens=1)
    huge = torch.empty(1).as_strided((1, 2**16, 2**16), (0, 0, 0))
    with pytest.raises(InvalidConfig, match="too large to be stored"):
        encode_entry(replace(head, tokens=head.tokens * 8), [(huge.expand(8, -1, -1), None)])


def test_entries_are_written_and_read_in_the_time_of_a_few_checksums():
    layers = tuple(LayerGeometry(index, 8, 64, 64, False) for index in range(24))
    head = header(512, layers, dtype="bfloat16")
    chunk = tensors(head)
    entry = encode_entry(head, chunk)
    checksum = least_cpu_seconds(lambda: blake3(entry).digest(), tries=5)
    assert least_cpu_seconds(lambda: encode_entry(head, chunk), tries=5) < 8 * checksum
    assert least_cpu_seconds(lambda: decode_entry(entry, expectation(head)), tries=5) < 8 * checksum
