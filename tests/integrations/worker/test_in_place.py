"""Documents read by blocks, as on a GPU, give what documents gathered token by token give, as on a CPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext
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
from kvmosaic.vllm.worker.in_place import reader as in_place
from kvmosaic.vllm.worker.in_place import step as steps
from kvmosaic.vllm.worker.in_place.attention import ReadsDocuments
from kvmosaic.vllm.worker.in_place.reader import DocumentReader, MaskReads, document_reader, why_not_paged
from kvmosaic.vllm.worker.in_place.step import OwnRows, rows_in, wanted
from kvmosaic.vllm.worker.in_place.trial import check_reading

if sys.platform != "linux":
    pytest.skip("Triton is for Linux only", allow_module_level=True)

import kvmosaic.attention.triton.backend
from kvmosaic.attention.triton import replays, work
from kvmosaic.attention.triton.replays import Replays

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
    """Rows of up to three requests, each with own blocks and documents in any blocks; and which rows they are."""
    num_blocks = BLOCKS * SIZE // block_size
    rows, numbers, row = [], [], draw(st.integers(0, 2))
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
        rows.append(OwnRows(InPlaceRequest(blocks, shifts, tuple(reads)), count, first))
        numbers += range(row, row + count)
        row += count + draw(st.integers(0, 2))
    return rows, torch.tensor(numbers)


def read(reader, share, rows, numbers, query, key, value):
    """Outputs of all layers."""
    outputs = []
    for place in share.places.layers:
        output = torch.zeros_like(query)
        with reader.trying(reader.step_of(rows, numbers)):
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
    rows, numbers = data.draw(own_rows(block_size))
    torch.manual_seed(0)
    sinks = torch.randn(QUERIES) if has_sinks else None
    share = share_of(kind, kind, block_size=block_size, logits_soft_cap=softcap, sinks=sinks)
    for place, window in zip(share.places.layers, windows, strict=True):
        object.__setattr__(place, "window", window)
    total = int(numbers[-1]) + 2
    query, key, value = torch.randn(total, QUERIES, KEY), {}, {}
    for place in share.places.layers:
        key[place.name], value[place.name] = torch.randn(2, total, HEADS, KEY)
        parts = torch.split(numbers, [own.num_rows for own in rows])
        for own, part in zip(
            rows, parts, strict=True
        ):  # stored before attention is called; what is computed from it by the other way is the same
            slots = share.places.slots(own.request.blocks, own.first_index, own.num_rows)
            stored = place.layout.read(slots)
            key[place.name][part], value[place.name][part] = stored
    before = share.state()
    gathered, paged = (
        read(DocumentReader(share.places, is_paged=way), share, rows, numbers, query, key, value)
        for way in (False, True)
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
    monkeypatch.setitem(sys.modules, "kvmosaic.attention.triton.backend", None)
    monkeypatch.delattr(kvmosaic.attention.triton, "backend")
    assert "Triton cannot be imported" in why_not_paged(share_of("joined by head").places)


def test_a_forward_gets_the_positions_of_its_own_tokens(monkeypatch):
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
    monkeypatch.setattr(in_place, "num_rows_of_step", lambda: 3)
    reader = DocumentReader(places, is_paged=True)
    reads = (DocumentRead(4, (3,), 0, 5, 0, 9),)
    reader.begin([InPlaceRequest((1,), ((4, 20),), reads, num_computed=3, num_scheduled=2)])
    given_positions = torch.tensor([3, 4, 0, 0])
    places.root(torch.zeros(4), positions=given_positions)
    assert seen[-1][0] == [3, 24, 0, 0] and reader.is_reading
    assert seen[-1][1] == given_positions.data_ptr(), "captured graphs read this very tensor"
    assert given_positions.tolist() == [3, 4, 0, 0]
    with pytest.raises(RuntimeError, match="no tokens"):
        places.root(None, positions=given_positions)
    assert given_positions.tolist() == [3, 4, 0, 0]
    reader.end()
    places.root(torch.zeros(4), positions=given_positions)
    assert seen[-1][0] == [3, 4, 0, 0] and not reader.is_reading and not places.root._forward_hooks


class Worker:
    """A model of attention alone, in the buffers of a runner: padded, and the same ones in every step."""

    def __init__(self, monkeypatch, *, is_paged, capture=None, num_rows=4):
        self.share = share_of("joined by head", "joined by head")
        self.num_tokens, self.num_launched = 2, 0
        self.slots, self.given = torch.full((num_rows,), -1), torch.zeros(num_rows, dtype=torch.int64)
        self.rows = torch.zeros(num_rows, QUERIES + 2 * HEADS, KEY)
        monkeypatch.setattr(position_shift, "step_slots", lambda: self.slots)
        monkeypatch.setattr(in_place, "num_rows_of_step", lambda: self.num_tokens)
        monkeypatch.setattr(in_place, "without_graphs", nullcontext)
        places = SimpleNamespace(
            **{name: getattr(self.share.places, name) for name in ("layers", "block_size", "device")}
        )
        places.root = self.root = Root(self)
        replays = capture and Replays(places.device, capture)
        self.reader = DocumentReader(places, is_paged=is_paged, replays=replays)

    def step(self, requests, order):
        """[T, …] outputs of a step of one row each, which are these of the forward."""
        for request, row in zip(requests, order, strict=True):
            index = request.num_computed
            self.slots[row] = request.blocks[index // SIZE] * SIZE + index % SIZE
            generator = torch.Generator().manual_seed(1000 * request.blocks[0] + index)
            self.rows[row] = torch.randn(self.rows.shape[1:], generator=generator)
            self.given[row] = index
        self.reader.begin(requests)
        found = self.root(None, positions=self.given).clone()
        self.reader.end()
        assert self.given[order].tolist() == [request.num_computed for request in requests], "given back"
        return found


class Root(torch.nn.Module):
    def __init__(self, worker):
        super().__init__()
        self.worker = [worker]

    def forward(self, input_ids, positions):
        (worker,) = self.worker
        worker.num_launched += 1
        query, key, value = worker.rows.split([QUERIES, HEADS, HEADS], 1)
        written, found = worker.slots >= 0, [positions[:, None].float()]
        for place in worker.share.places.layers:
            place.layout.write(worker.slots[written], key[written], value[written])
            output = torch.zeros_like(query)
            worker.reader.attend(place.name, query, key, value, output, place.layer.impl)
            found.append(output.flatten(1))
        return torch.cat(found, 1)


def run_again(function):
    """Stands for a CUDA graph, as in the tests of our engine's."""
    result = function().clone()
    return result, lambda: result.copy_(function())


def answers(count):
    """Steps of two requests over the same documents, whose own tokens go on into further blocks."""
    documents = (3, 4), (5,)
    for step in range(count):
        requests = []
        for number, (first, blocks, distance) in enumerate([(5, (0, 1), 20), (2, (2, 1), 7)]):
            reads = tuple(
                DocumentRead(2, where, 2, 5 * len(where), 2, distance + 9 * at) for at, where in enumerate(documents)
            )
            index = first + step
            held = blocks[: index // SIZE + 1]
            requests.append(InPlaceRequest(held, ((2, 30 + number),), reads, num_computed=index, num_scheduled=1))
        yield requests


@pytest.mark.slow
@pytest.mark.parametrize("walk", [512, 7])
@pytest.mark.parametrize("room", [16, 0])
def test_steps_of_answers_are_the_same_gathered_launched_and_replayed(walk, room, monkeypatch):
    """Through ends of blocks and walks; rows in another order than the requests, beside padding."""
    monkeypatch.setattr(work, "MIN_WALK", walk)
    monkeypatch.setattr(steps, "_ROOM", room)
    monkeypatch.setattr(replays, "_LEAST_ROOM", 1)
    found = {}
    for name, options in {"gathered": {}, "launched": {"is_paged": True}, "replayed": {"capture": run_again}}.items():
        with monkeypatch.context() as patch:
            worker = Worker(patch, **{"is_paged": name != "gathered", **options})
            found[name] = [worker.step(requests, [2, 0])[[2, 0]] for requests in answers(6)]
            found[name, "state"] = worker.share.state()
            if name == "replayed":
                assert worker.reader.replays.problem == "" and not worker.reader.replays.refused
                assert worker.reader.replays.num_replays >= (4 if walk == 512 and room else 1)
    for name in ("launched", "replayed"):
        for expected, step in zip(found["gathered"], found[name], strict=True):
            torch.testing.assert_close(step, expected, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_a_forward_that_cannot_be_captured_or_has_other_rows_is_launched(monkeypatch, caplog):
    def failing(function):
        raise RuntimeError("not permitted when stream is capturing")

    gathered = Worker(monkeypatch, is_paged=False)
    expected = [gathered.step(requests, [1, 0])[:2] for requests in answers(4)]
    for num_tokens, capture, said in [(2, failing, True), (3, run_again, False)]:
        worker = Worker(monkeypatch, is_paged=True, capture=capture)
        worker.num_tokens = num_tokens  # a third row reads nothing
        for requests, right in zip(answers(4), expected, strict=True):
            torch.testing.assert_close(worker.step(requests, [1, 0])[:2], right, atol=2e-5, rtol=0)
        assert worker.reader.replays.num_replays == 0
        assert ("not permitted when stream is capturing" in caplog.text) == said
        caplog.clear()


def test_a_row_that_the_forward_does_not_write_is_an_error(monkeypatch):
    worker = Worker(monkeypatch, is_paged=False)
    (requests, *_) = answers(1)
    worker.reader.begin(requests)
    with pytest.raises(RuntimeError):
        worker.root(None, positions=worker.given)


@given(data=st.data(), size=st.sampled_from([1, 4]))
def test_rows_are_found_by_what_they_write(data, size):
    """Rows of requests anywhere in a forward, beside others and padding."""
    slots = data.draw(st.permutations(range(12)))
    counts = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    blocks = data.draw(st.permutations(range(12)))
    requests, used = [], 0
    for count in counts:
        needed = -(-count // size)
        requests.append(OwnRows(InPlaceRequest(tuple(blocks[used : used + needed]), (), ()), count, 0))
        used += needed
    expected = [own.request.blocks[i // size] * size + i % size for own in requests for i in range(own.num_rows)]
    others = [slot for slot in slots if slot not in expected][: data.draw(st.integers(0, 5))]
    written = torch.tensor(data.draw(st.permutations([*expected, *others, -1, -1])))
    rows = rows_in(written, *map(torch.from_numpy, wanted(requests, size, len(written))))
    assert written[rows[: len(expected)]].tolist() == expected
    assert sorted(rows.tolist()) == [*range(len(written))]


def test_attention_without_documents_is_vllms_alone():
    class Vllm:
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None):
            return output.fill_(1)

    class Reader:
        is_reading = is_alone = False

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
    attention.reader.is_alone = True
    assert attention.forward(layer, nothing, nothing, nothing, None, None, torch.zeros(2)).tolist() == [2, 1]
    attention.is_storing = False  # then vLLM's has nothing to do where all rows read documents
    assert attention.forward(layer, nothing, nothing, nothing, None, None, torch.zeros(2)).tolist() == [2, 0]
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
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        parallel_config=SimpleNamespace(world_size=1),
        lora_config=None,
    )
    share = share_of("joined by head", "joined by head")
    worker = ComposingWorker(config, None)
    monkeypatch.delenv(READS_VARIABLE, raising=False)
    monkeypatch.setattr(position_shift, "can_shift", lambda *_, by_vllm: "of windows" if by_vllm else no_shift)
    assert worker._find_reader(share.places, None) == "" and worker.reader is None, "copies were chosen"
    monkeypatch.setenv(READS_VARIABLE, "in-place")
    assert worker._find_reader(share.places, None) == reason
    assert (worker.reader is None) == bool(reason)
    if not reason:
        assert worker.reader.replays is None, "there is no GPU"


def test_full_graphs_are_refused_with_the_way_out():
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )
    said = position_shift.can_shift(config, SimpleNamespace(kv_cache_groups=[GROUP]), torch.nn.Linear(1, 1))
    assert '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'' in said
