"""Cache explanation: why the documents of a prompt are found in the tiers, or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.console.cache.selection import all_entries, header_of, opened, progress_bar, secret_from, whole_entry
from kvmosaic.console.model_options import ModelOptions, open_llm
from kvmosaic.console.prompt_source import PromptSource
from kvmosaic.console.text import one_line, printable, shrinking, size_text
from kvmosaic.errors import InvalidEntry, TierError

if TYPE_CHECKING:
    from kvmosaic.cache import Key, SpanPlan
    from kvmosaic.engine import ChunkEntries
    from kvmosaic.entries import EntryHeader
    from kvmosaic.layout import ChunkContext
    from kvmosaic.llm import LLM
    from kvmosaic.prompt import Prompt
    from kvmosaic.tiers import Tier

MAX_LOOKED_AT = 100_000
"""Maximum number of entries of a tier whose headers are read, to find entries of the same text."""

_NOT_KEPT = {
    "plain": "the whole prompt is one plain segment; only documents are kept in tiers",
    "system": "only documents are kept in tiers; this is the preamble, after which they were computed",
    "text": "only documents are kept in tiers; this is computed with each request, and documents do not see it",
}
"""By kind of a segment that is no document: why no tier has it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one segment."""

    name: str
    kind: str
    num_tokens: int
    is_hit: bool
    reasons: tuple[str, ...]
    """One per tier, where there is something to report."""


def explain(opening: ModelOptions, asking: PromptSource, urls: list[str], as_json: bool) -> None:
    """Says for every segment of every prompt in which tier it is, or why in none. Nothing is computed or changed.

    Raises:
        KVMosaicError: a prompt, a document, a setting or a tier that cannot work.
    """
    console, notices = Console(), Console(stderr=True)
    documents, secret = asking.documents(), secret_from()
    with ExitStack() as stack:
        tiers = [stack.enter_context(opened(url)) for url in urls]
        llm = stack.enter_context(closing(open_llm(opening, notices)))
        headers = [list(_headers(tier, notices)) for tier in tiers]
        from kvmosaic.config import TierConfig
        from kvmosaic.engine import ChunkEntries

        config = TierConfig(chunk_codec=opening.values["chunk_codec"], chunk_secret=secret)
        entries = ChunkEntries(llm.model.fingerprint, llm.engine.runner.storages["chunk_cache"], config)
        for heading, prompt in asking.prompts(llm, documents):
            explainer = _Explainer(llm, prompt, entries, tiers, headers)
            verdicts = [explainer.verdict(index) for index in range(len(explainer.spans))]
            if as_json:
                segments = [
                    {
                        "name": each.name,
                        "kind": each.kind,
                        "tokens": each.num_tokens,
                        "hit": each.is_hit,
                        "reasons": list(each.reasons),
                    }
                    for each in verdicts
                ]
                print(json.dumps({"question": heading, "segments": segments}), flush=True)
            else:
                console.print(f"Q  {heading}", style="bold", markup=False, highlight=False)
                console.print()
                console.print(verdict_table(verdicts))
                console.print()


def verdict_table(verdicts: list[Verdict]) -> Table:
    """One row per segment."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("segment", max_width=36)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("would be", no_wrap=True)
    table.add_column("because")
    for each in verdicts:
        word = Text("loaded", style="green") if each.is_hit else Text("computed", style="yellow")
        reasons = Text("\n".join(printable(reason) for reason in each.reasons))
        table.add_row(shrinking(each.name), f"{each.num_tokens:,}", word, reasons)
    return table


def _headers(tier: Tier, notices: Console) -> Iterator[EntryHeader]:
    """Returns the headers of a tier's entries, most recently used first; skips unreadable ones."""
    infos = all_entries(tier, notices)[::-1][:MAX_LOOKED_AT]
    with progress_bar(notices) as bar:
        for info in bar.track(infos, description="looking at the entries"):
            try:
                header = header_of(tier, info.key)
            except InvalidEntry:
                continue
            if header is not None:
                yield header


class _Explainer:
    """Compares one prompt with the entries of the tiers."""

    def __init__(
        self,
        llm: LLM,
        prompt: Prompt,
        entries: ChunkEntries,
        tiers: list[Tier],
        headers: list[list[EntryHeader]],
    ) -> None:
        self._llm = llm
        self._prompt = prompt
        self._entries = entries
        self._tiers = tiers
        self._headers = headers
        config = llm.chunk_cache_config
        self.spans = self._plan(config.chunk_context, prompt.tenant)
        other: ChunkContext = "none" if config.chunk_context == "system" else "system"
        self._blind = [span.key for span in self._plan(other, prompt.tenant)]
        self._of_tenants: dict[str, list[Key]] = {}

    def verdict(self, index: int) -> Verdict:
        """Returns the outcome for one span."""
        span = self.spans[index]
        if not span.is_chunk:
            why = _NOT_KEPT.get(str(span.kind), "only documents are kept in tiers")
            return Verdict(span.name or str(span.kind), str(span.kind), span.num_tokens, False, (why,))
        reasons, is_hit = [], False
        for tier, headers in zip(self._tiers, self._headers, strict=True):
            place = f"{tier.name}: "
            try:
                found, why = self._look(index, tier)
            except TierError as error:
                found, why = False, f"it cannot be asked: {one_line(str(error), 300)}"
            if not why:
                why = self._absence(index, headers)
            reasons.append(place + why)
            is_hit |= found
        return Verdict(span.name or str(span.kind), str(span.kind), span.num_tokens, is_hit, tuple(reasons))

    def _plan(self, context: ChunkContext, tenant: str) -> tuple[SpanPlan, ...]:
        layout = self._llm.engine.arrange(self._prompt, chunk_context=context)
        return self._llm.engine.kv_cache.plan(layout, self._prompt.salt, tenant).spans

    def _start(self, index: int) -> int:
        return self._llm.engine.arrange(self._prompt).spans[index].start

    def _look(self, index: int, tier: Tier) -> tuple[bool, str]:
        """Returns whether a tier has a usable entry of the chunk, with a remark; nothing if it has none."""
        span = self.spans[index]
        try:
            entry = whole_entry(tier, span.key)
            if entry is None:
                return False, ""
            self._entries.accept(span, self._start(index))(entry)
        except InvalidEntry as error:
            return False, f"it is there, but cannot be used: {one_line(str(error), 400)}"
        return True, f"{size_text(len(entry))}, as it was written"

    def _absence(self, index: int, headers: list[EntryHeader]) -> str:
        """Describes what a tier without the chunk has instead."""
        span = self.spans[index]
        same = [header for header in headers if header.tokens == span.tokens]
        ours = [header for header in same if header.fingerprint == self._llm.model.fingerprint]
        for header in ours:
            if header.key == span.key:
                return "an entry says that it is this chunk, but lies under another key"
            if header.key == self._blind[index]:
                option = "none" if self._llm.chunk_cache_config.chunk_context == "system" else "system"
                return f"its text is there, computed with --chunk-context {option}"
            if header.tenant != self._prompt.tenant and header.key == self._keys_of(header.tenant)[index]:
                return f"its text is there, but belongs to the tenant {one_line(header.tenant, 60)!r}"
        if ours:
            starts = sorted({header.start for header in ours})
            start = self._start(index)
            if start not in starts:
                places = ", ".join(str(each) for each in starts[:5])
                return f"its text is there, computed after another system text: from position {places}, not {start}"
            return "its text is there, computed after another system text of this length, or for another salt or tenant"
        if same:
            models = ", ".join(sorted({f"{header.fingerprint[:8]} ({header.dtype})" for header in same})[:3])
            mine = f"{self._llm.model.fingerprint[:8]} ({str(self._llm.model.dtype).removeprefix('torch.')})"
            return f"its text is there, computed by another model, other weights or dtype: {models}, not {mine}"
        named = [header for header in headers if span.name is not None and span.name in header.names]
        if named:
            sizes = ", ".join(sorted({f"{header.num_tokens:,}" for header in named})[:3])
            return f"a document of this name is there with another text ({sizes} tokens)"
        return "it is not there, and nothing of the same text is"

    def _keys_of(self, tenant: str) -> list[Key]:
        if tenant not in self._of_tenants:
            context = self._llm.chunk_cache_config.chunk_context
            self._of_tenants[tenant] = [span.key for span in self._plan(context, tenant)]
        return self._of_tenants[tenant]
