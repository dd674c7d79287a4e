"""What every inference engine must do: cases that run on any `InferenceEngine`, compared with a dense forward.

    @pytest.mark.parametrize("case", CASES)
    def test_conformance(case: str) -> None:
        run_case(case, open_engine(), reference)

The reference is the same model without any cache: keys rotated, masks written out, nothing shared with the engine.
Cases that need what the engine cannot do check that it says so, with the reason that its capabilities give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
import torch

from kvmosaic.engine import Engine
from kvmosaic.errors import (
    EngineStopped,
    InvalidConfig,
    InvalidPrompt,
    InvalidRepair,
    InvalidSampling,
    KVMosaicError,
    NotMovable,
    PromptTooLong,
    UnknownRequest,
)
from kvmosaic.layout import Layout, exact_spans, repaired
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.sampling import RequestOutput, SamplingParams, StructuredOutputs
from support.engines import dense_logits
from support.inference_engine import (
    Capability,
    EngineCapabilities,
    EngineRequest,
    InferenceEngine,
    capabilities_of,
)

GREEDY = {"temperature": 0, "ignore_eos": True, "repair": "none"}
SYSTEM = list(range(2, 9))
QUESTION = [5, 3, 11, 7]
DOCUMENTS = [list(range(20 + 9 * index, 20 + 9 * index + 12 + index)) for index in range(4)]


@dataclass(frozen=True)
class Reference:
    """The model without a cache."""

    model: LoadedModel
    tolerance: float = 1e-3
    """Largest difference of log probabilities."""

    def check(self, engine: InferenceEngine, prompt: Prompt, output: RequestOutput, **placing: Any) -> None:
        """Checks that every token of every answer is (as good as) the most likely one, and its log probability."""
        self.check_layout(engine.arrange(prompt, **placing), output)

    def check_layout(self, layout: Layout, output: RequestOutput) -> None:
        """The same, of a prompt that was read in this layout."""
        for answer in output.outputs:
            expected = dense_logits(self.model, layout, answer.token_ids).double().log_softmax(-1)
            best = expected.max(-1).values
            found = expected[torch.arange(len(answer.token_ids)), list(answer.token_ids)]
            assert float((best - found).max()) <= self.tolerance, (answer.token_ids, expected.argmax(-1).tolist())
            for index, logprobs in enumerate(answer.logprobs or ()):
                for token_id, logprob in logprobs.items():
                    difference = abs(logprob.logprob - float(expected[index, token_id]))
                    assert difference <= max(self.tolerance, 1e-5), "log probabilities are float32"


def params(max_tokens: int = 4, **fields: Any) -> SamplingParams:
    return SamplingParams(**{**GREEDY, "max_tokens": max_tokens, **fields})


def prompt_of(*numbers: int, question: list[int] = QUESTION, system: list[int] | None = SYSTEM) -> Prompt:
    return Prompt.from_tokens(system, [DOCUMENTS[number] for number in numbers], question)


def run(engine: InferenceEngine, requests: Iterable[EngineRequest]) -> list[RequestOutput]:
    """Steps until all of them have finished."""
    added = list(requests)
    while not all(request.is_finished for request in added):
        engine.step()
        for request in added:
            if request.error is not None:
                raise request.error
    return [request.output() for request in added]


def ask(engine: InferenceEngine, prompt: Prompt, answer: SamplingParams | None = None, **placing: Any) -> RequestOutput:
    return run(engine, [engine.add_request(prompt, answer or params(), **placing)])[0]


def plain_prompts(engine: InferenceEngine, reference: Reference) -> None:
    for length in (1, 5, 40):
        prompt = Prompt.plain([(7 * number) % 90 + 2 for number in range(length)])
        reference.check(engine, prompt, ask(engine, prompt))


def documents_in_any_order(engine: InferenceEngine, reference: Reference) -> None:
    for strategy in ("shared", "sequential"):
        for order in permutations(range(3)):
            prompt = prompt_of(*order)
            if not capabilities_of(engine).has(Capability.MOVE_KEYS) and strategy == "sequential":
                with pytest.raises(NotMovable):
                    engine.add_request(prompt, params(), position_strategy=strategy)
                continue
            output = ask(engine, prompt, position_strategy=strategy)
            reference.check(engine, prompt, output, position_strategy=strategy)


def texts_before_and_between_documents(engine: InferenceEngine, reference: Reference) -> None:
    """They see everything before them; documents see only the system segment, and are found again."""
    for strategy in ("shared", "sequential"):
        for number, order in enumerate([(0, 1, 2), (2, 0, 1)]):
            prompt = prompt_of(*order)
            texts = [Segment(SegmentKind.TEXT, (60 + number + place, 70, 71)) for place in range(3)]
            system, *chunks, question = prompt.segments
            placed = replace(prompt, segments=(system, texts[0], chunks[0], texts[1], *chunks[1:], texts[2], question))
            if not capabilities_of(engine).has(Capability.TEXTS):
                with pytest.raises(InvalidPrompt, match=capabilities_of(engine).missing[Capability.TEXTS]):
                    engine.add_request(placed, params())
                continue
            if not capabilities_of(engine).has(Capability.MOVE_KEYS):
                with pytest.raises(NotMovable):
                    engine.add_request(placed, params(), position_strategy=strategy)
                continue
            output = ask(engine, placed, position_strategy=strategy)
            reference.check(engine, placed, output, position_strategy=strategy)
            reused = [segment for segment in output.reuse.segments if segment.kind == "chunk" and segment.reused_tokens]
            assert len(reused) == (0 if number == 0 and strategy == "shared" else 3), output.reuse


def cached_documents_are_reported(engine: InferenceEngine, reference: Reference) -> None:
    ask(engine, prompt_of(0, 1))
    again = ask(engine, prompt_of(1, 0, question=[9, 4]))
    chunks = [segment for segment in again.reuse.segments if segment.kind == "chunk"]
    assert [segment.num_tokens for segment in chunks] == [len(DOCUMENTS[1]), len(DOCUMENTS[0])]
    assert all(segment.reused_tokens == segment.num_tokens for segment in chunks), again.reuse
    new = ask(engine, prompt_of(2, 0))
    first, second = (segment for segment in new.reuse.segments if segment.kind == "chunk")
    assert first.reused_tokens == 0 and second.reused_tokens == second.num_tokens
    assert new.reuse.num_tokens == len(new.prompt_token_ids)


def cold_equals_warm(engine: InferenceEngine, reference: Reference) -> None:
    prompt = prompt_of(3, 1, question=[8, 8, 2])
    cold, warm = ask(engine, prompt), ask(engine, prompt)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    reference.check(engine, prompt, warm)


def documents_without_context(engine: InferenceEngine, reference: Reference) -> None:
    if not capabilities_of(engine).has(Capability.MOVE_KEYS):
        return
    prompt = prompt_of(0, 2)
    output = ask(engine, prompt, chunk_context="none")
    reference.check(engine, prompt, output, chunk_context="none")
    other = prompt_of(0, 2, system=[60, 61, 62])
    warm = ask(engine, other, chunk_context="none")
    assert all(segment.reused_tokens for segment in warm.reuse.segments if segment.kind == "chunk")
    reference.check(engine, other, warm, chunk_context="none")


def documents_with_companions(engine: InferenceEngine, reference: Reference) -> None:
    """Each is computed after as many as there are documents before it, and a copy serves its place."""
    if not capabilities_of(engine).has(Capability.MOVE_KEYS):
        return
    for number, order in enumerate([(0, 1, 2), (3, 1, 2)]):
        prompt = replace(prompt_of(*order), companions=((60, 61, 62), (63, 64)))
        for strategy in ("shared", "sequential"):
            placing = {"position_strategy": strategy, "chunk_context": "companions"}
            try:
                output = ask(engine, prompt, **placing)
            except InvalidConfig as error:
                assert "inside vLLM choose 'system' or 'none'" in str(error)
                return
            reference.check(engine, prompt, output, **placing)
            known = [bool(segment.reused_tokens) for segment in output.reuse.segments if segment.kind == "chunk"]
            assert known == [strategy == "sequential" or (number == 1 and place > 0) for place in range(3)]
    if isinstance(engine, Engine):
        prompt = replace(prompt_of(1, 3, 2), companions=prompt.companions, documents_order="any")
        output = ask(engine, prompt, **placing)
        assert "the cache chose the order of documents" in output.reuse.composition
        assert [segment.computed_tokens for segment in output.reuse.segments if segment.kind == "chunk"] == [0] * 3
        in_this_order = replace(prompt_of(3, 1, 2), companions=prompt.companions)
        reference.check(engine, in_this_order, output, **placing)


def requests_together_equal_requests_alone(engine: InferenceEngine, reference: Reference) -> None:
    prompts = [prompt_of(0, 1), prompt_of(1, 0, 2, question=[4]), Prompt.plain([5, 6, 7, 8]), prompt_of(3)]
    together = run(engine, [engine.add_request(prompt, params(6)) for prompt in prompts])
    for prompt, output in zip(prompts, together, strict=True):
        reference.check(engine, prompt, output)
        assert len(output.outputs[0].token_ids) == 6 and output.outputs[0].finish_reason == "length"


def forks(engine: InferenceEngine, reference: Reference) -> None:
    if refused(engine, Capability.FORK, params(n=3)):
        return
    prompt = prompt_of(1, 2)
    output = ask(engine, prompt, params(n=3, temperature=1.0, top_k=1))
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    reference.check(engine, prompt, output)


def log_probabilities(engine: InferenceEngine, reference: Reference) -> None:
    if refused(engine, Capability.LOGPROBS, params(logprobs=2)):
        return
    prompt = prompt_of(0, 3)
    output = ask(engine, prompt, params(logprobs=2))
    assert all(len(each) >= 2 for each in output.outputs[0].logprobs or ()) and output.outputs[0].logprobs
    reference.check(engine, prompt, output)
    biased = ask(engine, prompt, params(logit_bias={9: 100}))
    assert set(biased.outputs[0].token_ids) == {9}


def structured_output(engine: InferenceEngine, reference: Reference) -> None:
    refused(engine, Capability.STRUCTURED_OUTPUT, params(structured_outputs=StructuredOutputs(choice=["yes", "no"])))


def rolling_windows(engine: InferenceEngine, reference: Reference) -> None:
    endless = params(40, window_tokens=8, sink_tokens=2)
    if not refused(engine, Capability.ROLLING_WINDOW, endless):
        output = ask(engine, Prompt.plain(list(range(2, 30))), endless)
        assert len(output.outputs[0].token_ids) == 40


def repairs(engine: InferenceEngine, reference: Reference) -> None:
    """A document repaired to its last token is what it would be in an ordinary prompt."""
    everything = max(map(len, DOCUMENTS))
    repaired = params(repair=f"first({everything})")
    if refused(engine, Capability.REPAIR, repaired) or not capabilities_of(engine).has(Capability.MOVE_KEYS):
        return
    prompt = prompt_of(0, 1)
    output = ask(engine, prompt, repaired, position_strategy="sequential")
    plain = Prompt.plain([token for segment in prompt.segments for token in segment.token_ids or ()])
    reference.check(engine, plain, output)


def documents_that_overlap_at_their_own_offsets(engine: InferenceEngine, reference: Reference) -> None:
    """A repaired token of a document sees one that ends behind it."""
    for offsets in ((9, 12), (12, 9), (8, 8)):
        system, *chunks, question = prompt_of(3, 1).segments
        placed = [replace(chunk, position_offset=offset) for chunk, offset in zip(chunks, offsets, strict=True)]
        prompt = Prompt((system, *placed, question))
        try:
            layout = engine.arrange(prompt, position_strategy="absolute")
        except InvalidConfig as error:
            assert "choose 'auto', 'sequential' or 'shared'" in str(error)
            return
        for count in (0, 4, 99):
            answer = params(repair=f"first({count})" if count else "none")
            if count and refused(engine, Capability.REPAIR, answer):
                return
            opened = set(range(1, len(layout.spans) - 1)) - exact_spans(layout)
            chosen = {index: range(min(count, layout.spans[index].num_tokens)) for index in opened}
            try:
                output = ask(engine, prompt, answer, position_strategy="absolute")
            except InvalidRepair as error:
                assert any(layer.mask.kind != "full" for layer in reference.model.layers), (
                    "no mask hides later positions"
                )
                assert "use position_offsets that do not overlap" in str(error)
                continue
            reference.check_layout(repaired(layout, chosen), output)


def warm_up(engine: InferenceEngine, reference: Reference) -> None:
    prompt = prompt_of(2, 3, system=[70, 71])
    if not capabilities_of(engine).has(Capability.WARM_UP):
        with pytest.raises(KVMosaicError):
            engine.add_warm_up(prompt)
        return
    run(engine, [engine.add_warm_up(prompt)])
    output = ask(engine, prompt)
    assert all(segment.reused_tokens == segment.num_tokens for segment in output.reuse.segments[1:-1])
    reference.check(engine, prompt, output)
    with pytest.raises(InvalidPrompt):
        engine.add_warm_up(Prompt.plain([1, 2, 3]))


def salts_share_nothing(engine: InferenceEngine, reference: Reference) -> None:
    prompt = Prompt.from_tokens(SYSTEM, [[44, 45, 46, 47] * 5], QUESTION)
    ask(engine, prompt)
    salted = Prompt(prompt.segments, salt="another")
    output = ask(engine, salted)
    assert output.reuse.reused_tokens == 0, output.reuse
    reference.check(engine, salted, output)


def an_aborted_request_leaves_nothing(engine: InferenceEngine, reference: Reference) -> None:
    request = engine.add_request(prompt_of(0), params(50), request_id="going")
    with pytest.raises(InvalidPrompt):
        engine.add_request(prompt_of(0), params(), request_id="going")
    engine.step()
    engine.abort("going")
    assert request.is_finished
    assert not engine.has_unfinished_requests
    with pytest.raises(UnknownRequest):
        engine.abort("going")
    prompt = prompt_of(0, 2)
    reference.check(engine, prompt, ask(engine, prompt))


def refused_requests_change_nothing(engine: InferenceEngine, reference: Reference) -> None:
    limits = capabilities_of(engine)
    ask(engine, prompt_of(1))
    if limits.max_positions is not None:
        with pytest.raises(PromptTooLong):
            engine.add_request(Prompt.plain([3] * (limits.max_positions + 1)), params())
    with pytest.raises(InvalidConfig):
        engine.add_request(prompt_of(0), params(), position_strategy="diagonal")
    with pytest.raises(InvalidPrompt):
        engine.add_request(prompt_of(0), params(), priority=1_000)
    assert not engine.has_unfinished_requests
    output = ask(engine, prompt_of(1))
    assert output.reuse.segments[1].reused_tokens == len(DOCUMENTS[1])


def a_closed_engine_refuses(engine: InferenceEngine, reference: Reference) -> None:
    engine.add_request(prompt_of(0), params(50))
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests
    with pytest.raises(EngineStopped):
        engine.add_request(prompt_of(0), params())


def refused(engine: InferenceEngine, capability: Capability, wish: SamplingParams) -> bool:
    """Whether an engine lacks a capability; then it must say so, with its reason."""
    limits: EngineCapabilities = capabilities_of(engine)
    if limits.has(capability):
        return False
    with pytest.raises((InvalidSampling, InvalidRepair, NotMovable)) as error:
        engine.add_request(prompt_of(0), wish)
    assert limits.missing[capability] in str(error.value)
    assert not engine.has_unfinished_requests
    return True


CASES: dict[str, Callable[[InferenceEngine, Reference], None]] = {
    case.__name__: case
    for case in (
        plain_prompts,
        documents_in_any_order,
        texts_before_and_between_documents,
        cached_documents_are_reported,
        cold_equals_warm,
        documents_without_context,
        documents_with_companions,
        requests_together_equal_requests_alone,
        forks,
        log_probabilities,
        structured_output,
        rolling_windows,
        repairs,
        documents_that_overlap_at_their_own_offsets,
        warm_up,
        salts_share_nothing,
        an_aborted_request_leaves_nothing,
        refused_requests_change_nothing,
        a_closed_engine_refuses,
    )
}


_OF_ALL = ("documents_in_any_order", "documents_with_companions", "texts_before_and_between_documents", "repairs")


def each_case(settings: Iterable[Any]) -> list[Any]:
    """The parameters `case, setting`: all cases of the first setting, a few of the others; the rest is slow."""
    return [
        pytest.param(case, setting, marks=() if number == 0 or case in _OF_ALL else pytest.mark.slow)
        for number, setting in enumerate(settings)
        for case in CASES
    ]


def run_case(name: str, engine: InferenceEngine, reference: Reference) -> None:
    """Runs one case on an engine with an empty cache."""
    assert isinstance(engine, InferenceEngine)
    CASES[name](engine, reference)
    assert name == a_closed_engine_refuses.__name__ or not engine.has_unfinished_requests
