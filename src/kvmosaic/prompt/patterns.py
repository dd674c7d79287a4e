"""Patterns of documents in text: how well-known applications write retrieved documents into a message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from kvmosaic.errors import InvalidConfig
from kvmosaic.prompt.found_documents import PASTED, DocumentFinder, FoundDocument, TextSearch
from kvmosaic.prompt.splits import fenced_blocks

MAX_PATTERN_CHARACTERS = 1_000
PATTERN_SECONDS = 0.1
"""Timeout of a pattern of one's own in one text."""

_NO_SPACE = re.compile(r"\S")
_EMPTY_LINE = re.compile(r"\n[ \t]*\n")


@dataclass(frozen=True, slots=True)
class TaggedPattern:
    """Documents between an opening and a closing tag.

    The first closing tag after an opening one ends the document. So whatever a document holds, tags included, it can
    only shorten itself.
    """

    name: str
    opening: re.Pattern[str]
    """A group "name" is the document's name."""
    closing: re.Pattern[str]
    closes_at_end: bool = False
    """Whether the end of the text closes the last one, too."""

    def find(self, text: str) -> Iterator[FoundDocument]:
        """The documents in a text, in order."""
        opened = self.opening.search(text)
        while opened is not None:
            closed = self.closing.search(text, opened.end())
            if closed is None and not self.closes_at_end:
                return
            end = len(text) if closed is None else closed.start()
            yield FoundDocument(opened.end(), end, f"pattern {self.name}", opened.groupdict().get("name"))
            opened = None if closed is None else self.opening.search(text, closed.start())


@dataclass(frozen=True, slots=True)
class RegionPattern:
    """Documents one after the other between two texts, separated by empty lines.

    The last closing text ends the region: if a document holds it, too, nothing changes.
    """

    name: str
    opening: re.Pattern[str]
    closings: tuple[str, ...]
    """Texts after the region; the first one that is found counts. `{line}` is the group "line" of the opening."""
    closes_at_end: bool = False
    """Whether the region may go on to the end of the text."""

    def find(self, text: str) -> Iterator[FoundDocument]:
        """The documents in a text, in order."""
        opened = self.opening.search(text)
        if opened is None:
            return
        line = opened.groupdict().get("line") or ""
        ends = (text.rfind(closing.replace("{line}", line), opened.end()) for closing in self.closings)
        end = next((end for end in ends if end >= 0), len(text) if self.closes_at_end else -1)
        if end < 0:
            return
        start = opened.end()
        for between in _EMPTY_LINE.finditer(text, start, end):
            yield FoundDocument(start, between.start(), f"pattern {self.name}")
            start = between.end()
        yield FoundDocument(start, end, f"pattern {self.name}")


@dataclass(frozen=True, slots=True)
class MarkedPattern:
    """Documents that begin with marks of one kind, with numbers from 0 or 1 or without: `[1] …`, `Source: a.txt`.

    The next mark ends a document, an empty line after some text the last one.
    """

    name: str
    opening: re.Pattern[str]
    """The groups "before", "number" and "after", the same for all but for the number; or "before" and "name"."""
    min_characters: int = 0
    """Of each document: marks that short items have, too, open none."""
    min_documents: int = 2

    def find(self, text: str) -> Iterator[FoundDocument]:
        """The documents in a text, in order; none if there are fewer marks than there must be."""
        marks: list[re.Match[str]] = []
        kind, following = None, 0
        for each in self.opening.finditer(text):
            number, of_kind = self._read(each)
            is_next = number == following if marks else number <= 1
            if is_next and (of_kind == kind or not marks):
                marks.append(each)
                kind, following = of_kind, number + ("number" in self.opening.groupindex)
        if len(marks) < self.min_documents:
            return
        begin = _NO_SPACE.search(text, marks[-1].end())
        last = _EMPTY_LINE.search(text, begin.start()) if begin else None
        ends = [*(each.start() for each in marks[1:]), last.start() if last else len(text)]
        if any(end - mark.end() < self.min_characters for mark, end in zip(marks, ends, strict=True)):
            return
        for mark, end in zip(marks, ends, strict=True):
            yield FoundDocument(mark.end(), end, f"pattern {self.name}", mark.groupdict().get("name"))

    def _read(self, mark: re.Match[str]) -> tuple[int, tuple[str | None, str | None]]:
        """Its number, 0 for all if they have none, and what it is like."""
        groups = mark.groupdict()
        return int(groups.get("number") or 0), (groups["before"], groups.get("after"))


TemplatePattern = TaggedPattern | RegionPattern | MarkedPattern
_NUMBERED, _HEADED = "Document|Source|Passage|Result|Chunk", "Source|File|Filename|Title|Document|URL"
"""Words before numbers, and before names."""
PATTERNS: Mapping[str, TemplatePattern] = {
    pattern.name: pattern
    for pattern in (
        TaggedPattern(
            "open-webui",
            re.compile(r'<source id="[^"<>\n]{0,256}"(?: name="(?P<name>[^"<>\n]{0,1024})")?[^<>\n]{0,2048}>'),
            re.compile(r"</source>"),
        ),
        TaggedPattern(
            "anthropic",
            re.compile(
                r"(?:<document(?: [^<>\n]{0,2048})?>\s{0,16})?(?:<source>(?P<name>[^<>\n]{1,1024})</source>\s{0,16})?"
                r"<document_content>"
            ),
            re.compile(r"</document_content>"),
        ),
        TaggedPattern(
            "document-tags",
            re.compile(r"<(?:document|doc|passage|chunk|excerpt)(?: [^<>\n]{0,2048})?>(?!\s{0,16}<)"),
            re.compile(r"</(?:document|doc|passage|chunk|excerpt)>"),
        ),
        TaggedPattern(
            "anythingllm", re.compile(r"\[CONTEXT [0-9]{1,6}\]:\n"), re.compile(r"\n\[END CONTEXT [0-9]{1,6}\]")
        ),
        TaggedPattern(
            "ragflow",
            re.compile(r"\nID: [^\n]{1,256}\n(?:├── [^\n]{0,2048}\n){0,16}└── Content:\n"),
            re.compile(r"\n-{6}(?:\n|$)|\nThe above is the knowledge base"),
            closes_at_end=True,
        ),
        RegionPattern(
            "llamaindex",
            re.compile(
                r"(?:Context information is below\.|context information below to assist the user\.|"
                r"more context below\.)\n(?P<line>-{10,40})\n"
            ),
            ("\n{line}\nGiven the", "\n{line}"),
        ),
        RegionPattern(
            "langchain",
            re.compile(
                r"Use the following pieces of (?:retrieved )?context to answer (?:[^\n]{1,256}\n"
                r"(?:If you don't know [^\n]{1,512}\n)?(?:-{16}\n|\n)"
                r"|[^\n]{1,768}\nQuestion:[^\n]{0,4096}\nContext:[ \t]?)"
            ),
            ("\n\nQuestion: ", "\nAnswer:"),
            closes_at_end=True,
        ),
        RegionPattern("context-tags", re.compile(r"<(?:context|documents)>\n"), ("\n</context>", "\n</documents>")),
        RegionPattern(
            "headings",
            re.compile(r"(?:^|\n)[ \t]{0,64}(?:Context|Documents|Sources|Passages):[ \t]{0,64}"),
            ("\n\nQuestion:", "\nQuestion:", "\nQuery:", "\nAnswer:", "Question:", "Query:", "Answer:"),
        ),
        MarkedPattern(
            "numbered",
            re.compile(
                r"(?:(?<=\n)|^)(?P<before>#{0,6}[ \t]{0,4}"
                rf"(?:\[|(?:{_NUMBERED})[ \t]{{1,4}}[\[(#]?))"
                r"(?P<number>[0-9]{1,4})(?P<after>\]?\)?[:.]?)(?=\s)"
            ),
        ),
        MarkedPattern(
            "list",
            re.compile(r"(?:(?<=\n)|^)(?P<before>[ \t]{0,4})(?P<number>[0-9]{1,4})(?P<after>[.)])[ \t]"),
            min_characters=100,
        ),
        MarkedPattern(
            "headed",
            re.compile(
                rf"(?:(?<=\n)|^)(?P<before>#{{0,6}}[ \t]{{0,4}}(?:{_HEADED}):[ \t]{{1,4}})"
                r"(?P<name>[^\n]{1,256})\n"
            ),
        ),
        TaggedPattern(
            "json",
            re.compile(
                r'(?:"(?:text|content|page_content|body|snippet)"\s{0,8}:\s{0,8}|(?<=[\[,])\s{0,8}(?="[^"\n]{99}))"'
            ),
            re.compile(r'(?<!\\)(?:\\\\)*"'),
        ),
    )
}
"""Templates of applications, by name."""
_REGIONS = frozenset(f"pattern {name}" for name, pattern in PATTERNS.items() if isinstance(pattern, RegionPattern))


@dataclass(frozen=True, slots=True)
class TemplatePatterns:
    r"""One of several patterns: the one that opens first in a text, since a document may quote any other.

    Where a region opens, and a tag right after that, the tag counts: `<context>\\n<source id="1">`. So do several
    documents in a region that has no empty line: `Context: [{"text": …`.
    """

    patterns: tuple[TemplatePattern, ...]

    def find(self, text: str) -> list[FoundDocument]:
        """The documents in a text, in order."""
        opened = [(found, pattern) for pattern in self.patterns if (found := pattern.opening.search(text))]
        opened.sort(key=lambda each: each[0].start())
        for found, pattern in opened:
            if isinstance(pattern, RegionPattern):
                first = _NO_SPACE.search(text, found.end())
                inner = (tag for tag in opened if first and tag[0].start() == first.start())
                pattern = next((tag for _, tag in inner if isinstance(tag, TaggedPattern)), pattern)
            if documents := list(pattern.find(text)):
                return self._inside(documents[0], text) if len(documents) == 1 else documents
        return []

    def _inside(self, whole: FoundDocument, text: str) -> list[FoundDocument]:
        """The documents that marks or quotes separate in the only one of a region, if there are several."""
        inner = text[whole.start : whole.end]
        for pattern in self.patterns if whole.origin in _REGIONS else ():
            if not isinstance(pattern, RegionPattern) and len(documents := list(pattern.find(inner))) > 1:
                start = whole.start
                return [replace(each, start=each.start + start, end=each.end + start) for each in documents]
        return [whole]


class OwnPattern:
    """Documents that a regular expression of the operator finds: its group "text", or all of a match."""

    def __init__(self, pattern: str) -> None:
        """Compiles a regular expression.

        Raises:
            InvalidConfig: it cannot be read, or matches an empty text.
        """
        import regex

        self.pattern = pattern
        if not isinstance(pattern, str) or not 1 <= len(pattern) <= MAX_PATTERN_CHARACTERS:
            raise InvalidConfig(
                f"document_pattern is {pattern!r:.80}; it is a regular expression of at most {MAX_PATTERN_CHARACTERS} "
                'characters, with a group "text": "(?s)<doc>(?P<text>.*?)</doc>"'
            )
        try:
            self._compiled: Any = regex.compile(pattern)
            is_empty = self._compiled.match("") is not None
        except (regex.error, ValueError, RecursionError, OverflowError) as error:
            raise InvalidConfig(f"document_pattern={pattern!r:.80} cannot be read: {error}") from None
        if is_empty:
            raise InvalidConfig(f"document_pattern={pattern!r:.80} matches an empty text, so it finds nothing")
        self._group = "text" if "text" in self._compiled.groupindex else 0
        self._has_name = "name" in self._compiled.groupindex

    def find(self, text: str) -> Iterator[FoundDocument]:
        """The documents in a text, in order.

        Raises:
            InvalidConfig: the pattern takes too long in this text.
        """
        place = 0
        try:
            for match in self._compiled.finditer(text, timeout=PATTERN_SECONDS):
                start, end = match.span(self._group)
                if place <= start < end:
                    yield FoundDocument(start, end, "document_pattern", match["name"] if self._has_name else None)
                    place = end
        except TimeoutError:
            raise InvalidConfig(
                f"document_pattern={self.pattern!r:.80} takes more than {PATTERN_SECONDS} s in this text; write one "
                "without nested repetitions"
            ) from None


class PastedBlocks:
    """Files and fenced blocks that a user, or the program that writes for one, has pasted into a message."""

    _FILE = TaggedPattern(
        PASTED,
        re.compile(
            r"<(?:file|file_content|attachment|attached_file)"
            r'(?: [^<>\n]{0,256}?(?:path|name|filename|id)="(?P<name>[^"<>\n]{1,1024})")?(?: [^<>\n]{0,1024})?>'
        ),
        re.compile(r"</(?:file|file_content|attachment|attached_file)>"),
    )

    def find(self, text: str) -> list[FoundDocument]:
        """The documents in a text, in order; of overlapping ones the first."""
        found = [replace(each, origin=PASTED) for each in self._FILE.find(text)]
        found += [FoundDocument(start, end, PASTED) for start, end in zip(*fenced_blocks(text), strict=True)]
        found.sort(key=lambda each: each.start)
        ends = accumulate((each.end for each in found), max, initial=0)
        return [each for each, end in zip(found, ends, strict=False) if each.start >= end]


FindDocuments = tuple[str, ...]
"""Ways of finding documents: "auto", "agents", "stored", "patterns", or names of patterns."""
ONLY_AUTO: FindDocuments = ("auto",)
_IN_CHATS = frozenset({"auto", "agents"})
HINTS = (
    "<source id=", "<document", "<doc", "<passage", "<chunk", "<excerpt", "[CONTEXT ", "── Content:",
    "ontext information ", "more context below.", "Use the following pieces of ",
)  # fmt: skip
"""One of these, or a mark, is in every text in which `auto` finds documents, unless a pattern of one's own does."""
MARK_HINT = re.compile(rf"(?:\[|(?:{_NUMBERED})(?: |\\t){{1,4}}[\[(#]?)[01](?![0-9])|(?:{_HEADED}):(?: |\\t)".encode())
"""The first mark of documents, in the JSON of a body."""
_AUTO: dict[str, TemplatePattern] = {
    name: replace(each, min_characters=200, min_documents=3) if isinstance(each, MarkedPattern) else each
    for name, each in PATTERNS.items()
    if name not in ("context-tags", "headings", "list", "json")
}
"""What `auto` finds, which other texts hardly have: marks count before at least three long documents."""


def read_find_documents(value: object) -> FindDocuments:
    """Reads the setting `find_documents`.

    Args:
        value: names, separated by commas or in a list: "auto" (templates that nothing else looks like), "patterns"
            (all of `PATTERNS`), names of patterns, "agents" (results of tools, and long blocks that a user has pasted),
            "stored" (stored documents are searched in the text); "" or "none": documents are not searched.

    Raises:
        InvalidConfig: anything else.
    """
    names: Any = value.split(",") if isinstance(value, str) else value
    known = ("auto", "agents", "patterns", "stored", *PATTERNS)
    is_list = isinstance(names, list | tuple) and len(names) <= len(known)
    if is_list and all(isinstance(name, str) for name in names):
        said = tuple(dict.fromkeys(name.strip() for name in names))
        if said in ((), ("",), ("none",)):
            return ()
        if all(name in known for name in said):
            return said
    raise InvalidConfig(
        f"find_documents is {value!r:.80}; choose 'none', or some of {', '.join(known)}, separated by commas"
    )


def document_finder(names: FindDocuments, own_pattern: str | None, stored: TextSearch | None = None) -> DocumentFinder:
    """The finder for what `find_documents` chooses; `auto` and `agents` search conversations, and no other texts.

    Args:
        names: the choice; without any, nothing is found.
        own_pattern: goes first with "auto" and "patterns".
        stored: searches stored documents; where they overlap with what a pattern finds, they count.
    """
    is_auto, are_all = "auto" in names, "patterns" in names
    searches = (stored,) if stored is not None and "stored" in names else ()
    named: dict[str, TemplatePattern] = {name: PATTERNS[name] for name in PATTERNS if name in names or are_all}
    chosen = tuple(((_AUTO if is_auto else {}) | named).values())
    own = (OwnPattern(own_pattern),) if own_pattern and (is_auto or are_all) else ()
    templates = (TemplatePatterns(chosen),) if chosen else ()
    pasted = PastedBlocks() if "agents" in names else None
    return DocumentFinder((*searches, *own, *templates), is_for_chats=always_fits(names), pasted=pasted)


def always_fits(names: FindDocuments) -> bool:
    """Whether what these names find stays text where it cannot be a document."""
    return _IN_CHATS.issuperset(names)
