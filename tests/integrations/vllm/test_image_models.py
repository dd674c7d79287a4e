"""Text in models that also take images, whose tokens have several positions (M-RoPE): those of text are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.vllm.asking import compose, difference, documents
from support.vllm.image_models import answers
from support.vllm.models import IMAGE_MODELS
from support.vllm.own import own_answer

from kvmosaic.errors import NotMovable
from kvmosaic.vllm.worker.kv_layout import require_plain_text_positions

CLOSE = 1e-4
SYSTEM, A, B, C, QUESTION = documents(7, 50, 83, 64, 131, 21)


ASKS = [
    compose(SYSTEM, chunks, QUESTION, position_strategy=strategy)
    for strategy in ("sequential", "shared")
    for chunks in ([A, B, C], [C, A], [C, A])
]


@pytest.fixture(scope="module")
def said(vllm_model):
    folders = {vllm_model(name).parent for name in IMAGE_MODELS}
    (folder,) = folders
    plain = [compose(SYSTEM, [A, B], QUESTION).plain]
    return answers(folder, {name: [*ASKS, *plain] for name in IMAGE_MODELS})


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_text_is_composed_as_in_the_text_model_of_the_same_weights(said, own_engine, name):
    """The oracle has no positions of several dimensions: it is another model class of the same weights."""
    assert said[name]["trouble"] == ""
    own = own_engine(IMAGE_MODELS[name])
    *composed, plain = said[name]["answers"]
    for ask, theirs in zip(ASKS, composed, strict=True):
        assert theirs.is_composed, theirs.report
        assert difference(theirs, own_answer(own, ask)) < CLOSE
    assert difference(plain, own_answer(own, compose(SYSTEM, [A, B], QUESTION).plain)) < CLOSE


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_their_attention_is_tested_at_startup(said, name):
    assert said[name]["tested"] == "the attention of every layer"


class Numbering:
    """A model of other positions."""

    def __init__(self, positions: Any, delta: int = 0) -> None:
        self.positions, self.delta = positions, delta

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> Any:
        assert not mm_features
        return self.positions(len(input_tokens)), self.delta


@pytest.mark.parametrize(
    "model, reason",
    [
        (object(), "does not tell the positions"),
        (Numbering(lambda n: torch.arange(n).expand(3, n) // 2), "one by one"),
        (Numbering(lambda n: torch.arange(n).expand(3, n), delta=-1), "one by one"),
        (Numbering(lambda n: torch.zeros(n)[n]), "tokens of images: IndexError"),
    ],
)
def test_other_positions_of_text_are_refused(model, reason):
    with pytest.raises(NotMovable, match=reason):
        require_plain_text_positions(model, 50)


def test_text_in_order_is_taken():
    require_plain_text_positions(Numbering(lambda n: torch.arange(n).expand(3, n)), 50)
