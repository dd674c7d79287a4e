"""The GPU kernels, interpreted on the CPU, give what the plain backend gives; torch takes over where they do not fit.

With TRITON_INTERPRET=0 the same tests run on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import answer, build_engine, dense_logits, token_ids
from support.families import build
from support.plain import PlainBackend
from support.worlds import CPU, TOLERANCES, World, layer_of, rotation_of, worlds

import kvmosaic
from kvmosaic import LLM, ChunkCacheConfig, Prompt, SamplingParams
from kvmosaic.attention import Piece, RowGroup, TorchBackend, choose_backend, plan_reads
from kvmosaic.attention.backend_choice import VARIABLE
from kvmosaic.errors import TritonUnavailable
from kvmosaic.layers import MaskSpec
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel

if sys.platform != "linux":
    pytest.skip("Triton is for Linux only", allow_module_level=True)

from kvmosaic.attention.triton import backend, work
from kvmosaic.attention.triton.backend import TritonBackend, try_triton

DEVICE = CPU if TritonBackend.is_interpreted else torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALLOWED = dict(TOLERANCES)
if TritonBackend.is_interpreted:
    # the interpreter cuts bfloat16 off where a GPU rounds it: twice the error, and all of it on one side
    ALLOWED[torch.bfloat16] = 2 * TOLERANCES[torch.bfloat16]

small_worlds = worlds(DTYPES, dims=(8, 16, 20, 80), num_rows=(1, 1, 2, 5, 18), max_run=60, device=DEVICE)


def world_of(layer, groups, num_heads, dtype=torch.float32, **options):
    return World(layer, groups, num_heads, dtype, device=DEVICE, **options)


@settings(max_examples=12)
@given(world=small_worlds, walk=st.sampled_from([16, 40, 256]), programs=st.sampled_from([1, 512]))
def test_triton_gives_what_plain_gives_in_float64(world, walk, programs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "MIN_WALK", walk)
        patch.setattr(work, "MAX_PROGRAMS", programs)
        world.check(TritonBackend(), ALLOWED)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("half", torch.float32), ("half", torch.float16), ("interleaved", torch.bfloat16)],
)
def test_soft_caps_and_partial_rotations_over_both_pools(layout, dtype):
    torch.manual_seed(1)
    reads = (Piece("chunk_cache", 3, 50, 0, 5), Piece("request", 7, 20, 60, -2))
    groups = [RowGroup(0, 5, 300, reads), RowGroup(5, 1, 400, reads[:1])]
    world_of(layer_of(2, 20, 12, rotation_of(layout, 8, 20)), groups, 6, dtype, softcap=0.5).check(
        TritonBackend(), ALLOWED
    )


@given(world=small_worlds, walk=st.sampled_from([1, 7, 40, 256]), programs=st.sampled_from([1, 512]))
def test_the_work_list_reads_every_key_of_a_plan_once(world, walk, programs):
    plan = plan_reads(world.groups, world.layer.mask, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "MIN_WALK", walk)
        patch.setattr(work, "MAX_PROGRAMS", programs)
        listed = work.list_work(plan, 3, world.layer.num_kv_heads, CPU)
    expected = sorted(
        (number, work.POOLS.index(call.pool), call.first_slot + key)
        for call in plan.calls
        for row, number in enumerate(plan.row_numbers[call.first : call.last])
        for key in range(row + 1 if call.causal else call.num_tokens)
    )
    read, owners = [], {}
    segments = listed.segments.view(-1, 7).tolist()
    for first, last, tile, count, place in (unit for units in listed.units.values() for unit in units.tolist()):
        for pool, slot, num_keys, stacked, seen, _, _ in segments[first:last]:
            for row in range(tile, tile + count):
                owner = plan.row_numbers[stacked + row]
                assert owners.setdefault(place + row - tile, owner) == owner
                read += [(owner, pool, slot + key) for key in range(min(num_keys, seen + row))]
    assert sorted(read) == expected
    places, starts = listed.partial_slots.tolist(), listed.starts.tolist()
    assert sorted(places) == list(range(len(owners)))
    for row in range(plan.num_rows):
        assert all(owners[place] == row for place in places[starts[row] : starts[row + 1]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_over_a_long_run_is_work_for_many_programs(dtype):
    torch.manual_seed(0)
    reads = (Piece("chunk_cache", 3, 1900, 0, 5), Piece("request", 0, 1, 1900), Piece("request", 7, 900, 1901, 2))
    world = world_of(
        layer_of(2, 64, 64, rotation_of("half", 64, 64)), [RowGroup(0, 1, 3000, reads)], 6, dtype, num_slots=2000
    )
    listed = work.list_work(plan_reads(world.groups, MaskSpec(), CPU), 3, 2, CPU)
    assert [len(units) for units in listed.units.values()] == [6], "2,801 keys in walks of 512"
    world.check(TritonBackend(), ALLOWED)


def test_rows_over_the_same_runs_leave_one_result_each():
    reads = tuple(Piece("chunk_cache", 16 * number, 16, 16 * number, number) for number in range(10))
    plan = plan_reads([RowGroup(0, 5, 160, reads)], MaskSpec(), CPU)
    listed = work.list_work(plan, 4, 2, CPU)
    assert len(plan.calls) == 11 and listed.is_direct


def test_readers_of_one_chunk_share_its_read_at_their_own_distances():
    torch.manual_seed(5)
    groups = [RowGroup(row, 1, 90 + row, (Piece("chunk_cache", 4, 40, 20, 7 * row),)) for row in range(3)]
    world = world_of(layer_of(2, 16, 16, rotation_of("half", 16, 16)), groups, 4)
    listed = work.list_work(plan_reads(groups, MaskSpec(), CPU), 2, 2, CPU)
    assert [(height, len(units)) for height, units in listed.units.items()] == [(16, 4)], "one for the chunk"
    world.check(TritonBackend(), ALLOWED)


def test_walks_grow_with_the_keys_until_programs_are_few_enough():
    assert work.walk_length(100, 8) == work.walk_length(16_384, 8) == 512
    assert work.walk_length(131_072, 8) == 2048, "64 walks of 8 programs"
    assert work.walk_length(131_072, 1024) == 131_072


def test_rows_that_decode_alone_give_the_same_bits_beside_others():
    torch.manual_seed(2)
    reads = (Piece("request", 0, 200, 0),)
    other = RowGroup(1, 30, 250, (Piece("chunk_cache", 0, 150, 0),))
    world = world_of(layer_of(2, 32, 32), [RowGroup(0, 1, 220, reads), other], 4)
    together = world.attend(TritonBackend())
    world.groups, world.rows = world.groups[:1], [part[:1] for part in world.rows]
    assert torch.equal(world.attend(TritonBackend()), together[:1])


@pytest.mark.parametrize("num_rows", [1, 20])
def test_what_is_not_a_number_is_not_hidden(num_rows):
    world = world_of(layer_of(1, 16, 16), [RowGroup(0, num_rows, 100, (Piece("request", 0, 30, 0),))], 2)
    world.stored["request"][0][11, 0, 3] = torch.nan
    assert world.attend(TritonBackend()).isnan().all()


@pytest.mark.parametrize("walk", [16, 256], ids=["merged", "direct"])
def test_the_log_sum_exp_is_that_of_the_plain_backend(walk, monkeypatch):
    monkeypatch.setattr(work, "MIN_WALK", walk)
    torch.manual_seed(3)
    run, query = Piece("request", 2, 90, 0), torch.randn(5, 4, 16, device=DEVICE)
    key, value = torch.randn(2, 100, 2, 16, device=DEVICE)
    plan = plan_reads([RowGroup(row, 1, 99, (run,), True) for row in range(5)], MaskSpec(), DEVICE)
    result = TritonBackend().plan_reader(plan).attend(query, {"request": (key, value)}, scaling=0.5)
    expected = PlainBackend().attend(query, key[2:92], value[2:92], scaling=0.5)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_a_row_that_sees_nothing_has_a_log_sum_exp_of_minus_infinity():
    run = Piece("request", 0, 6, 0)
    plan = plan_reads([RowGroup(0, 4, 8, (run,), True)], MaskSpec("window", 4), DEVICE)
    query, (key, value) = torch.randn(4, 1, 16, device=DEVICE), torch.randn(2, 6, 1, 16, device=DEVICE)
    output, lse = TritonBackend().plan_reader(plan).attend(query, {"request": (key, value)}, scaling=1)
    assert lse.isfinite().flatten().tolist() == [True, False, False, False] and output.isfinite().all()


@pytest.mark.parametrize(
    ("layer", "num_heads", "dtype"),
    [
        (layer_of(1, 264, 16), 2, torch.float32),
        (layer_of(1, 16, 264), 2, torch.float32),
        (layer_of(1, 8, 8), 129, torch.float32),
        (layer_of(1, 80, 80), 65, torch.float32),
        (layer_of(1, 16, 16), 2, torch.float64),
    ],
    ids=["long keys", "long values", "many queries per key", "many long queries per key", "float64"],
)
def test_torch_takes_the_layers_that_do_not_fit(layer, num_heads, dtype):
    torch.manual_seed(4)
    world = world_of(layer, [RowGroup(0, 3, 100, (Piece("request", 0, 30, 0),))], num_heads, dtype)
    assert torch.equal(world.attend(TritonBackend()), world.attend(TorchBackend()))


def test_all_query_heads_of_one_key_head_share_a_tile():
    world_of(layer_of(1, 64, 64), [RowGroup(0, 2, 50, (Piece("request", 0, 30, 0),))], 71).check(
        TritonBackend(), ALLOWED
    )


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3"])
def test_dense_cold_and_warm_agree(family):
    model = LoadedModel.from_module(build(family, torch.float32).to(DEVICE))
    prompt = Prompt.from_tokens([5, 6, 7], [list(range(10, 29)), list(range(40, 47))], [90, 91, 92, 93])
    engine = build_engine(model, backend=TritonBackend(), position_strategy="sequential")
    answer(engine, Prompt.from_tokens([5, 6, 7], [list(range(40, 47))], [3]))  # that chunk is moved afterwards
    cold, cold_logits = answer(engine, prompt)
    _, warm_logits = answer(engine, prompt)
    expected = dense_logits(model, arrange(prompt, "sequential"), token_ids(cold))
    torch.testing.assert_close(cold_logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(warm_logits, expected, atol=1e-4, rtol=0)


def test_a_model_answers_as_with_torch():
    model = LoadedModel.from_module(build("llama", torch.float32).to(DEVICE))
    prompts = [Prompt.from_tokens([5, 6], [list(range(10, 10 + n)), list(range(50, 70))], [n, 3]) for n in (9, 12)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    answers = []
    for name in ("torch", "triton"):
        with LLM(model, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="1MiB"), attention_backend=name) as llm:
            assert llm.attention.name == name and llm.has_chunk_cache
            answers.append([tuple(result.outputs[0].token_ids) for result in llm.generate(prompts, params)])
    assert answers[0] == answers[1]


def test_triton_is_chosen_by_name_and_says_how_it_runs(monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    chosen = choose_backend(None, torch.float32, DEVICE)
    assert chosen.name == "triton" and "Triton" in str(chosen)
    assert ("interpreted" in chosen.reason) is (DEVICE is CPU)
    with pytest.raises(TritonUnavailable, match="float64"):
        choose_backend(None, torch.float64, DEVICE)


def test_nobody_gets_the_interpreter_unasked(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(TritonBackend, "is_interpreted", True)
    chosen = choose_backend(None, torch.float32, torch.device("cuda"))
    assert type(chosen.backend) is TorchBackend and "TRITON_INTERPRET" in chosen.reason


def test_without_triton_torch_is_chosen_and_says_why(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "kvmosaic.attention.triton.backend", None)
    chosen = choose_backend(None, torch.float32, torch.device("cuda"))
    assert type(chosen.backend) is TorchBackend and "cannot be imported" in chosen.reason
    with pytest.raises(TritonUnavailable, match=r"triton attention cannot be used.*leave the choice open"):
        choose_backend("triton", torch.float32, torch.device("cuda"))


def test_the_cpu_is_for_tests_only(monkeypatch):
    monkeypatch.setattr(TritonBackend, "is_interpreted", False)
    with pytest.raises(TritonUnavailable, match="for CUDA, the model is on cpu"):
        choose_backend("triton", torch.float32, CPU)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("no C compiler\nat all"), "RuntimeError: no C compiler$"),
        (0.0, "wrong by"),
        (torch.nan, "wrong by"),
    ],
    ids=["fails", "is wrong", "is no number"],
)
def test_a_trial_finds_what_is_broken(result, message, monkeypatch):
    def attend(self, query, *_, **__):
        if isinstance(result, Exception):
            raise result
        return torch.full_like(query, result), query[..., 0]

    monkeypatch.setattr(backend.TritonReader, "attend", attend)
    with pytest.raises(TritonUnavailable, match=message):
        try_triton(TritonBackend(), torch.float32, DEVICE)


COMPILING = """
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvmosaic.attention.triton.backend import KernelShape
from kvmosaic.attention.triton.kernel import attend_walks, merge_walks

def types(kernel, dtype, stored):
    pointers = dict.fromkeys("partners blocks rows segments units places starts".split(), "*i64")
    pointers |= dict.fromkeys("cosines sines sums outputs partials partial_sums".split(), "*fp32")
    pointers |= {"query": dtype, "masks": "*u8", "scaling": "fp32", "softcap": "fp32"}
    pointers |= {"key_scale": "*fp32", "value_scale": "*fp32", "chunk_key": stored, "chunk_value": stored}
    for name in kernel.arg_names:
        is_pool = name.endswith(("_key", "_value"))
        yield name, "constexpr" if name.isupper() else pointers.get(name, dtype if is_pool else "i32")

def build(kernel, dtype, capability, constants, stored=None, **options):
    signature = dict(types(kernel, dtype, stored or dtype))
    aligned = [name.endswith(("_row", "_head", "_block")) or kind[0] == "*" for name, kind in signature.items()]
    divisible = {(index,): [["tt.divisibility", 16]] for index, is_aligned in enumerate(aligned) if is_aligned}
    source = ASTSource(kernel, signature, constants, divisible)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)

flags = dict(IS_TURNED=True, IS_CAPPED=True, IS_MASKED=True, IS_DIRECT=False, IS_WIDENED=False)
whole, paged, scaled = (
    dict(TABLE_BLOCK=table, CACHE_BLOCK=cache, IS_SCALED=is_scaled)
    for table, cache, is_scaled in [(0, 1, False), (32, 16, False), (16, 16, True)]
)
for capability, dtype, dim, tile, cache, stored in [
    (80, torch.bfloat16, 128, 16, whole, None),
    (90, torch.float16, 80, 64, whole, None),
    (80, torch.bfloat16, 128, 16, paged, None),
    (90, torch.bfloat16, 128, 64, paged, None),
    (80, torch.float16, 256, 64, paged, None),
    (90, torch.bfloat16, 128, 16, scaled, "*fp8e4nv"),
    (80, torch.bfloat16, 128, 64, scaled, "*fp8e5"),
]:
    shape = KernelShape.of(dim, dim, tile, dtype)
    sizes = dict(GROUP=4, KEY_DIM=dim, VALUE_DIM=dim, BLOCK_KEY=shape.block_key, BLOCK_VALUE=shape.block_value)
    constants = {**sizes, **flags, **cache, "TILE": tile, "KEYS": shape.num_keys}
    kind = "*bf16" if dtype is torch.bfloat16 else "*fp16"
    options = dict(num_warps=shape.num_warps, num_stages=shape.num_stages)
    kernel = build(attend_walks, kind, capability, constants, stored, **options)
    assert "mma" in kernel.asm["ptx"], "the tensor cores have work"
    assert kernel.metadata.shared <= (128 if capability == 90 else 99) * 1024, kernel.metadata.shared
build(merge_walks, "*bf16", 80, dict(VALUE_DIM=80, BLOCK_VALUE=128, PARTS=16))
"""


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = str(
        Path(kvmosaic.__file__).parents[1]
    )  # the tree under test, wherever another is installed
    done = subprocess.run([sys.executable, "-c", COMPILING], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
