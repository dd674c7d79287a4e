from __future__ import annotations

import ast
import os
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ascend import (
    Layer,
    Module,
    RecordedAttention,
    RecordedIndexer,
    RecordedLatentAttention,
    RecordedRotary,
    RecordedSparseAttention,
    config_of,
    part_of_cache,
    torch_npu,
    turned_keys,
)
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.vllm.operations import Move
from kvmosaic.vllm.worker import extra_forward, position_shift
from kvmosaic.vllm.worker.composing_worker import ComposingWorker
from kvmosaic.vllm.worker.kv_layout import KVLayout, Mover
from kvmosaic.vllm.worker.layouts import find_layout
from kvmosaic.vllm.worker.layouts.ascend import AscendIndexLayout, AscendLatentLayout, AscendLayout
from kvmosaic.vllm.worker.self_check import check_caches

BLOCKS, SIZE, HEADS, HEAD_SIZE, LATENT, TURNING = 6, 8, 2, 16, 24, 8
DTYPES = [torch.float32, torch.bfloat16]


def grouped(dtype: torch.dtype = torch.float32, value_size: int = HEAD_SIZE) -> tuple[Layer, tuple[Tensor, Tensor]]:
    layer = Layer(RecordedAttention(), head_size=HEAD_SIZE, head_size_v=value_size, num_kv_heads=HEADS)
    keys = part_of_cache(BLOCKS, SIZE, HEADS, HEAD_SIZE, dtype, padding=16)
    return layer, (keys, part_of_cache(BLOCKS, SIZE, HEADS, value_size, dtype, padding=32))


def latent(dtype: torch.dtype = torch.float32) -> tuple[Layer, tuple[Tensor, Tensor]]:
    impl = RecordedLatentAttention(LATENT, TURNING)
    layer = Layer(impl, head_size=LATENT + TURNING, num_kv_heads=1, kv_lora_rank=LATENT, qk_rope_head_dim=TURNING)
    rows = part_of_cache(BLOCKS, SIZE, 1, LATENT, dtype, padding=16)
    return layer, (rows, part_of_cache(BLOCKS, SIZE, 1, TURNING, dtype, padding=32))


INDEX = 16


class Sparse:
    """A latent layer with an indexer, whose cache is the end of the layer's, or since 0.30 one of its own."""

    def __init__(
        self, eight_bits: torch.dtype | None = None, *, has_own_cache: bool = False, is_neox_style: bool = True
    ) -> None:
        self.indexer = RecordedIndexer(INDEX, TURNING, is_neox_style, eight_bits)
        impl = RecordedSparseAttention(LATENT, TURNING, self.indexer, has_own_cache=has_own_cache)
        sizes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": TURNING}
        self.layer = Layer(impl, head_size=LATENT + TURNING, num_kv_heads=1, **sizes)
        self.rows = latent()[1]
        self.index: tuple[Tensor, ...] = (part_of_cache(BLOCKS, SIZE, 1, INDEX, eight_bits or torch.float32, 16),)
        if eight_bits is not None:
            self.index = (*self.index, part_of_cache(BLOCKS, SIZE, 1, 1, torch.float16, 32))
        rotary = RecordedRotary(TURNING, is_neox_style=False, dtype=torch.float32, head_size=TURNING)
        self.module, self.rotary = Module(self.layer, rotary), rotary
        self.layers, self.caches = {"attn": self.layer}, {"attn": (*self.rows, *self.index)}
        if has_own_cache:
            self.indexer.k_cache = Layer(None)
            self.layers["indexer.k_cache"] = self.indexer.k_cache
            self.caches = {"attn": self.rows, "indexer.k_cache": self.index}

    def places(self) -> KVLayout:
        return KVLayout.of(config_of(self.layers, SIZE, torch.float32), self.caches)

    def compute(self, tokens: Tensor, start: int, slot: int) -> None:
        """Has the layer compute tokens at positions from `start` on, and write them to slots from `slot` on."""
        rows, hidden = tokens.split([LATENT + TURNING, 48], dim=-1)
        cos, sin = self.rotary.cos_sin_cache[start : start + len(tokens)].chunk(2, dim=-1)
        double = [torch.cat((half, half), dim=-1)[:, None, None] for half in (cos, sin)]
        slots = torch.arange(slot, slot + len(tokens))
        self.layer.impl.exec_kv(rows, *double, self.rows, slots, SimpleNamespace())
        keys, scales, _ = self.indexer.forward_k(hidden, *double)
        for place, part in zip(self.index, (keys, scales), strict=False):
            assert part is not None
            place.view(-1, place.shape[-1])[slots] = part.view(len(tokens), -1)


EIGHT_BITS = [None, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize(
    ("eight_bits", "is_neox_style", "has_own_cache"),
    [
        (None, True, False),
        (None, False, True),
        (torch.int8, False, False),
        (torch.int8, True, True),
        (EIGHT_BITS[2], True, True),
    ],
)
def test_moved_index_keys_are_those_computed_at_the_new_place(
    eight_bits: torch.dtype | None, is_neox_style: bool, has_own_cache: bool
) -> None:
    torch.manual_seed(0)
    sparse = Sparse(eight_bits, has_own_cache=has_own_cache, is_neox_style=is_neox_style)
    places = sparse.places()
    assert [type(place.layout) for place in places.layers] == [AscendLatentLayout, AscendIndexLayout]
    assert places.cache_format == str(eight_bits or "").removeprefix("torch.")
    tokens = torch.randn(11, LATENT + TURNING + 48)
    sparse.compute(tokens, start=3, slot=3)
    Mover(places).move([Move((0, 1), 3, (4, 5), 0, 11, position=3, distance=0)])
    for part in sparse.index:
        assert torch.equal(*(part.flatten(0, 1)[first : first + 11].float() for first in (3, 4 * SIZE)))
    Mover(places).move([Move((0, 1), 3, (3, 2, 5), 5, 11, position=3, distance=101)])
    sparse.compute(tokens, start=104, slot=4 * SIZE)
    slots = [places.slots((3, 2, 5), 5, 11), torch.arange(4 * SIZE, 4 * SIZE + 11)]
    for place in places.layers:
        moved, wanted = (place.layout.read(each)[0] for each in slots)
        far = (moved - wanted).abs().max() / wanted.abs().max()
        most = {None: 1e-6, torch.int8: 0.015, torch.float8_e4m3fn: 0.06}[eight_bits]
        assert far <= (most if place is places.layers[1] else 1e-6)


@pytest.mark.parametrize("eight_bits", EIGHT_BITS)
def test_index_keys_are_moved_in_their_cache_at_start_and_nothing_is_left(eight_bits: torch.dtype | None) -> None:
    sparse = Sparse(eight_bits)
    places = sparse.places()
    assert check_caches(places, 400) == ""
    assert not any(part.any() for part in (*sparse.rows, *sparse.index))
    layout = places.layers[1].layout
    update = layout.write
    layout.write = lambda slots, *parts: update((slots + 1) % layout.num_slots, *parts)  # type: ignore[method-assign]
    assert check_caches(places, 400).startswith("attn.indexer:")


def test_an_indexer_that_turns_its_keys_otherwise_is_refused() -> None:
    sparse = Sparse()

    def at_the_end(hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None]:
        projected, _ = sparse.indexer.wk_weights_proj(hidden)
        keys = turned_keys(projected[:, None, :INDEX].flip(-1), cos[:, 0, 0], sin[:, 0, 0], TURNING, True)
        return keys.flip(-1), None

    sparse.layer.impl.indexer_select_pre_process = at_the_end
    with pytest.raises(NotMovable, match=r"^attn\.indexer: its indexer turns keys otherwise"):
        sparse.places()
    sparse.layer.impl.indexer_select_pre_process = None
    with pytest.raises(NotMovable, match=r"^attn\.indexer: trying its indexer fails: TypeError"):
        sparse.places()


def test_packed_rows_beside_an_indexer_and_unknown_index_keys_are_refused() -> None:
    """Sparse C8 of 0.23 packs a latent and its rotary part into one tensor of bytes."""
    sparse = Sparse(torch.int8)
    sparse.caches = {"attn": (torch.zeros(BLOCKS, SIZE, 1, 40, dtype=torch.int8), *sparse.index)}
    with pytest.raises(NotMovable, match="int8"):
        sparse.places()
    for index, said in [
        ((sparse.index[0].view(torch.uint8), sparse.index[1]), "uint8 with scales of torch.float16"),
        ((sparse.index[0][..., :8], sparse.index[1]), "index keys"),
        ((sparse.index[0],), "int8"),
    ]:
        sparse.caches = {"attn": (*sparse.rows, *index)}
        with pytest.raises(NotMovable, match=rf"^attn\.indexer.*{said}"):
            sparse.places()


KINDS: dict[str, Any] = {"grouped": grouped, "latent": latent}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_size", [HEAD_SIZE, 8])
def test_keys_and_values_are_read_where_the_kernel_writes_them(dtype: torch.dtype, value_size: int) -> None:
    layer, cache = grouped(dtype, value_size)
    layout = find_layout("layer", layer, cache)
    assert isinstance(layout, AscendLayout) and not layout.is_latent
    slots = torch.tensor([5, 40, 17])
    keys, values = torch.randn(3, HEADS, HEAD_SIZE).to(dtype), torch.randn(3, HEADS, value_size).to(dtype)
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots.int())
    read = layout.read(slots)
    assert torch.equal(read[0], keys) and read[1] is not None and torch.equal(read[1], values)
    layout.write(slots + 1, *read)
    assert torch.equal(cache[0][5, 1], keys[1]) and torch.equal(cache[1][2, 2], values[2])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_to_the_cache_while_its_layout_is_found(kind: str) -> None:
    layer, cache = KINDS[kind]()
    for part in cache:
        part.fill_(3)
    find_layout("layer", layer, cache)
    assert all((part == 3).all() for part in cache)
    assert getattr(layer.impl, "key_cache", None) is None, "the layer would go on writing to the small cache"


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows_are_read_and_written_in_one_piece(dtype: torch.dtype) -> None:
    layer, cache = latent(dtype)
    layout = find_layout("layer", layer, cache)
    assert isinstance(layout, AscendLatentLayout) and layout.is_latent
    assert (layout.key_size, layout.block_size, layout.num_slots) == (LATENT + TURNING, SIZE, BLOCKS * SIZE)
    rows = torch.randn(3, 1, LATENT + TURNING).to(dtype)
    slots = torch.tensor([5, 40, 17])
    layout.write(slots, rows, None)
    assert torch.equal(layout.read(slots)[0], rows)
    assert torch.equal(cache[1][5, 0, 0], rows[1, 0, LATENT:])


def as_computed(
    kind: str, layer: Layer, cache: Any, rotary: RecordedRotary, tokens: Tensor, start: int, slot: int
) -> None:
    """Has the layer compute tokens at positions from `start` on, and write them to slots from `slot` on."""
    positions = torch.arange(start, start + len(tokens))
    slots = torch.arange(slot, slot + len(tokens))
    cos, sin = rotary.cos_sin_cache[positions].chunk(2, dim=-1)
    if kind == "latent":
        double = [torch.cat((half, half), dim=-1)[:, None, None] for half in (cos, sin)]
        layer.impl.exec_kv_prefill(tokens, *double, cache, slots)
        return
    keys, values = tokens.view(len(tokens), 2, HEADS, HEAD_SIZE).unbind(1)
    one, other = keys.chunk(2, dim=-1)
    turned = torch.cat((one * cos[:, None] - other * sin[:, None], other * cos[:, None] + one * sin[:, None]), dim=-1)
    layer.impl.do_kv_cache_update(layer, turned.contiguous(), values.contiguous(), cache, slots.int())


@pytest.mark.parametrize("kind", KINDS)
def test_moved_keys_are_those_computed_at_the_new_place(kind: str) -> None:
    torch.manual_seed(0)
    layer, cache = KINDS[kind]()
    is_latent = kind == "latent"
    size = TURNING if is_latent else HEAD_SIZE
    # DeepSeek's models pair neighbours
    rotary = RecordedRotary(size, is_neox_style=not is_latent, dtype=torch.float32, head_size=size)
    module = Module(layer, rotary)
    places = KVLayout.of(config_of({"layer": layer}, SIZE, torch.float32), {"layer": cache})
    tokens = torch.randn(11, LATENT + TURNING if is_latent else 2 * HEADS * HEAD_SIZE)
    as_computed(kind, layer, cache, rotary, tokens, start=3, slot=3)
    Mover(places).move([Move((0, 1), 3, (3, 2, 5), 5, 11, position=3, distance=101)])
    as_computed(kind, layer, cache, rotary, tokens, start=104, slot=4 * SIZE)  # blocks 4 and 5
    moved = places.layers[0].layout.read(places.slots((3, 2, 5), 5, 11))
    wanted = torch.cat([part.flatten(0, 1)[4 * SIZE : 4 * SIZE + 11] for part in cache], dim=-1)
    found = torch.cat([part for part in moved if part is not None], dim=-1)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert module.attn is layer


@pytest.mark.parametrize("kind", KINDS)
def test_at_start_keys_are_moved_in_its_cache_and_nothing_is_left(kind: str) -> None:
    layer, cache = KINDS[kind]()
    size = TURNING if kind == "latent" else HEAD_SIZE
    module = Module(layer, RecordedRotary(size, is_neox_style=kind == "grouped", dtype=torch.float32, head_size=size))
    places = KVLayout.of(config_of({"layer": layer}, SIZE, torch.float32), {"layer": cache})
    assert check_caches(places, 400) == ""
    assert not any(part.any() for part in cache)
    place, update = places.layers[0], type(places.layers[0].layout).write
    place.layout.write = lambda slots, *parts: update(place.layout, (slots + 1) % layout_slots, *parts)  # type: ignore[method-assign]
    layout_slots = place.layout.num_slots
    assert check_caches(places, 400).startswith("layer:")
    assert "no room" in check_caches(replace(places, num_blocks=4), 400)
    assert module.attn is layer


def renamed(impl: Any, name: str = "", module: str = "", attributes: dict[str, Any] | None = None) -> Any:
    kind = type(impl)
    new = type(name or kind.__name__, (kind,), attributes or {})
    new.__module__ = module or kind.__module__
    impl.__class__ = new
    return impl


def refused(layer: Layer, cache: Any) -> str:
    with pytest.raises(NotMovable) as caught:
        find_layout("model.layers.0.attn", layer, cache)
    assert str(caught.value).startswith("model.layers.0.attn")
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_context_parallel_and_c8_are_refused(kind: str) -> None:
    layer, cache = KINDS[kind]()
    renamed(layer.impl, module="vllm_ascend.attention.context_parallel.mla_cp")
    assert "context parallel" in refused(layer, cache)
    layer, cache = KINDS[kind]()
    renamed(layer.impl, name="AscendC8AttentionBackendImpl")
    assert "C8" in refused(layer, cache)
    layer, cache = KINDS[kind]()
    assert "int8" in refused(layer, tuple(part.to(torch.int8) for part in cache))


def test_compressed_and_packed_latent_caches_are_refused() -> None:
    for attributes, said in [({"enable_kv_nz": True}, "enable_kv_nz"), ({"fa_quant_layer": True}, "quantizes")]:
        layer, cache = latent()
        renamed(layer.impl, attributes=attributes)
        assert said in refused(layer, cache)
    for module in ("dsa_v1", "dsa_v41"):
        layer, cache = latent()
        renamed(layer.impl, module=f"vllm_ascend.attention.{module}")
        assert f"by {module}, whose cache is not known" in refused(layer, cache)


def test_caches_of_other_shapes_are_refused() -> None:
    layer, cache = grouped()
    assert "3 parts" in refused(layer, (*cache, cache[0]))
    packed = tuple(torch.zeros(BLOCKS, HEADS * HEAD_SIZE // 16, SIZE, 16) for _ in range(2))
    assert "Atlas 300I" in refused(layer, packed)
    layer.hashk_cache = [torch.zeros(1)]
    assert "KVComp" in refused(layer, cache)


def test_a_kernel_that_stores_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_npu.npu_kv_rmsnorm_rope_cache

    def neighbours(kv: Tensor, *arguments: Any, **more: Any) -> Any:
        sorted_back = kv.clone()
        one, other = kv[..., LATENT:].chunk(2, dim=-1)
        sorted_back[..., LATENT:] = torch.stack((one, other), dim=-1).flatten(-2)
        return original(sorted_back, *arguments, **more)

    layer, cache = latent()
    monkeypatch.setattr(torch_npu, "npu_kv_rmsnorm_rope_cache", neighbours)
    assert "another order" in refused(layer, cache)
    layer, cache = grouped()
    monkeypatch.setattr(
        torch_npu,
        "_npu_reshape_and_cache",
        lambda *, key, value, key_cache, value_cache, slot_indices: key_cache.flatten()[: key.numel()].copy_(
            key.flatten()
        ),
    )
    assert "not found" in refused(layer, cache)


def test_a_kernel_that_fails_is_trouble_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **more: Any) -> Any:
        raise RuntimeError("error code 561002")

    monkeypatch.setattr(torch_npu, "npu_kv_rmsnorm_rope_cache", broken)
    layer, cache = latent()
    rotary = RecordedRotary(TURNING, is_neox_style=False, dtype=torch.float32, head_size=TURNING)
    module = Module(layer, rotary)
    worker = ComposingWorker(config_of({"layer": layer}, SIZE, torch.float32), None)
    worker.register({"layer": cache})
    assert "561002" in worker.facts.trouble and worker.places is None
    assert module.attn is layer


def test_layers_of_other_platforms_are_left_to_others() -> None:
    layer, cache = grouped()
    renamed(layer.impl, module="vllm.v1.attention.backends.flash_attn")
    assert AscendLayout.of("layer", layer, cache) is None
    layer, cache = latent()
    renamed(layer.impl, module="vllm.v1.attention.backends.mla.cpu_mla")
    assert AscendLatentLayout.of("layer", layer, cache) is None


def test_repair_and_shared_positions_are_said_to_be_impossible_on_an_npu() -> None:
    """Its runner looks up the angles of a step's positions, and makes other metadata, before the model is called."""
    parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="npu"),
        model_config=SimpleNamespace(is_encoder_decoder=False, is_multimodal_model=False),
        cache_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
        parallel_config=parallel,
        speculative_config=None,
        lora_config=None,
    )
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    for device_type, said in (("npu", "vLLM-Ascend"), ("cpu", "")):
        config.device_config.device_type = device_type
        assert extra_forward.can_run(config, groups).startswith(said)
        assert position_shift.can_shift(config, groups, torch.nn.Linear(1, 1)).startswith(said)
        assert bool(extra_forward.can_run(config, groups)) == bool(said)


FETCHED = Path(__file__).parents[3] / ".venv-vllm" / "ascend"
"""`make test-vllm` unpacks the source of releases there, if they can be downloaded."""
GIVEN = os.environ.get("KVMOSAIC_ASCEND_SOURCE", "")
"""Another unpacked source distribution."""
SOURCES = [*sorted(FETCHED.glob("*/")), *([Path(GIVEN)] if GIVEN else [])]

of_each_source = pytest.mark.parametrize(
    "source",
    SOURCES
    or [pytest.param(None, marks=pytest.mark.skip(reason="no source of vllm-ascend: make test-vllm downloads it"))],
    ids=lambda source: source and source.name,
)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def method(source: Path, path: str, class_name: str, name: str, **names: Any) -> Any:
    """A method of vLLM-Ascend itself, cut out of its file, which as a whole imports only next to an NPU."""
    tree = parsed(source / "vllm_ascend" / path)
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    (found,) = (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == name)
    found.decorator_list = []
    for argument in found.args.args:
        argument.annotation = None
    found.returns = None
    space: dict[str, Any] = {"torch": torch, "torch_npu": torch_npu, **names}
    exec(compile(ast.Module([found], []), path, "exec"), space)
    return space[name]


OF_DECODERS = {"attn_type": "decoder", "use_bnsd_kv_cache": False}
"""Attributes of an implementation; the second since 0.30."""
OF_LATENT = {"pcp_enabled": False, "use_mla_rope": True, "support_fp8_attention": False}
"""The same of a latent one; all since 0.30."""


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_by_head_are_refused_with_the_setting_that_makes_them(kind: str) -> None:
    layer, cache = KINDS[kind]()
    layer.impl.use_bnsd_kv_cache = True
    if kind == "latent":  # which the setting does not change
        find_layout("layer", layer, cache)
        return
    with pytest.raises(NotMovable, match=r"^layer .*VLLM_KV_CACHE_LAYOUT"):
        find_layout("layer", layer, cache)


@of_each_source
def test_the_recorded_methods_are_those_of_vllm_ascend(source: Path) -> None:
    operator = SimpleNamespace()
    write = method(source, "device/device_op.py", "BaseDeviceAdaptor", "reshape_and_cache")
    operator.reshape_and_cache = lambda **given: write(None, **given)
    kinds = SimpleNamespace(ENCODER_ONLY="encoder_only", ENCODER="encoder")
    names: dict[str, Any] = {"DeviceOperator": operator, "AttentionType": kinds}
    update = method(source, "attention/attention_v1.py", "AscendAttentionBackendImpl", "do_kv_cache_update", **names)
    layer, cache = grouped()
    renamed(layer.impl, attributes={"do_kv_cache_update": update, **OF_DECODERS})
    find_layout("layer", layer, cache)

    chips = SimpleNamespace(A5="A5")
    names = {"get_ascend_device_type": lambda: "A3", "AscendDeviceType": chips}
    prefill = method(source, "attention/mla_v1.py", "AscendMLAImpl", "exec_kv_prefill", **names)
    layer, cache = latent()
    renamed(layer.impl, attributes={"exec_kv_prefill": prefill, **OF_LATENT})
    find_layout("layer", layer, cache)


@of_each_source
@pytest.mark.parametrize(("eight_bits", "is_neox_style"), [(None, False), (torch.int8, True)])
def test_the_recorded_indexer_is_that_of_vllm_ascend(
    source: Path, eight_bits: torch.dtype | None, is_neox_style: bool
) -> None:
    has_own_cache = (source / "vllm_ascend/attention/indexer.py").exists()
    sparse = Sparse(eight_bits, has_own_cache=has_own_cache, is_neox_style=is_neox_style)
    kind = SimpleNamespace(k_hadamard=sparse.indexer.k_hadamard.float())
    chips = SimpleNamespace(A5="A5")
    names = {
        "get_ascend_device_type": lambda: "A3",
        "AscendDeviceType": chips,
        "_int64_kv_slots": lambda slots, _: slots,
    }
    names |= {"HAS_TRITON": True, "rope_forward_triton_siso": turned_keys, "AscendSFAImpl": kind}
    exec_kv = method(source, "attention/sfa_v1.py", "AscendSFAImpl", "exec_kv", **names)
    renamed(sparse.layer.impl, attributes={"exec_kv": exec_kv})
    wanted = sparse.indexer.forward_k
    if has_own_cache:
        path, name = "attention/indexer.py", "AscendSFAIndexerBackend"
        sparse.indexer.k_hadamard = sparse.indexer.q_hadamard = kind.k_hadamard
        quantize = method(source, path, name, "_quantize_li_tensor")
        renamed(
            sparse.indexer,
            attributes={"forward_k": method(source, path, name, "forward_k", **names), "_quantize_li_tensor": quantize},
        )
        compute = sparse.indexer.forward_k
    else:
        computed = method(source, "attention/sfa_v1.py", "AscendSFAImpl", "indexer_select_pre_process", **names)
        compute = sparse.layer.impl.indexer_select_pre_process = partial(computed, sparse.layer.impl)
    sparse.places()
    cos, sin = (half[7:9].repeat(1, 2)[:, None, None] for half in sparse.rotary.cos_sin_cache.chunk(2, dim=-1))
    hidden = torch.randn(2, 48)
    for found, recorded in zip(compute(hidden, cos, sin)[:2], wanted(hidden, cos, sin)[:2], strict=True):
        assert (found is None) is (recorded is None)
        assert found is None or torch.equal(found.view(2, -1), recorded.view(2, -1))


@of_each_source
def test_vllm_ascend_itself_sorts_neighbours_apart(source: Path) -> None:
    path, kind = "ops/rotary_embedding.py", "AscendDeepseekScalingRotaryEmbedding"
    turn, halves = method(source, path, kind, "_apply_rotary_pos_emb"), method(source, path, kind, "_rotate_half")
    rotary = RecordedRotary(TURNING, is_neox_style=False, dtype=torch.float32, head_size=TURNING)
    cos, sin = (torch.cat((half, half), dim=-1) for half in rotary.cos_sin_cache.chunk(2, dim=-1))
    row = torch.randn(1, LATENT + TURNING)
    this = SimpleNamespace(_rotate_half=lambda x: halves(None, x))
    _, wanted = turn(this, row[:, None, LATENT:], row[:, None, LATENT:], cos, sin, torch.tensor([77]))
    layer, cache = latent()
    as_computed("latent", layer, cache, rotary, row, start=77, slot=9)
    assert torch.allclose(cache[1][1, 1, 0], wanted[0, 0], atol=1e-6)
