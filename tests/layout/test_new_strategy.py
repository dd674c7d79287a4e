"""A strategy of one's own: one class and one entry in `STRATEGIES`, and the engine and every face know it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.engines import answer, build_engine, dense_logits, token_ids
from support.loaded import loaded_family
from typer.testing import CliRunner

from kvmosaic import ChunkCacheConfig
from kvmosaic.cli import app
from kvmosaic.errors import InvalidConfig, NotMovable
from kvmosaic.lab.eval.variants import variants
from kvmosaic.layout import arrange
from kvmosaic.layout.strategies import STRATEGIES, PositionStrategy
from kvmosaic.prompt import Prompt
from kvmosaic.server.openai.chat_request import ChatRequest
from kvmosaic.server.read import read_settings
from kvmosaic.vllm.contract import Composition, How

PROMPT = Prompt.from_tokens([5, 6, 7], [list(range(10, 29)), list(range(40, 47)), list(range(60, 72))], [90, 91, 92])


class Gapped(PositionStrategy):
    """Documents follow one another, with `GAP` free positions before each of them."""

    name = "gapped"
    summary = "follow one another at a distance"
    GAP = 8

    def moves(self, chunk_context: str) -> bool:
        return True

    def position(self, start: int, cursor: int, shift: int) -> int:
        return cursor + self.GAP


@pytest.fixture
def gapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(STRATEGIES, "gapped", Gapped())
    return "gapped"


def test_cached_equals_computed_equals_dense(gapped: str) -> None:
    model = loaded_family("llama")
    layout = arrange(PROMPT, gapped)
    assert list(layout.positions().values()) == [0, 11, 30, 37] and layout.last.start == 49
    engine = build_engine(model, position_strategy=gapped)
    cold, cold_logits = answer(engine, PROMPT)
    warm, warm_logits = answer(engine, PROMPT)
    expected = dense_logits(model, layout, token_ids(cold))
    torch.testing.assert_close(cold_logits, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(warm_logits, expected, atol=1e-10, rtol=0)
    assert warm.reuse.composition.startswith("composed (gapped)")
    assert sum(segment.reused_tokens for segment in warm.reuse.segments) >= 38


def test_a_model_that_cannot_be_moved_refuses_it(gapped: str) -> None:
    from kvmosaic.assembly import check_movable

    with pytest.raises(NotMovable, match="position_strategy='gapped'"):
        check_movable(loaded_family("gpt2"), ChunkCacheConfig(position_strategy=gapped))


def test_every_face_offers_it(gapped: str) -> None:
    assert ChunkCacheConfig(position_strategy=gapped).position_strategy == gapped
    assert read_settings({"position_strategy": gapped}).llm_config().chunk_cache.position_strategy == gapped
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "position_strategy": gapped}
    assert ChatRequest.model_validate(body).position_strategy == gapped
    assert gapped in {variant.strategy for variant in variants(["none"])}
    assert How(position_strategy=gapped).position_strategy == gapped
    layout = Composition(3, (19, 7, 12), position_strategy=gapped).layout(range(45))
    assert [layout.position_of(index) for index in (1, 2, 3)] == [11, 30, 37] and layout.last.start == 49


def test_commands_offer_it(gapped: str) -> None:
    result = CliRunner().invoke(
        app, ["plan", "reader", "a##b##c", "--chunk-separator", "##", "--position-strategy", gapped]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "refused",
    [
        lambda: ChunkCacheConfig(position_strategy="other"),
        lambda: read_settings({"position_strategy": "other"}),
        lambda: arrange(PROMPT, "other"),
        lambda: How(position_strategy="other"),
        lambda: Composition(3, (19,), position_strategy="other"),
        lambda: variants(["none"], ["other"]),
    ],
)
def test_messages_list_it(gapped: str, refused) -> None:
    with pytest.raises(InvalidConfig, match="gapped"):
        refused()


def test_it_is_absent_elsewhere() -> None:
    with pytest.raises(InvalidConfig, match="choose 'auto' or 'sequential' or 'shared' or 'absolute'"):
        ChunkCacheConfig(position_strategy="gapped")
    result = CliRunner().invoke(app, ["plan", "reader", "a", "--position-strategy", "gapped"])
    assert result.exit_code == 2 and "'gapped' is not one of 'auto'" in " ".join(result.output.split())
