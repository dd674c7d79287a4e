"""The C extension gives what the plain backend gives in float64, and torch takes over where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain import PlainBackend

from kvmosaic.attention import NativeBackend, RowGroup, RunRead, StepAttention, TorchBackend, choose_backend, plan_reads
from kvmosaic.attention.choosing import VARIABLE
from kvmosaic.attention.native import LIBRARY, load_library
from kvmosaic.errors import InvalidConfig, NativeUnavailable
from kvmosaic.memory import BlockStorage
from kvmosaic.rope import Rotation

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of outputs of order 1; bfloat16 has 8 bits, and the weights are rounded to it too."""

built = pytest.mark.skipif(not LIBRARY.exists(), reason="the C extension is not built")
known = load_library().instruction_sets if LIBRARY.exists() else ()


@dataclass(frozen=True)
class Mask:
    kind: str = "full"
    size: int = 0


@dataclass(frozen=True)
class Layer:
    """What storage and step attention ask of a layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotation: Rotation | None = None
    mask: Mask = Mask()
    source_layer: int = 0
    value_in_key: bool = False


class World:
    """One layer, both pools full of random keys, and a step over them."""

    def __init__(self, layer, groups, num_heads, dtype=torch.float32, num_slots=256, softcap=None):
        self.layer, self.groups, self.dtype = layer, groups, dtype
        shapes = ((layer.num_kv_heads, layer.key_dim), (layer.num_kv_heads, layer.value_dim))
        self.stored = {
            pool: [torch.randn(num_slots, *shape).to(dtype) for shape in shapes] for pool in ("request", "chunk_cache")
        }
        num_rows = max(group.first_row + group.num_rows for group in groups)
        heads = ((num_heads, layer.key_dim), *shapes)
        # [heads, T, D] seen as [T, heads, D]: what transformers hands over
        self.rows = [torch.randn(count, num_rows, dim).to(dtype).transpose(0, 1) for count, dim in heads]
        self.softcap = softcap

    def attend(self, backend, dtype=None):
        """Outputs of the step, [T, H, Dv]."""
        dtype = dtype or self.dtype
        storages = {}
        for pool, tensors in self.stored.items():
            storages[pool] = BlockStorage([self.layer], len(tensors[0]), 1, dtype, CPU)
            storages[pool].write(0, slice(None), *(tensor.to(dtype) for tensor in tensors))
        query, key, value = (tensor.to(dtype) for tensor in self.rows)
        call = SimpleNamespace(layer_index=0, query=query, key=key, value=value, softcap=self.softcap)
        call.scaling, call.sinks = self.layer.key_dim**-0.5, None
        return StepAttention([self.layer], storages, self.groups, (), backend)(call)

    def check(self, backend):
        expected = self.attend(PlainBackend(), torch.float64)
        result = self.attend(backend)
        assert result.dtype is self.dtype
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[self.dtype], rtol=0)


def rotation_of(layout, rotary_dim, head_dim):
    return Rotation(
        layout, 0, rotary_dim, 1, tuple(100.0 ** (-i / rotary_dim) for i in range(rotary_dim // 2)), head_dim
    )


@st.composite
def worlds(draw):
    torch.manual_seed(draw(st.integers(0, 2**31)))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 9]))
    key_dim = draw(st.sampled_from([8, 16, 20, 64, 80, 256]))
    value_dim = draw(st.sampled_from([key_dim, key_dim, 12]))
    groups, first = [], 0
    for _ in range(draw(st.integers(1, 4))):
        count, position = draw(st.sampled_from([1, 1, 2, 7, 40, 150])), draw(st.integers(200, 300))
        reads = [
            RunRead(
                draw(st.sampled_from(["request", "chunk_cache"])),
                draw(st.integers(0, 40)),
                draw(st.integers(1, 200)),
                draw(st.integers(0, position)),
                draw(st.sampled_from([0, 0, 1, -7, 3000])),
            )
            for _ in range(draw(st.integers(0, 4)))
        ]
        reads_itself = count == 1 and bool(reads) and draw(st.booleans())
        groups.append(RowGroup(first, count, position, tuple(reads), reads_itself))
        first += count
    mask = draw(st.sampled_from([Mask(), Mask(), Mask("window", 150), Mask("chunked", 64)]))
    if mask.kind != "full":  # somebody must be seen
        groups = [RowGroup(g.first_row, g.num_rows, g.position, g.reads) for g in groups]
    rotation = rotation_of(draw(st.sampled_from(["half", "interleaved"])), 8, key_dim)
    layer = Layer(num_kv_heads, key_dim, value_dim, rotation, mask)
    dtype, softcap = draw(st.sampled_from(list(TOLERANCES))), draw(st.sampled_from([None, None, 4.0]))
    return World(layer, groups, num_kv_heads * group, dtype, softcap=softcap)


@built
@pytest.mark.parametrize("instruction_set", known)
@settings(max_examples=25)
@given(world=worlds())
def test_native_gives_what_plain_gives_in_float64(instruction_set, world):
    world.check(NativeBackend(instruction_set=instruction_set))


@built
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_long_runs_are_cut_and_joined(dtype, num_rows):
    torch.manual_seed(0)
    reads = (RunRead("chunk_cache", 3, 1900, 0, 5), RunRead("request", 0, 1, 1900), RunRead("request", 7, 900, 1901, 2))
    layer = Layer(2, 64, 64, rotation_of("half", 64, 64))
    World(layer, [RowGroup(0, num_rows, 3000, reads)], 6, dtype, num_slots=2000).check(NativeBackend())


@built
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_number_of_threads_cannot_change_a_bit(dtype):
    torch.manual_seed(1)
    reads = tuple(RunRead("chunk_cache", 300 * number, 299, 300 * number, number) for number in range(6))
    groups = [RowGroup(0, 1, 2000, reads), RowGroup(1, 90, 2000, reads[:4]), RowGroup(91, 3, 2000, reads[2:])]
    world = World(Layer(2, 64, 64, rotation_of("half", 64, 64)), groups, 8, dtype, num_slots=2000)
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


@built
def test_rows_that_decode_alone_give_the_same_bits_beside_others():
    torch.manual_seed(2)
    reads = (RunRead("request", 0, 200, 0),)
    other = RowGroup(1, 30, 250, (RunRead("chunk_cache", 0, 150, 0),))
    world = World(Layer(2, 32, 32), [RowGroup(0, 1, 220, reads), other], 4)
    together = world.attend(NativeBackend())
    world.groups, world.rows = world.groups[:1], [part[:1] for part in world.rows]
    assert torch.equal(world.attend(NativeBackend()), together[:1])


@built
@pytest.mark.parametrize("num_rows", [1, 20])
def test_what_is_not_a_number_is_not_hidden(num_rows):
    world = World(Layer(1, 16, 16), [RowGroup(0, num_rows, 100, (RunRead("request", 0, 30, 0),))], 2)
    world.stored["request"][0][11, 0, 3] = torch.nan
    assert world.attend(NativeBackend()).isnan().all()


@built
def test_the_log_sum_exp_is_that_of_the_plain_backend():
    torch.manual_seed(3)
    run, query = RunRead("request", 2, 90, 0), torch.randn(5, 4, 16)
    key, value = torch.randn(2, 100, 2, 16)
    plan = plan_reads([RowGroup(row, 1, 99, (run,), True) for row in range(5)], Mask(), CPU)
    output, lse = NativeBackend().plan_reader(plan).attend(query, {"request": (key, value)}, scaling=0.5)
    expected = PlainBackend().attend(query, key[2:92], value[2:92], scaling=0.5)
    torch.testing.assert_close((output, lse), expected, atol=1e-5, rtol=0)


@built
@pytest.mark.parametrize(
    ("layer", "num_heads", "dtype"),
    [
        (Layer(1, 264, 16), 2, torch.float32),
        (Layer(1, 16, 264), 2, torch.float32),
        (Layer(1, 8, 8), 129, torch.float32),
        (Layer(1, 16, 16), 2, torch.float64),
        (Layer(1, 16, 16), 2, torch.float16),
    ],
    ids=["long keys", "long values", "many queries per key", "float64", "float16"],
)
def test_torch_takes_the_layers_that_do_not_fit(layer, num_heads, dtype):
    torch.manual_seed(4)
    world = World(layer, [RowGroup(0, 3, 100, (RunRead("request", 0, 30, 0),))], num_heads, dtype)
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


@built
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


@built
def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(InvalidConfig, match="this processor knows"):
        NativeBackend(instruction_set="avx1024")
