"""The C extension gives what the plain backend gives in float64, and torch takes over where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from support.examples import examples
from support.plain import PlainBackend
from support.programs import needs_extension
from support.worlds import CPU, World, layer_of, rotation_of, worlds

from kvmosaic.attention import NativeBackend, Piece, RowGroup, TorchBackend, choose_backend, plan_reads
from kvmosaic.attention.backend_choice import VARIABLE
from kvmosaic.attention.native import LIBRARY, load_library
from kvmosaic.errors import InvalidConfig, NativeUnavailable
from kvmosaic.layers import MaskSpec

DTYPES = (torch.float32, torch.bfloat16)

known = load_library().instruction_sets if LIBRARY.exists() else ()


@needs_extension
@pytest.mark.parametrize("instruction_set", known)
@settings(max_examples=examples(25))
@given(world=worlds(DTYPES))
def test_native_gives_what_plain_gives_in_float64(instruction_set, world):
    world.check(NativeBackend(instruction_set=instruction_set))


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_long_runs_are_cut_and_joined(dtype, num_rows):
    torch.manual_seed(0)
    reads = (Piece("chunk_cache", 3, 1900, 0, 5), Piece("request", 0, 1, 1900), Piece("request", 7, 900, 1901, 2))
    layer = layer_of(2, 64, 64, rotation_of("half", 64, 64))
    World(layer, [RowGroup(0, num_rows, 3000, reads)], 6, dtype, num_slots=2000).check(NativeBackend())


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", known)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 7), (33, 31), (130, 66)])
@pytest.mark.parametrize("num_rows", [2, 23, 101])
def test_heads_and_rows_that_fill_no_vector(dtype, instruction_set, key_dim, value_dim, num_rows):
    torch.manual_seed(5)
    reads = (Piece("chunk_cache", 3, 77, 0), Piece("request", 190, 66, 77))
    world = World(layer_of(2, key_dim, value_dim), [RowGroup(0, num_rows, 200, reads)], 6, dtype)
    world.check(NativeBackend(instruction_set=instruction_set))


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", known)
@pytest.mark.parametrize("distance", [0, 3])
def test_short_runs_with_the_same_readers_are_joined(dtype, instruction_set, distance):
    torch.manual_seed(7)
    pools, sizes = ("request", "chunk_cache"), (100, 1, 64, 63, 300, 900, 700, 130, 5)
    runs = [Piece(pools[n % 2], 10 * n, size, 20 * n, distance) for n, size in enumerate(sizes)]
    groups = [
        RowGroup(0, 9, 3000, tuple(runs)),
        RowGroup(9, 30, 3000, tuple(runs[3:])),
        RowGroup(39, 1, 3000, (runs[0],)),
    ]
    world = World(layer_of(2, 16, 24, rotation_of("half", 16, 16)), groups, 6, dtype, num_slots=1000)
    world.check(NativeBackend(instruction_set=instruction_set))


@needs_extension
def test_layers_of_one_plan_may_look_different():
    torch.manual_seed(6)
    plan = plan_reads([RowGroup(0, 5, 99, (Piece("request", 2, 90, 0),))], MaskSpec(), CPU)
    backend = NativeBackend()
    reader = backend.plan_reader(plan)
    for num_kv_heads, dim, dtype in ((2, 16, torch.float32), (1, 40, torch.bfloat16), (4, 16, torch.float32)):
        query = torch.randn(5, 4, dim).to(dtype)
        key, value = torch.randn(2, 100, num_kv_heads, dim).to(dtype)
        pools = {"request": (key, value), None: (key[:5], value[:5])}
        results = [each.attend(query, pools, scaling=0.3) for each in (reader, backend.plan_reader(plan))]
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_cannot_change_a_bit(dtype):
    torch.manual_seed(1)
    reads = tuple(Piece("chunk_cache", 300 * number, 299, 300 * number, number) for number in range(6))
    groups = [RowGroup(0, 1, 2000, reads), RowGroup(1, 90, 2000, reads[:4]), RowGroup(91, 3, 2000, reads[2:])]
    world = World(layer_of(2, 64, 64, rotation_of("half", 64, 64)), groups, 8, dtype, num_slots=2000)
    before, backend = torch.get_num_threads(), NativeBackend()
    assert backend.library.parallel, "torch brings an OpenMP runtime"
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(world.attend(backend))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@needs_extension
def test_rows_that_decode_alone_give_the_same_bits_beside_others():
    torch.manual_seed(2)
    reads = (Piece("request", 0, 200, 0),)
    other = RowGroup(1, 30, 250, (Piece("chunk_cache", 0, 150, 0),))
    world = World(layer_of(2, 32, 32), [RowGroup(0, 1, 220, reads), other], 4)
    together = world.attend(NativeBackend())
    world.groups, world.rows = world.groups[:1], [part[:1] for part in world.rows]
    assert torch.equal(world.attend(NativeBackend()), together[:1])


@needs_extension
@pytest.mark.parametrize("num_rows", [1, 20])
def test_what_is_not_a_number_is_not_hidden(num_rows):
    world = World(layer_of(1, 16, 16), [RowGroup(0, num_rows, 100, (Piece("request", 0, 30, 0),))], 2)
    world.stored["request"][0][11, 0, 3] = torch.nan
    assert world.attend(NativeBackend()).isnan().all()


@needs_extension
def test_the_log_sum_exp_is_that_of_the_plain_backend():
    torch.manual_seed(3)
    run, query = Piece("request", 2, 90, 0), torch.randn(5, 4, 16)
    key, value = torch.randn(2, 100, 2, 16)
    plan = plan_reads([RowGroup(row, 1, 99, (run,), True) for row in range(5)], MaskSpec(), CPU)
    output, lse = NativeBackend().plan_reader(plan).attend(query, {"request": (key, value)}, scaling=0.5)
    expected = PlainBackend().attend(query, key[2:92], value[2:92], scaling=0.5)
    torch.testing.assert_close((output, lse), expected, atol=1e-5, rtol=0)


@needs_extension
@pytest.mark.parametrize(
    ("layer", "num_heads", "dtype"),
    [
        (layer_of(1, 264, 16), 2, torch.float32),
        (layer_of(1, 16, 264), 2, torch.float32),
        (layer_of(1, 8, 8), 129, torch.float32),
        (layer_of(1, 16, 16), 2, torch.float64),
        (layer_of(1, 16, 16), 2, torch.float16),
    ],
    ids=["long keys", "long values", "many queries per key", "float64", "float16"],
)
def test_torch_takes_the_layers_that_do_not_fit(layer, num_heads, dtype):
    torch.manual_seed(4)
    world = World(layer, [RowGroup(0, 3, 100, (Piece("request", 0, 30, 0),))], num_heads, dtype)
    assert torch.equal(world.attend(NativeBackend()), world.attend(TorchBackend()))


def test_without_the_extension_torch_is_chosen_and_says_why(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(load_library, "__defaults__", (Path("nowhere.so"),))
    chosen = choose_backend(None, torch.float32, CPU)
    assert type(chosen.backend) is TorchBackend and chosen.name == "torch"
    assert "without its C extension" in chosen.reason
    with pytest.raises(NativeUnavailable, match="without its C extension"):
        choose_backend("native", torch.float32, CPU)


def test_a_file_that_is_no_extension_is_unavailable(tmp_path):
    (tmp_path / "paged.so").write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        load_library(tmp_path / "paged.so")


@needs_extension
def test_the_choice_is_native_where_it_fits_and_anybody_may_decide(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose_backend(None, torch.bfloat16, CPU).name == "native"
    assert choose_backend("torch", torch.bfloat16, CPU).name == "torch"
    assert "float64" in choose_backend(None, torch.float64, CPU).reason
    assert "cuda" in choose_backend(None, torch.float32, torch.device("cuda")).reason
    with pytest.raises(NativeUnavailable, match="float64"):
        choose_backend("native", torch.float64, CPU)
    own = PlainBackend()
    assert choose_backend(own, torch.float32, CPU).backend is own
    monkeypatch.setenv(VARIABLE, "torch")
    chosen = choose_backend(None, torch.float32, CPU)
    assert chosen.name == "torch" and VARIABLE in chosen.reason
    monkeypatch.setenv(VARIABLE, "quick")
    with pytest.raises(InvalidConfig, match="'torch' or 'native'"):
        choose_backend(None, torch.float32, CPU)


@needs_extension
def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(InvalidConfig, match="this processor knows"):
        NativeBackend(instruction_set="avx1024")
