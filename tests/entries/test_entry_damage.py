"""Whatever happens to the bytes of an entry, it is noticed, and nothing but `InvalidEntry` is ever raised."""

from __future__ import annotations

import json
import struct
import tracemalloc
from contextlib import suppress
from random import Random

import pytest
from entries.entries import STATES, Stored, same_bits, stored
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.entries.entry import read_file_header
from kvmosaic.entries.verification import num_file_header_bytes
from kvmosaic.errors import DamagedEntry, ForeignEntry, InvalidEntry
from kvmosaic.layers import LayerGeometry

PLAIN, SEALED = stored(), stored(secret="secret")
ROUNDED = stored(num_tokens=200, codec="int8", dtype="bfloat16", states=STATES)
ALL = pytest.mark.parametrize("chunk", [PLAIN, SEALED, ROUNDED], ids=["plain", "sealed", "rounded"])


def is_noticed(chunk: Stored, entry: bytes | bytearray) -> bool:
    try:
        chunk.decode(entry)
    except InvalidEntry as error:
        return len(str(error)) > 20
    return False


def test_the_chunks_of_these_tests_are_good():
    for chunk in (PLAIN, SEALED, ROUNDED):
        chunk.decode()
    assert ROUNDED.table["__metadata__"]["codec"] == "int8"


@ALL
def test_every_bit_of_the_header_counts(chunk):
    entry = bytearray(chunk.entry)
    for position in range(chunk.num_header_bytes):
        for bit in range(8):
            entry[position] ^= 1 << bit
            assert is_noticed(chunk, entry), (position, bit)
            entry[position] ^= 1 << bit
    assert bytes(entry) == chunk.entry


@ALL
def test_ten_thousand_bits_of_the_payload_count(chunk):
    entry, random = bytearray(chunk.entry), Random(1)
    for _ in range(10_000):
        position, bit = random.randrange(chunk.num_header_bytes, len(entry)), random.randrange(8)
        entry[position] ^= 1 << bit
        assert is_noticed(chunk, entry), (position, bit)
        entry[position] ^= 1 << bit


@ALL
def test_an_entry_that_was_cut_is_noticed(chunk):
    lengths = {*range(0, len(chunk.entry), 64), *range(130), *range(len(chunk.entry) - 65, len(chunk.entry))}
    for length in lengths:
        assert is_noticed(chunk, chunk.entry[:length]), length


@ALL
def test_bytes_behind_or_before_an_entry_are_noticed(chunk):
    for count in (1, 2, 63, 64, 4096):
        assert is_noticed(chunk, chunk.entry + b"\0" * count)
        assert is_noticed(chunk, b"\0" * count + chunk.entry)
    assert is_noticed(chunk, chunk.entry + chunk.entry)


def test_two_entries_that_changed_places_are_noticed():
    other = stored(seed=1, key=b"o" * 32)
    for chunk, entry in ((PLAIN, other.entry), (other, PLAIN.entry)):
        with pytest.raises(ForeignEntry, match="renamed or swapped"):
            chunk.decode(entry)


def test_halves_of_two_entries_are_noticed():
    other = stored(seed=1)
    assert len(other.entry) == len(PLAIN.entry)
    for cut in range(64, len(PLAIN.entry), 64):
        assert is_noticed(PLAIN, PLAIN.entry[:cut] + other.entry[cut:])


def test_zeros_where_a_block_of_the_disk_was_lost_are_noticed():
    for begin in range(0, len(PLAIN.entry) - 64, 64):
        zeros = PLAIN.entry[:begin] + b"\0" * 64 + PLAIN.entry[begin + 64 :]
        assert zeros == PLAIN.entry or is_noticed(PLAIN, zeros)


@given(st.binary(max_size=4096))
def test_random_bytes_are_no_entry(data):
    assert is_noticed(PLAIN, data)
    with suppress(InvalidEntry):
        read_file_header(data)
    assert is_noticed(PLAIN, PLAIN.entry[:127] + data)


# From here on the checksum is right: whoever wrote these did it on purpose, or with another program.

mutations = st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=6), st.integers(0, 6)), min_size=1, max_size=4)


def is_right_or_refused(chunk: Stored, entry: bytes) -> None:
    """Decoding refuses it, or gives what was stored; reading its header refuses it, or not."""
    with suppress(InvalidEntry):
        read_file_header(entry)
    with suppress(InvalidEntry):
        assert same_bits(chunk.decode(entry).layers, chunk.decode().layers)


@settings(max_examples=examples(500))
@given(mutations)
def test_a_header_with_odd_bytes_is_refused_or_says_the_same(changes):
    for chunk in (PLAIN, SEALED, ROUNDED):
        text = bytearray(chunk.text)
        for place, new, count in changes:
            at = int(place * len(text))
            text[at : at + count] = new
        is_right_or_refused(chunk, chunk.resealed(bytes(text)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from([*PLAIN.table["__metadata__"], "more"])
tensors = st.sampled_from([*PLAIN.table, "layers.9.key"])
texts = st.one_of(
    st.text(max_size=40),
    json_values.map(json.dumps),
    st.integers().map(str),
    st.sampled_from(["nan", "inf", "1e999", "-0", "00", "٣", "9" * 5000, "[" * 100_000, "ab", "AB", "zz", "=" * 9]),
)


def with_table(chunk: Stored, table: object) -> bytes:
    text = json.dumps(table, separators=(",", ":")).encode()
    return chunk.resealed(text + b" " * (-(8 + len(text)) % 64))


@settings(max_examples=examples(500))
@given(fields, texts | json_values)
def test_any_value_in_any_field_is_refused_or_says_the_same(name, value):
    for chunk in (PLAIN, ROUNDED):
        table = chunk.table
        table["__metadata__"][name] = value
        is_right_or_refused(chunk, with_table(chunk, table))


@settings(max_examples=examples(300))
@given(tensors, json_values)
def test_any_table_of_tensors_but_the_right_one_is_refused(name, value):
    for chunk in (PLAIN, ROUNDED):
        table = chunk.table
        if table.get(name) != value:
            table[name] = value
            assert is_noticed(chunk, with_table(chunk, table))


@pytest.mark.parametrize("name", list(PLAIN.table["__metadata__"]))
def test_a_missing_field_is_refused(name):
    table = PLAIN.table
    del table["__metadata__"][name]
    assert is_noticed(PLAIN, with_table(PLAIN, table))


def test_unknown_fields_are_refused():
    table = PLAIN.table
    table["__metadata__"]["more"] = "1"
    with pytest.raises(DamagedEntry, match=r"'more'.*fields that version 1 does not have"):
        PLAIN.decode(with_table(PLAIN, table))


def test_fields_in_another_order_or_twice_are_refused():
    table = PLAIN.table
    metadata = table["__metadata__"]
    metadata["version"] = metadata.pop("version")
    assert is_noticed(PLAIN, with_table(PLAIN, table))
    twice = PLAIN.text.replace(b'"version":"1"', b'"version":"1","version":"1"')
    assert is_noticed(PLAIN, PLAIN.resealed(twice))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"null",
        b"[" * 1_000_000,
        b'{"a":' * 200_000,
        b"[" + b"1," * 1_000_000 + b"1]",
        b"9" * 10_000,
        b"\xff\xfe",
        b"\0" * 500,
        b'{"__metadata__":{"blake3":"' + b"0" * 64 + b'","secret":"' + b"0" * 16 + b'"',
        b'{"__metadata__":{"blake3":"' + b"0" * 64 + b'","secret":"' + b"0" * 16 + b'"}}',
        b'{"__metadata__":{"blake3":"' + b"0" * 64 + b'","secret":"' + b"0" * 16 + b'"},"__metadata__":{}}',
        b'{"__metadata__":{"blake3":"' + b"0" * 64 + b'","secret":"' + b"0" * 16 + b'"},"__metadata__":[]}',
        b'{"__metadata__":{"blake3":"' + b"0" * 64 + b'","secret":"' + b"0" * 16 + b'","a":' + b"[" * 100_000,
        b'{"__metadata__":{"blake3":"' + b"0" * 64 + b'","secret":"' + b"0" * 16 + b'","a":"' + b"[" * 300_000 + b'"}}',
    ],
    ids=range(15),
)
def test_nonsense_with_a_right_checksum_is_refused(text):
    for padded in (text, text + b" " * 4096):
        assert is_noticed(PLAIN, PLAIN.resealed(padded))


def test_a_header_that_would_become_many_objects_is_not_parsed():
    metadata = PLAIN.table["__metadata__"]
    text = json.dumps({"__metadata__": metadata, "x": []}, separators=(",", ":")).encode()
    with pytest.raises(DamagedEntry, match="brackets and commas, at most 262144"):
        read_file_header(PLAIN.resealed(text.replace(b"[]}", b"[" + b"{}," * 400_000 + b"{}]}")))


@pytest.mark.parametrize("length", [0, 1, 2**24, 2**24 - 7, 2**31, 2**63, 2**64 - 1])
def test_a_header_length_that_cannot_be_is_refused(length):
    entry = struct.pack("<Q", length) + PLAIN.entry[8:]
    with pytest.raises(DamagedEntry, match="header"):
        num_file_header_bytes(entry)
    assert is_noticed(PLAIN, entry)


def test_an_impossibly_large_claim_allocates_nothing():
    wide = LayerGeometry(0, 2**16, 2**16, 2**16, False)
    metadata = PLAIN.table["__metadata__"] | {"layers": json.dumps([wide.numbers], separators=(",", ":"))}
    entry = with_table(PLAIN, PLAIN.table | {"__metadata__": metadata})
    tracemalloc.start()
    assert is_noticed(PLAIN, entry)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_any_codes_with_a_right_checksum_do_not_crash():
    chunk, random = stored(num_tokens=70, codec="int8"), Random(2)
    payload = chunk.entry[chunk.num_header_bytes :]
    for _ in range(50):
        chunk.decode(chunk.resealed(chunk.text, random.randbytes(len(payload))))
    assert is_noticed(chunk, chunk.resealed(chunk.text, payload[:-1]))


def test_a_header_can_be_read_from_the_first_bytes_alone():
    begin = PLAIN.entry[: num_file_header_bytes(PLAIN.entry[:128])]
    assert read_file_header(begin).header == PLAIN.header
    with pytest.raises(DamagedEntry, match="cut short"):
        read_file_header(begin[:-1])
