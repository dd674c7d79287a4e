"""Composed prompts of a running vLLM, compared with ordinary ones and with a dense forward of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvmosaic.container import available_memory
from kvmosaic.errors import InvalidConfig
from kvmosaic.layout import Layout, Span, repaired
from kvmosaic.prompt import Segment, SegmentKind
from kvmosaic.vllm.contract import FIELD, Composition
from kvmosaic.vllm.scheduler.chunk_prompts import repaired_runs

_NOISE = 4.0
"""Max difference of log-probabilities, as a multiple of the model's own noise."""
_MEAN_NOISE = 2.0
"""The same for the root mean square over many tokens."""
_MIN_DISTANCE = 1e-3
"""Difference that is allowed however small the noise is."""
_MAX_NOISE = 1.0
"""Max noise of a model of transformers that computes the same as vLLM's."""
_ANSWER_TOKENS = 8
_NUM_TEXTS = 3
"""Each way to compose is tried on so many texts: the noise of one alone differs too much from that of another."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    what: str
    compared_with: str
    found: str
    allowed: str
    passed: bool


@dataclass(frozen=True, slots=True)
class _Parts:
    """Token ids of one prompt."""

    system: list[int]
    first: list[int]
    second: list[int]
    question: list[int]

    def prompt(self, *documents: list[int]) -> list[int]:
        return [*self.system, *(token for document in documents for token in document), *self.question]


class ComposedCheck:
    """Prompts of a system text, two documents and a question, in all ways in which vLLM can compose them here."""

    def __init__(self, engine: Any, tokens: Callable[[int], Sequence[int]], reference: DenseReference | str) -> None:
        """Takes the engine, tokens of ordinary text, and the reference or why there is none."""
        size = engine.block_size
        lengths = (size // 2 + 3, size + 11, size // 2 + 5, 9)
        text = iter(tokens(_NUM_TEXTS * sum(lengths)))
        self._texts = [_Parts(*([next(text) for _ in range(length)] for length in lengths)) for _ in range(_NUM_TEXTS)]
        self._engine, self._reference = engine, reference
        self._floor = max(1e-3, 16 * torch.finfo(engine.config.model_config.dtype).eps)

    def findings(self, *, can_repair: bool, can_shift: bool) -> list[CheckResult]:
        """The results; without a reference, whether prompts are composed at all."""
        found, allowed = self._ordinary()
        kinds = self._kinds(can_repair=can_repair, can_shift=can_shift)
        composed = [self._composed(what, composition, allowed) for what, composition in kinds.items()]
        return [self._one_document(), found, *composed]

    def _kinds(self, *, can_repair: bool, can_shift: bool) -> dict[str, Composition]:
        parts = self._texts[0]
        system, first, second = len(parts.system), len(parts.first), len(parts.second)
        both = Composition(system=system, chunks=(second, first))
        companions = tuple(parts.system), tuple(parts.question)
        kinds = {
            "two documents, one moved": both,
            "two documents, the later one computed after a companion": replace(
                both, chunk_context="companions", companions=companions
            ),
        }
        if can_shift:
            kinds["two documents at shared positions"] = replace(both, position_strategy="shared")
        if can_repair:
            kinds["two documents, their first 8 tokens repaired"] = replace(both, repair=8)
            kinds["two documents, text before and between them"] = replace(
                both, system=system - 2, chunks=(second - 3, first), texts=(2, 3)
            )
        return kinds

    def _composed(self, what: str, composition: Composition, allowed: float | None) -> CheckResult:
        """Compares answers with dense forwards over the same layout, or sees whether they are composed."""
        found, ordinary = [], []
        for parts in self._texts:
            prompt = parts.prompt(parts.second, parts.first)
            output = self._engine.answer(prompt, composition, max_tokens=_ANSWER_TOKENS)
            report = (output.kv_transfer_params or {}).get(FIELD) or {}
            said = "no report" if not report else report.get("bypass") or "composed"
            if said != "composed":
                return CheckResult(what, "", said, "composed", passed=False)
            if allowed is not None:
                answered = [*prompt, *output.outputs[0].token_ids[:-1]]
                layout = composition.layout(answered)
                chosen = {index: runs[0] for index, runs in repaired_runs(layout, composition.repair).items()}
                found.append(self._distance(repaired(layout, chosen), output))
                ordinary.append(self._distance(_ordinary(answered), output))
        if allowed is None:
            return CheckResult(what, "", "composed", "composed", passed=True)
        compared_with = f"a dense forward of the same layout (of ordinary prompts: {_mean(ordinary):.2g})"
        difference = _mean(found)
        return CheckResult(what, compared_with, f"{difference:.2g}", f"{allowed:.2g}", difference <= allowed)

    def _ordinary(self) -> tuple[CheckResult, float | None]:
        """The noise of ordinary prompts, and the limit of composed ones that follows; None: nothing to compare with."""
        what, compared_with = "ordinary prompts", "a dense forward of transformers"
        if isinstance(self._reference, str):
            return CheckResult(what, compared_with, f"not compared: {self._reference}", "", passed=True), None
        distances = []
        for number, parts in enumerate(self._texts):
            for documents in ((parts.first,), (parts.second, parts.first)):
                prompt = parts.prompt(*documents)
                output = self._engine.answer(prompt, max_tokens=_ANSWER_TOKENS, cache_salt=f"ordinary {number}")
                distances.append(self._distance(_ordinary([*prompt, *output.outputs[0].token_ids[:-1]]), output))
        noise = _mean(distances)
        if not noise <= _MAX_NOISE:
            found = f"{noise:.2g}: not the same model, so nothing below is compared with it"
            return CheckResult(what, compared_with, found, "", passed=True), None
        limit = _MEAN_NOISE * noise + _MIN_DISTANCE
        return CheckResult(what, compared_with, f"{noise:.2g}", f"{_MAX_NOISE:.2g}", passed=True), limit

    def _distance(self, layout: Layout, output: Any) -> float:
        assert isinstance(self._reference, DenseReference)
        steps = [{token: each.logprob for token, each in step.items()} for step in output.outputs[0].logprobs]
        return distance(self._reference.logprobs(layout, len(steps)), steps)

    def _one_document(self) -> CheckResult:
        """Compares the likeliest next tokens of a composed prompt with those of the same tokens as an ordinary prompt.

        The limit is the model's own noise: the difference between two ordinary ways to compute the prompt, in one
        prefill and with its beginning in the prefix cache.
        """
        parts = self._texts[0]
        prompt = parts.prompt(parts.first)
        alone = Composition(system=len(parts.system), chunks=(len(parts.first),))
        composed = self._engine.answer(prompt, alone, cache_salt="composed")
        plain = self._engine.answer(prompt, cache_salt="at once")
        self._engine.answer(prompt[: self._engine.block_size + 1], cache_salt="in parts")
        noise = _apart(self._engine.answer(prompt, cache_salt="in parts"), plain)
        allowed, difference = _NOISE * noise + self._floor, _apart(composed, plain)
        compared_with = f"an ordinary prompt (its own noise: {noise:.2g})"
        return CheckResult("one document", compared_with, f"{difference:.2g}", f"{allowed:.2g}", difference <= allowed)


def load_reference(model_config: Any, num_parameters: int) -> DenseReference | str:
    """The reference of a model, or why there is none."""
    try:
        return DenseReference.load(model_config, num_parameters)
    except InvalidConfig as error:
        return str(error)


def _mean(distances: Sequence[float]) -> float:
    """Root mean square."""
    return math.sqrt(sum(each * each for each in distances) / len(distances))


def _ordinary(token_ids: Sequence[int]) -> Layout:
    return Layout((Span(Segment(SegmentKind.QUESTION, tuple(token_ids)), 0),))


def _apart(one: Any, other: Any) -> float:
    """The largest difference of the log-probabilities in both; infinite if most are of different tokens."""
    first, second = (
        {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()} for output in (one, other)
    )
    shared = first.keys() & second.keys()
    if 2 * len(shared) < len(second):
        return float("inf")
    return max((abs(first[token] - second[token]) for token in shared), default=float("inf"))


@dataclass(frozen=True, slots=True)
class DenseRows:
    """A layout as rows of one causal forward without moved keys.

        layout    system | chunk 1 | chunk 2, moved by d |              question
        rows      system | chunk 1 | system, by d later | chunk 2 there | question

    A chunk that is moved takes what it saw along: keys depend on distances only, so both together, d positions later,
    are what it was computed from. So nothing is rotated here that the check is to prove.

    token_ids, positions [T]
    mask [T, T]: True where the row token sees the column token
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor

    @classmethod
    def of(cls, layout: Layout) -> DenseRows:
        """The rows of a layout; those of its last span are the last."""
        token_ids: list[int] = []
        positions: list[int] = []
        places: dict[tuple[int, int], slice] = {}
        seen: list[tuple[slice, slice, Any]] = []

        def add(index: int, shift: int) -> slice:
            if (index, shift) in places:
                return places[index, shift]
            span = layout.spans[index]
            views = [(add(view.span, view.distance + shift), view.visibility) for view in span.views]
            rows = slice(len(token_ids), len(token_ids) + span.num_tokens)
            token_ids.extend(span.token_ids)
            computed_at = span.positions or range(span.start, span.start + span.num_tokens)
            positions.extend(position + shift for position in computed_at)
            seen.extend((rows, columns, visibility) for columns, visibility in views)
            places[index, shift] = rows
            return rows

        add(len(layout.spans) - 1, 0)
        mask = torch.zeros(len(token_ids), len(token_ids), dtype=torch.bool)
        for rows in places.values():
            mask[rows, rows] = torch.ones(rows.stop - rows.start, rows.stop - rows.start).tril().bool()
        for rows, columns, visibility in seen:
            shown = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool)
            if visibility is not None:
                shown[:, list(visibility.hidden)] = False
                if visibility.ends:
                    shown &= torch.arange(shown.shape[1]) < torch.tensor(visibility.ends)[:, None]
            mask[rows, columns] |= shown
        return cls(torch.tensor(token_ids), torch.tensor(positions), mask)


class DenseReference:
    """A model of transformers on the CPU."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def load(cls, model_config: Any, num_parameters: int) -> DenseReference:
        """Loads the model that vLLM runs, in float32 where memory allows it, else in its own dtype.

        Raises:
            InvalidConfig: not enough memory, or transformers does not load it; the message says why.
        """
        from transformers import AutoModelForCausalLM

        free = available_memory() or 0
        dtype = next(
            (each for each in (torch.float32, model_config.dtype) if num_parameters * each.itemsize < free), None
        )
        if dtype is None:
            needed = num_parameters * model_config.dtype.itemsize
            raise InvalidConfig(
                f"transformers needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
            )
        try:
            module = AutoModelForCausalLM.from_pretrained(
                model_config.model,
                revision=model_config.revision,
                trust_remote_code=model_config.trust_remote_code,
                dtype=dtype,
                attn_implementation="eager",
            )
        except Exception as error:  # another format, quantized weights, an architecture of vLLM's own
            raise InvalidConfig(f"transformers does not load it: {type(error).__name__}: {error}"[:200]) from error
        return cls(module.eval())

    @torch.inference_mode()
    def logprobs(self, layout: Layout, num_rows: int) -> Tensor:
        """[num_rows, V]: log-probabilities after each of the last tokens of a layout."""
        rows = DenseRows.of(layout)
        module = self._module
        config = module.config.get_text_config()
        mask: Any = _added(rows.mask, module.dtype)
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            is_near = rows.positions[:, None] - rows.positions < config.sliding_window
            mask = {"full_attention": mask, "sliding_attention": _added(rows.mask & is_near, module.dtype)}
        logits = module(
            rows.token_ids[None], position_ids=rows.positions[None], attention_mask=mask, use_cache=False
        ).logits
        found: Tensor = logits[0, -num_rows:].float().log_softmax(-1)
        return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, T, T]: what is added to scores."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)[None, None]


def distance(reference: Tensor, answered: Sequence[dict[int, float]]) -> float:
    """Root mean square of the differences of log-probabilities, over the tokens that an answer lists at each step."""
    pairs = zip(reference, answered, strict=True)
    apart = [float(row[token]) - value for row, step in pairs for token, value in step.items()]
    return math.sqrt(sum(each * each for each in apart) / len(apart))
