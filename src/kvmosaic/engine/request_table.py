"""Request table: the unfinished requests of an engine, and the sequences of each."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from kvmosaic.engine.request import Request
from kvmosaic.engine.sequence import Sequence
from kvmosaic.errors import InvalidPrompt, UnknownRequest
from kvmosaic.sampling import MAX_TOKENS, Answer, SamplingState

if TYPE_CHECKING:
    from kvmosaic.engine.model_runner import EngineModel


class RequestTable:
    """Unfinished requests by id, in the order in which they were added; each has one sequence per answer."""

    def __init__(self, model: EngineModel, max_positions: int | None) -> None:
        self._model = model
        self._max_positions = max_positions
        self._requests: dict[str, Request] = {}
        self._sequences: dict[str, list[Sequence]] = {}
        self._names = (f"request-{number}" for number in count())

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and self._requests.get(request.request_id) is request

    @property
    def unfinished(self) -> list[Request]:
        """The requests, in the order in which they were added."""
        return list(self._requests.values())

    def new_id(self, request_id: str | None) -> str:
        """Checks an id, or generates one.

        Raises:
            InvalidPrompt: the id is no text, or that of an unfinished request.
        """
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidPrompt(f"request_id must be a text, got {request_id!r:.80}")
        if not request_id:
            return next(name for name in self._names if name not in self._requests)
        if request_id in self._requests:
            raise InvalidPrompt(f"a request {request_id!r} is under way already; choose another request_id")
        return request_id

    def find(self, request_id: str) -> Request:
        """Returns an unfinished request.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        if request_id not in self._requests:
            raise UnknownRequest(f"no request {request_id!r} is under way; it may have finished already")
        return self._requests[request_id]

    def sequences_of(self, request: Request) -> list[Sequence]:
        """The sequences of an unfinished request."""
        return self._sequences[request.request_id]

    def add(self, request: Request) -> Sequence:
        """Adds a request; returns its first sequence."""
        sequence = self._new_sequence(request, 0)
        self._requests[request.request_id], self._sequences[request.request_id] = request, [sequence]
        return sequence

    def restart(self, request: Request) -> Sequence:
        """Replaces the first sequence of a request whose prompt was placed again."""
        sequence = self._new_sequence(request, 0)
        self._sequences[request.request_id] = [sequence]
        return sequence

    def fork(self, request: Request) -> list[Sequence]:
        """Creates the sequences of the other n - 1 answers."""
        forks = [self._new_sequence(request, index) for index in range(1, request.params.n)]
        self._sequences[request.request_id].extend(forks)
        return forks

    def remove(self, request: Request) -> list[Sequence]:
        """Removes a request; returns its sequences, none if it was removed before."""
        if request not in self:
            return []
        del self._requests[request.request_id]
        return self._sequences.pop(request.request_id)

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        model = self._model
        layout = request.repair.layout if request.is_measuring and request.repair is not None else request.layout
        room = None if self._max_positions is None else self._max_positions - layout.last.end
        if request.window is not None:
            room = MAX_TOKENS
        answer = Answer(request.params, model.tokenizer, model.eos_token_ids, index=index, max_tokens=room)
        sampling = SamplingState(
            request.params,
            request.token_ids if request.params.has_penalties else (),
            vocab_size=model.vocab_size,
            index=index,
            ending_ids=answer.rules.ending_ids,
            matcher=request.grammar.start() if request.grammar else None,
        )
        if not request.is_warm_up:
            request.answers.append(answer)
        return Sequence(request, answer, sampling)
