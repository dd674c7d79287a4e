"""Advice on lost reuse: why documents were computed that could have been cache hits, and what to set.

A request that computes a document again says why (`miss` of its segments). Where the same reason costs a tenant reuse
again and again, there is advice: in the reuse report, once in the log, on the page, and as a metric by reason.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.prompt.found_documents import FoundDocument
from kvmosaic.prompt.patterns import TaggedPattern, document_finder
from kvmosaic.prompt.text_pieces import common_length

if TYPE_CHECKING:
    from kvmosaic.sampling.reuse import MissReason, ReuseReport, SegmentReuse

logger = logging.getLogger(__name__)

LostReason = Literal[
    "system_text", "evicted", "white_space", "counter", "order", "unmarked", "edited_history", "other_replica"
]
LOST_REASONS: Final[tuple[str, ...]] = get_args(LostReason)
"""Why tokens were computed that could have been cache hits: values of the metric's label `reason`."""
_LOST: Mapping[str, LostReason] = {
    "other_system_text": "system_text",
    "evicted": "evicted",
    "white_space": "white_space",
    "counter": "counter",
}

MIN_REQUESTS = 3
"""Requests that must lose reuse for one reason before there is advice."""
MIN_FRACTION = 0.05
"""Fraction of the tenant's prompt tokens that must be lost for it."""
MAX_TENANTS = 256
_MAX_KNOWN = 4_096
_MAX_NAMED = 64
_MAX_CHANGES = 32
_MIN_PREAMBLE_TOKENS = 4
"""A shorter beginning is hardly more than what the chat template writes before a system text."""
_MAX_CHARACTERS = 2**16
"""Characters of a text that are looked at."""
_MIN_UNMARKED_TOKENS = 64
_MAX_COMPARED = 4_096
"""Tokens of system texts, and characters of named documents, that are compared with those before."""
_NUMBERS = re.compile(r"\d+")
_MARK = re.compile(r"<\|[^|<>\n]{1,40}\|>|\[/?INST\]|(?:(?<=\n)|^)(?:User|Human|USER): ?")
"""What a chat template writes before a text: the text begins a line."""
_LONG_LINE = re.compile(r"(?:(?<=\n)|^)[-*• \t]{0,8}(?P<text>[^\n]{100,})")
_MIN_LONG_LINES = 3
_STORED = re.compile(r" \[stored [0-9]+\]| \([0-9]+/[0-9]+\)\Z")
"""What labels of stored documents and of parts add to a name."""
_ANY_PATTERN = document_finder(("patterns",), None)
_TOOL_RESULTS = TaggedPattern(
    "tool results",
    re.compile(
        r"<tool_response>|\[TOOL_RESULTS\]|<\|start_header_id\|>(?:ipython|tool)<\|end_header_id\|>|"
        r"<\|im_start\|>tool\b|<\|observation\|>|<｜tool▁output▁begin｜>"
    ),
    re.compile(r"</tool_response>|\[/TOOL_RESULTS\]|<\|eot_id\|>|<\|im_end\|>|<\|assistant\|>|<｜tool▁output▁end｜>"),
)
"""How chat templates write what tools returned: enough to notice it in an ordinary prompt."""


class _Known:
    """The latest values by key, at most so many."""

    def __init__(self, max_entries: int) -> None:
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()
        self._max_entries = max_entries

    def put(self, key: Hashable, value: Any = True) -> Any:
        """Sets a value; returns the one before it, or None."""
        before = self._entries.pop(key, None)
        self._entries[key] = value
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        return before


class _TenantHistory:
    """What one tenant has sent, as far as advice needs it; bounded."""

    def __init__(self) -> None:
        self.num_requests = 0
        """With documents."""
        self.num_tokens = 0
        """Of all prompts."""
        self.lost: Counter[str] = Counter()
        """Tokens, by reason."""
        self.lost_requests: Counter[str] = Counter()
        self.num_system_changes = 0
        self._shared: deque[int] = deque(maxlen=_MAX_CHANGES)
        """Leading tokens that system texts share with the ones before them, at the latest changes."""
        self._system: tuple[int, ...] | None = None
        self._named = _Known(_MAX_NAMED)
        self._by_white_space = _Known(_MAX_KNOWN)
        self._by_counter = _Known(_MAX_KNOWN)
        self._orders = _Known(_MAX_KNOWN)
        self._questions = _Known(_MAX_KNOWN)
        self._unmarked = _Known(_MAX_KNOWN)
        self._told: set[str] = set()
        """What a reply has said at once, and not only after several requests."""

    def note_system(self, segment: Segment) -> None:
        """Compares a system text with the one before it."""
        tokens = (segment.token_ids or ())[:_MAX_COMPARED] if segment.kind is SegmentKind.SYSTEM else ()
        if self._system is not None and tokens != self._system:
            self.num_system_changes += 1
            self._shared.append(common_length(tokens, self._system))
        self._system = tokens

    @property
    def common_tokens(self) -> int:
        """Leading tokens that its latest system texts share; a rare one of another kind does not count."""
        usual = median_low(self._shared or (0,))
        return min((shared for shared in self._shared if 2 * shared >= usual), default=0)

    def miss_of(self, segment: Segment, salt: str) -> tuple[MissReason, str]:
        """Why a document that is not in the cache is missed, and a remark."""
        text = (segment.text or "")[:_MAX_CHARACTERS]
        if not text:
            return "never_seen", ""
        spaced = " ".join(text.split())
        exact = hash(text)
        alike = self._earlier(self._by_white_space, hash((salt, spaced)), exact)
        counted = self._earlier(self._by_counter, hash((salt, _NUMBERS.sub("0", spaced))), exact)
        beginning = text[:_MAX_COMPARED]
        name = _STORED.sub("", segment.name or "")
        before = self._earlier(self._named, (salt, name, segment.part), (exact, beginning)) if name else None
        if exact in (alike, counted):
            return "never_seen", ""  # the text itself: as part of another, or so long ago that nothing is known
        if alike is not None:
            return "white_space", "a document was seen that differs in white space only"
        if counted is not None:
            return "counter", "a document was seen that differs in numbers only"
        if before is not None and before[0] != exact:
            place = common_length(before[1], beginning)
            where = f"at character {place}: {text[place : place + 24]!r}"
            where = where if place < _MAX_COMPARED else f"after character {place}"
            return "changed_text", f"as the prompt writes it, its text changed {where}"
        return "never_seen", ""

    def _earlier(self, known: _Known, key: Hashable, value: Any) -> Any:
        """Sets a value; returns the one before it, unless that is of this request: parts may be alike."""
        number, before = known.put(key, (self.num_requests, value)) or (None, None)
        return None if number == self.num_requests else before

    def history_loss(self, chunks: Sequence[Segment], question: Segment, reuse: SegmentReuse) -> LostReason | None:
        """Why earlier turns after these documents were computed again, if they were."""
        texts = [hash(chunk.text or chunk.token_ids) for chunk in chunks]
        order = hash(tuple(texts))
        before = self._orders.put(hash(frozenset(texts)), order)
        is_known = self._questions.put(hash((question.token_ids or ())[:16])) is not None
        if not question.history_tokens or reuse.reused_tokens:
            return None
        if before is not None and before != order:
            return "order"
        return None if is_known else "other_replica"

    def note_unmarked(
        self, segment: Segment, reuse: SegmentReuse, reads_in_full: Callable[[Sequence[int]], bool]
    ) -> tuple[Counter[LostReason], tuple[str, ...]]:
        """Computed tokens of documents that this text and an earlier one hold; and what to tell with the first one."""
        text = (segment.text or "")[:_MAX_CHARACTERS]
        lost = Counter[LostReason]()
        if reuse.computed_tokens < _MIN_UNMARKED_TOKENS or not text:
            return lost, ()
        results = list(_TOOL_RESULTS.find(text))
        text = _MARK.sub(lambda mark: "\n".rjust(len(mark[0])), text)
        found = _ANY_PATTERN.find(text)
        if results and not found:
            lost["edited_history"] = count = self._lost_of(results, text, segment, reuse)
            what = f"about {count} tokens of tool results were computed again: {_ADVICE['edited_history']}"
            return lost, (what,) if count and self._say_first("edited_history") else ()
        what, form = "", found[0].origin if found else ""
        if len(found) > 1:
            what = f"{len(found)} documents seem to be part of the text ({form}): with find_documents='patterns', "
            what += "or in the field documents, they are computed once"
        else:
            lines = [FoundDocument(*each.span("text"), "line") for each in _LONG_LINE.finditer(text)]
            if len(lines) >= _MIN_LONG_LINES:
                what, form = f"the text may hold documents: {_ADVICE['unmarked']}", "line"
            found = lines or found
        if reads_in_full([round((each.end - each.start) / len(text) * segment.num_tokens) for each in found]):
            return lost, ()
        lost["unmarked"] = self._lost_of(found, text, segment, reuse)
        is_told = what and (self._say_first(form) or (lost["unmarked"] and self._say_first(f"{form} again")))
        return lost, (what,) if is_told else ()

    def _lost_of(self, found: Sequence[FoundDocument], text: str, segment: Segment, reuse: SegmentReuse) -> int:
        """Tokens of documents that came before and are computed again, since what precedes them is not the same."""
        place = reuse.reused_tokens / segment.num_tokens * len(text)
        known = 0
        for each in found:
            is_known = self._unmarked.put(hash(text[each.start : each.end])) is not None
            known += (each.end - each.start) * (is_known and each.start >= place)
        return min(round(known / len(text) * segment.num_tokens), reuse.computed_tokens)

    def _say_first(self, reason: str) -> bool:
        """Notes that a reply says this at once; returns whether none did before."""
        is_new = reason not in self._told
        self._told.add(reason)
        return is_new

    def count(self, reason: LostReason, num_tokens: int) -> None:
        """Counts what one request lost for a reason."""
        self.lost[reason] += num_tokens
        self.lost_requests[reason] += 1

    def is_advised(self, reason: LostReason) -> bool:
        """Whether so much was lost for a reason that there is advice."""
        return self.lost_requests[reason] >= MIN_REQUESTS and self.lost[reason] >= MIN_FRACTION * self.num_tokens

    def advice(self, reason: LostReason) -> str:
        """What was lost for a reason, and what to do."""
        what = {"unmarked": " of documents in the text of messages", "edited_history": " of tool results"}.get(
            reason, ""
        )
        lost = f"{self.lost[reason]} tokens{what} computed again in {self.lost_requests[reason]} requests"
        if reason == "system_text":
            return f"{lost}: {self._system_advice()}"
        return f"{lost}: {_ADVICE[reason]}"

    def _system_advice(self) -> str:
        fraction = self.num_system_changes / max(self.num_requests - 1, 1)
        shared = self.common_tokens
        if shared < _MIN_PREAMBLE_TOKENS:
            return (
                f"system texts differ after {shared} tokens, in {fraction:.0%} of requests, and documents saw what "
                "differs; put what changes at their end, or set chunk_context='none', an approximation"
            )
        return (
            f"system texts share {shared} tokens and then differ in {fraction:.0%} of requests, and documents saw what "
            f"differs; set preamble={shared}, or mark the stable part with cache_control"
        )


_ADVICE: Mapping[str, str] = {
    "evicted": "documents left the cache before they came again; set a larger chunk_cache_size, or a tier (chunk_tier)",
    "white_space": "documents differ from earlier ones in white space only; send the same text each time",
    "counter": "documents differ from earlier ones in numbers only (an index, a score, a date); leave these numbers "
    "out of the documents' texts, or write them into the question",
    "order": "documents of a conversation came in another order than in its earlier turns, which saw them at other "
    "positions; send them in the same order, or set position_strategy='shared'",
    "unmarked": "in the field documents, or between <document> and </document>, each is computed once, wherever it is",
    "edited_history": "a history was edited before them (a turn dropped, moved or summarized); with "
    "find_documents='agents' they are computed once",
    "other_replica": "earlier turns of conversations were answered elsewhere (another replica, or before a restart); "
    "route a conversation to one replica",
}


class ReuseAdvisor:
    """Explains misses and counts lost reuse, by tenant. Used by one thread; `lost` and `advice` may be read by any."""

    def __init__(self, reads_in_full: Callable[[Sequence[int]], bool] = lambda _: False) -> None:
        """There is no advice for documents in a text that would be read in full, being of so many tokens."""
        self._reads_in_full = reads_in_full
        self.lost: Mapping[str, int] = dict.fromkeys(LOST_REASONS, 0)
        """Tokens lost since the start, by reason, of all tenants. Replaced, never changed."""
        self.advice: Mapping[str, tuple[str, ...]] = {}
        """Current advice by tenant. Replaced, never changed."""
        self._tenants: OrderedDict[str, _TenantHistory] = OrderedDict()
        self._logged: set[tuple[str, str]] = set()

    def explain(self, prompt: Prompt, reuse: ReuseReport) -> ReuseReport:
        """The report with the reasons of misses, and with advice where this request lost reuse once more."""
        if len(prompt.segments) != len(reuse.segments):
            return reuse  # one joined text, fully recomputed
        history = self._history(prompt.tenant)
        history.num_tokens += reuse.num_tokens
        lost: Counter[LostReason] = Counter()
        segments, told = list(reuse.segments), tuple[str, ...]()
        if prompt.is_plain:
            lost, told = history.note_unmarked(prompt.segments[0], segments[0], self._reads_in_full)
        elif prompt.chunks:
            history.num_requests += 1
            history.note_system(prompt.segments[0])
            for index, segment in enumerate(prompt.segments):
                if segments[index].miss is not None:
                    segments[index] = _explained(history, segment, segments[index], prompt.salt)
                    if (reason := _LOST.get(segments[index].miss or "")) is not None:
                        lost[reason] += segments[index].computed_tokens
            loss = history.history_loss(prompt.chunks, prompt.segments[-1], segments[-1])
            if loss is not None:
                lost[loss] += prompt.segments[-1].history_tokens
        return replace(reuse, segments=tuple(segments), advice=told + self._advise(prompt.tenant, history, lost))

    def _advise(self, tenant: str, history: _TenantHistory, lost: Counter[LostReason]) -> tuple[str, ...]:
        lost = Counter({reason: count for reason, count in lost.items() if count})
        if not lost:
            return ()
        self.lost = {reason: count + lost[reason] for reason, count in self.lost.items()}  # type: ignore[index]
        for reason, count in lost.items():
            history.count(reason, count)
        told: dict[LostReason, str] = {reason: history.advice(reason) for reason in lost if history.is_advised(reason)}
        for reason, text in told.items():
            if (tenant, reason) not in self._logged:
                self._logged.add((tenant, reason))
                logger.warning("lost reuse%s: %s", f" of tenant {tenant!r}" if tenant else "", text)
        if told:
            every = tuple(history.advice(reason) for reason in get_args(LostReason) if history.is_advised(reason))
            self.advice = {**self.advice, tenant: every}
        return tuple(told.values())

    def _history(self, tenant: str) -> _TenantHistory:
        history = self._tenants.pop(tenant, None) or _TenantHistory()
        self._tenants[tenant] = history
        if len(self._tenants) > MAX_TENANTS:
            gone, _ = self._tenants.popitem(last=False)
            self.advice = {name: told for name, told in self.advice.items() if name != gone}
            self._logged = {(name, reason) for name, reason in self._logged if name != gone}
        return history


def _explained(history: _TenantHistory, segment: Segment, reuse: SegmentReuse, salt: str) -> SegmentReuse:
    """A missed document with its reason; one that the cache knows nothing of is compared with earlier ones."""
    miss, remark = history.miss_of(segment, salt)
    if reuse.miss != "never_seen":
        return reuse
    return replace(reuse, miss=miss, note="; ".join(filter(None, (reuse.note, remark))))
