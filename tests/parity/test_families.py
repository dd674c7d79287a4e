"""Every architecture: composed by the engine, cold and warm, equals one dense forward in float64."""

from __future__ import annotations

import pytest
import torch
from support.engines import GREEDY, answer, build_engine, dense_logits, token_ids
from support.families import FAMILIES, build, each_family

from kvmosaic.errors import NotMovable
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

SUPPORTED = sorted(name for name, family in FAMILIES.items() if not family.is_refused)


def prompt_of(vocab_size: int) -> Prompt:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, vocab_size, (48,), generator=generator).tolist()
    return Prompt.from_tokens(tokens[:9], [tokens[9:20], tokens[20:25], tokens[25:39]], tokens[39:])


@pytest.mark.parametrize("family", each_family(SUPPORTED))
def test_composed_equals_dense_in_float64(family):
    model = LoadedModel.from_module(build(family))
    prompt = prompt_of(model.vocab_size)
    for strategy in ("shared", "sequential"):
        engine = build_engine(model, position_strategy=strategy)
        if strategy == "sequential" and not model.is_movable:
            with pytest.raises(NotMovable, match="this model does not allow that"):
                engine.add_request(prompt, GREEDY)
            engine.check_invariants()
            continue
        cold, cold_logits = answer(engine, prompt)
        warm, warm_logits = answer(engine, prompt)
        expected = dense_logits(model, arrange(prompt, strategy), token_ids(cold))
        torch.testing.assert_close(cold_logits, expected, atol=1e-10, rtol=0)
        torch.testing.assert_close(warm_logits, expected, atol=1e-10, rtol=0)
        assert all(segment.computed_tokens == 0 for segment in warm.reuse.segments[:-1])


def test_at_least_45_architectures_are_supported_and_movable():
    assert len([name for name in SUPPORTED if FAMILIES[name].is_movable]) >= 45
