"""Our own engine's answers to the same prompts: two implementations, one meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from kvmosaic import LLM, Prompt, SamplingParams
from support.vllm.asking import Answer, Ask


@dataclass(frozen=True)
class Runs:
    """A repair policy: of each chunk the tokens from start to stop, start to stop, …"""

    bounds: tuple[tuple[int, ...], ...]
    signals: ClassVar[frozenset[str]] = frozenset()

    def choose(self, chunks):
        runs = (chain(*map(range, bounds[::2], bounds[1::2])) for bounds in self.bounds)
        return [list(run) if chunk.num_open else [] for run, chunk in zip(runs, chunks, strict=True)]


def own_answer(llm: LLM, ask: Ask) -> Answer:
    """What our engine says."""
    params = SamplingParams(temperature=0, max_tokens=ask.max_tokens, logprobs=ask.logprobs, ignore_eos=True)
    how = ask.composition
    if how is not None and how.repair:
        first = isinstance(how.repair, int)
        params = replace(params, repair=f"first({how.repair})" if first else Runs(how.repair))
    if how is None:
        (output,) = llm.generate([list(ask.token_ids)], params)
    else:
        spans = how.layout(ask.token_ids).spans
        segments = tuple(span.segment for span in spans if not span.is_companion)
        prompt = Prompt(segments, companions=how.companions)
        placing = {"position_strategy": how.position_strategy, "chunk_context": how.chunk_context}
        (output,) = llm.generate([prompt], params, **placing)
    answers = output.outputs
    return Answer(
        token_ids=[list(answer.token_ids) for answer in answers],
        logprobs=[
            [{token: entry.logprob for token, entry in step.items()} for step in answer.logprobs or ()]
            for answer in answers
        ],
        num_cached_tokens=output.num_cached_tokens,
    )
