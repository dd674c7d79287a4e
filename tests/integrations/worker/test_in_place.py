"""Documents read by blocks, as on a GPU, give what documents gathered token by token give, as on a CPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.worker.stand_ins import BLOCKS, HEADS, KEY, SIZE
from integrations.worker.test_mover import Share
from support.examples import examples

from kvmosaic.layers.geometry import MaskSpec
from kvmosaic.vllm.operations import DocumentRead, InPlaceRequest
from kvmosaic.vllm.settings import READS_VARIABLE
from kvmosaic.vllm.worker import position_shift
from kvmosaic.vllm.worker.composing_worker import ComposingWorker
from kvmosaic.vllm.worker.in_place.attention import ReadsDocuments
from kvmosaic.vllm.worker.in_place.reader import DocumentReader, MaskReads, document_reader, why_not_paged
from kvmosaic.vllm.worker.in_place.step import OwnRows
from kvmosaic.vllm.worker.in_place.trial import check_reading

if sys.platform != "linux":
    pytest.skip("Triton is for Linux only", allow_module_level=True)

KINDS = ("joined by head", "joined by token", "joined, between other layers", "stacked by block", "stacked first")
QUERIES = 2 * HEADS

GROUP = SimpleNamespace(kv_cache_spec=None)


def share_of(*kinds, dtype=torch.float32, block_size=SIZE, **options):
    """Layers with attention that reads documents."""
    share = Share(kinds, dtype, block_size)
    known = {"scale": 0.25, "logits_soft_cap": None, "sinks": None, "reader": None, "sliding_window": (-1, -1)}
    for place in share.places.layers:
        place.layer.num_heads, place.layer.dtype = QUERIES, dtype
        for name, value in {**known, **options}.items():
            setattr(place.layer.impl, name, value)
    return share


@st.composite
def own_rows(draw, block_size):
    """Rows of up to three requests, each with blocks of its own and documents in any blocks."""
    num_blocks = BLOCKS * SIZE // block_size
    rows, row = [], draw(st.integers(0, 2))
    for number in range(draw(st.integers(1, 3))):
        first, count = draw(st.integers(0, block_size - 1)), draw(st.integers(1, 4))
        blocks = tuple((number + i) % num_blocks for i in range(-(-(first + count) // block_size)))
        reads = []
        for _ in range(draw(st.integers(0, 2))):
            start, length = draw(st.integers(0, block_size - 1)), draw(st.integers(1, block_size + 3))
            where = [draw(st.integers(0, num_blocks - 1)) for _ in range(-(-(start + length) // block_size))]
            reader = draw(st.integers(0, first + count - 1))
            position, distance = draw(st.integers(0, 20)), draw(st.sampled_from([0, 5, 30]))
            reads.append(DocumentRead(reader, tuple(where), start, length, position, distance))
        shifts = ((draw(st.integers(0, first)), 60),) if draw(st.booleans()) else ()
        rows.append(OwnRows(InPlaceRequest(blocks, shifts, tuple(reads)), row, count, first))
        row += count + draw(st.integers(0, 2))
    return rows


def read(reader, share, rows, query, key, value):
    """Outputs of all layers."""
    outputs = []
    for place in share.places.layers:
        output = torch.zeros_like(query)
        with reader.trying(reader.step_of(rows)):
            reader.attend(place.name, query, key[place.name], value[place.name], output, place.layer.impl)
        outputs.append(output)
    return torch.stack(outputs)


@settings(max_examples=examples(25))
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    block_size=st.sampled_from([SIZE, 2 * SIZE]),
    softcap=st.sampled_from([None, 0, 1.5]),
    has_sinks=st.booleans(),
    windows=st.tuples(*[st.sampled_from([0, 1, 6, 40])] * 2),
)
def test_paged_reads_are_those_of_gathered_keys(data, kind, block_size, softcap, has_sinks, windows):
    rows = data.draw(own_rows(block_size))
    torch.manual_seed(0)
    sinks = torch.randn(QUERIES) if has_sinks else None
    share = share_of(kind, kind, block_size=block_size, logits_soft_cap=softcap, sinks=sinks)
    for place, window in zip(share.places.layers, windows, strict=True):
        object.__setattr__(place, "window", window)
    total = rows[-1].first_row + rows[-1].num_rows + 1
    query, key, value = torch.randn(total, QUERIES, KEY), {}, {}
    for place in share.places.layers:
        key[place.name], value[place.name] = torch.randn(2, total, HEADS, KEY)
        for own in rows:  # stored before attention is called; what is computed from it by the other way is the same
            slots = share.places.slots(own.request.blocks, own.first_index, own.num_rows)
            stored = place.layout.read(slots)
            part = slice(own.first_row, own.first_row + own.num_rows)
            key[place.name][part], value[place.name][part] = stored
    before = share.state()
    gathered, paged = (
        read(DocumentReader(share.places, is_paged=way), share, rows, query, key, value) for way in (False, True)
    )
    assert torch.allclose(gathered, paged, atol=2e-5)
    for was, now in zip(before, share.state(), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(was, now, strict=True)), "nothing is written"


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_at_start_passes_and_finds_a_wrong_rotation(kind, monkeypatch):
    share = share_of(kind, kind)
    reader = DocumentReader(share.places, is_paged=True)
    assert check_reading(share.places, reader, None) == ""
    original = MaskReads._positions
    monkeypatch.setattr(MaskReads, "_positions", lambda self: original(self)[::-1])
    assert "reading in place differs" in check_reading(share.places, reader, None)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("windows", [(0, 7), (9, 31), (4, 4)])
def test_the_check_at_start_finds_a_window_of_one_token_less(windows, is_paged, monkeypatch):
    share = share_of("joined by head", "joined by head")
    for place, window in zip(share.places.layers, windows, strict=True):
        object.__setattr__(place, "window", window)
        place.layer.impl.sliding_window = (window - 1, 0) if window else (-1, -1)
    reader = DocumentReader(share.places, is_paged=is_paged)
    assert check_reading(share.places, reader, None) == ""
    monkeypatch.setattr(MaskSpec, "lowest_seen", lambda self, at: at - self.size + 2 if self.size else -(1 << 62))
    assert "reading in place differs" in check_reading(share.places, reader, None)


@pytest.mark.parametrize(
    ("window", "found"),
    [((-1, -1), False), ((7, 0), True), (None, False), (-1, False), (7, True), ((None, None), False)],
)
def test_a_window_is_found_in_any_form(window, found):
    share = share_of("joined by head", "joined by head", sliding_window=window)
    said = check_reading(share.places, DocumentReader(share.places, is_paged=True), None)
    assert ("a window that only its implementation knows" in said) == found and bool(said) == found


def test_caches_that_are_not_read_have_a_reason():
    assert why_not_paged(share_of("joined by head").places) == ""
    assert "CpuVectorLayout has no blocks of whole tokens" in why_not_paged(share_of("cpu vector").places)
    share = share_of("joined by head")
    share.places.layers[0].layer.dtype = torch.float64
    assert "queries in torch.float64" in why_not_paged(share.places)
    share = share_of("joined by head", "joined by head")
    for place in share.places.layers:
        del place.layer.impl.reader
    assert "--attention-backend FLASH_ATTN or TRITON_ATTN" in document_reader(share.places)


def test_without_triton_there_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvmosaic.attention.triton", None)
    import kvmosaic.attention

    monkeypatch.delattr(kvmosaic.attention, "triton", raising=False)
    assert "Triton cannot be imported" in why_not_paged(share_of("joined by head").places)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_forward_gets_the_positions_of_its_own_tokens(is_captured, monkeypatch):
    share = share_of("joined by head")
    seen = []

    class Root(torch.nn.Module):
        def forward(self, input_ids, positions):
            seen.append((positions.tolist(), positions.data_ptr()))
            if input_ids is None:
                raise RuntimeError("no tokens")

    places = SimpleNamespace(**{name: getattr(share.places, name) for name in ("layers", "block_size", "device")})
    places.root = Root()
    monkeypatch.setattr(position_shift, "step_slots", lambda: torch.tensor([SIZE + 3, SIZE + 4, 2 * SIZE, -1]))
    reader = DocumentReader(places, is_paged=True, is_captured=is_captured)
    reads = (DocumentRead(4, (3,), 0, 5, 0, 9),)
    reader.begin([InPlaceRequest((1,), ((4, 20),), reads, num_computed=3, num_scheduled=2)])
    given_positions = torch.tensor([3, 4, 0, 0])
    places.root(torch.zeros(4), positions=given_positions)
    assert seen[-1][0] == [3, 24, 0, 0] and reader.is_reading
    assert (seen[-1][1] == given_positions.data_ptr()) == is_captured, "captured graphs read this very tensor"
    assert given_positions.tolist() == [3, 4, 0, 0]
    with pytest.raises(RuntimeError, match="no tokens"):
        places.root(None, positions=given_positions)
    assert given_positions.tolist() == [3, 4, 0, 0]
    reader.end()
    places.root(torch.zeros(4), positions=given_positions)
    assert seen[-1][0] == [3, 4, 0, 0] and not reader.is_reading and not places.root._forward_hooks


def test_attention_without_documents_is_vllms_alone():
    class Vllm:
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None):
            return output.fill_(1)

    class Reader:
        is_reading = False

        def attend(self, name, query, key, value, output, impl):
            output[0] = 2

    class Attention(ReadsDocuments, Vllm):
        pass

    attention, layer, nothing = Attention(), SimpleNamespace(layer_name="a"), torch.zeros(2)
    assert attention.forward(layer, nothing, nothing, nothing, None, None, torch.zeros(2)).tolist() == [1, 1]
    attention.reader = Reader()
    assert attention.forward(layer, nothing, nothing, nothing, None, None, torch.zeros(2)).tolist() == [1, 1]
    attention.reader.is_reading = True
    assert attention.forward(layer, nothing, nothing, nothing, None, None, output=torch.zeros(2)).tolist() == [2, 1]
    assert not attention.fused_output_quant_supported(None)


@pytest.mark.parametrize(
    ("graphs", "no_shift", "reason"),
    [
        ("none", "", ""),
        ("pieces", "", ""),
        ("none", "full CUDA graphs call no module", "positions cannot be shifted: full CUDA graphs call no module"),
    ],
)
def test_a_worker_that_does_not_read_in_place_says_why(graphs, no_shift, reason, monkeypatch):
    mode = SimpleNamespace(has_piecewise_cudagraphs=lambda: graphs == "pieces", has_full_cudagraphs=lambda: False)
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    share = share_of("joined by head", "joined by head")
    worker = ComposingWorker(config, None)
    monkeypatch.delenv(READS_VARIABLE, raising=False)
    monkeypatch.setattr(position_shift, "can_shift", lambda *_, by_vllm: "of windows" if by_vllm else no_shift)
    assert worker._find_reader(share.places, None) == "" and worker.reader is None, "copies were chosen"
    monkeypatch.setenv(READS_VARIABLE, "in-place")
    assert worker._find_reader(share.places, None) == reason
    assert (worker.reader is None) == bool(reason)
    if not reason:
        assert worker.reader._positions._in_place == (graphs == "pieces")


def test_full_graphs_are_refused_with_the_way_out():
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )
    said = position_shift.can_shift(config, SimpleNamespace(kv_cache_groups=[GROUP]), torch.nn.Linear(1, 1))
    assert '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'' in said
