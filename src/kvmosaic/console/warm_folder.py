"""Warming of a document folder: computes its chunks ahead of time into tiers, and waits until they are written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvmosaic.cache.keys import Key
from kvmosaic.config import parse_bytes
from kvmosaic.console.folder import document_of, find_files, read_file, skipped_kinds
from kvmosaic.console.options import SECRET_VARIABLE, FolderOptions, ModelOptions, open_llm, tier_secret
from kvmosaic.console.text import duration_text, one_line, printable, size_text
from kvmosaic.entries import Checksum, check_entry
from kvmosaic.entries.verification import MAX_PREAMBLE_BYTES, NO_LABEL
from kvmosaic.errors import (
    CacheError,
    ChunkCacheOff,
    InvalidConfig,
    InvalidDocument,
    InvalidEntry,
    InvalidPrompt,
    MissingExtra,
    OtherSecret,
    RequestTooLarge,
)
from kvmosaic.tiers import Deadline, Entry, Tier

if TYPE_CHECKING:
    from kvmosaic.llm import LLM
    from kvmosaic.prompt import Prompt


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A stop was requested."""


class Stop:
    """Whether a stop was requested. Signals only set a flag, so that no operation is cut in the middle.

    A second signal raises KeyboardInterrupt wherever the program is.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raises Interrupted if a stop was requested."""
        if self.is_asked:
            raise Interrupted

    def __enter__(self) -> Stop:
        self._before = {each: signal.signal(each, self._ask) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


INTERRUPTED = 130
"""Exit code after Ctrl-C."""
MAX_DOCUMENTS = 1_000_000
_MAX_AT_ONCE = 256
"""Maximum number of documents looked up and computed together."""
_PART_OF_POOL = 4
"""Number of batches in progress that fit into the memory."""


@dataclass(slots=True)
class _Batch:
    """Documents that are looked up and computed together."""

    names: list[str] = field(default_factory=list)
    chunks: list[tuple[str, Key, Prompt]] = field(default_factory=list)
    """The document of each chunk, its key, and a prompt with it alone."""


def warm_folder(opening: ModelOptions, warming: FolderOptions, as_json: bool) -> int:
    """Computes what the tiers do not have; returns the exit code: 0, 1 if something is missing, 130 if interrupted.

    Raises:
        KVMosaicError: the model, the folder, a setting or a tier cannot work.
    """
    notices = Console(stderr=True)
    if not opening.values.get("chunk_tier"):
        raise InvalidConfig(
            "warmed documents are kept in tiers; give --chunk-tier 'disk:/var/cache/kvmosaic?quota=10GiB'"
        )
    system, seal = _system_text(warming), Checksum(tier_secret())
    found = find_files(warming.folder, warming.glob, MAX_DOCUMENTS)
    for told in skipped_kinds(found.skipped):
        notices.print(f"left out: {told}", style="dim", markup=False)
    paths = found.readable
    with closing(open_llm(opening, notices)) as llm:
        if not llm.has_chunk_cache:
            raise ChunkCacheOff(f"no document can be kept, the chunk cache is off: {llm.chunk_cache_off_reason}")
        began = time.perf_counter()
        counts, stored = WarmCounts(documents=len(paths)), StoredKeys(llm, seal)
        with Stop() as stop, WarmingBar(notices, paths) as bar:
            warmer = _Warmer(llm, stored, counts, bar, stop, warming.tenant)
            try:
                with contextlib.suppress(Interrupted):
                    warmer.warm(paths, system)
                if stop.is_asked:
                    notices.print("stopping when what was computed is written; Ctrl-C again does not wait for that")
                stored.wait(bar)
            except KeyboardInterrupt:
                _leave(bar, notices)
            warmer.settle()
        counts.seconds, counts.is_interrupted = time.perf_counter() - began, stop.is_asked
        counts.num_bytes = stored.bytes_written()
        if not counts.is_interrupted:
            counts.missing = stored.missing(counts.chunks)
    show_counts(counts, as_json)
    if counts.is_interrupted:
        return INTERRUPTED
    return 0 if counts.is_complete else 1


def _system_text(warming: FolderOptions) -> str | None:
    if warming.system_file is None:
        return warming.system
    if warming.system is not None:
        raise InvalidConfig("--system and --system-file exclude each other; leave one out")
    return document_of(warming.system_file.name, read_file(warming.system_file))["text"]


class _Warmer:
    """Computes documents in batches that fit into the device's pool several times."""

    def __init__(
        self, llm: LLM, stored: StoredKeys, counts: WarmCounts, bar: WarmingBar, stop: Stop, tenant: str
    ) -> None:
        self._llm = llm
        self._tenant = tenant
        self._stored = stored
        self._counts = counts
        self._bar = bar
        self._stop = stop
        self._under_way: _Batch | None = None
        self._bytes_per_token = llm.model.bytes_per_token()
        pool = llm.engine.kv_cache.chunk_pool
        self._max_bytes = pool.num_blocks * pool.block_size * self._bytes_per_token // _PART_OF_POOL

    def warm(self, paths: dict[str, Path], system: str | None) -> None:
        """Computes the documents that are not in the tiers.

        Raises:
            Interrupted: a stop was requested.
        """
        for batch in self._batches(paths, system):
            self._under_way = batch
            self._warm(batch)
            self._under_way = None
            self._bar.advance(batch.names)

    def settle(self) -> None:
        """Counts the results of the last batch, after an interrupt or after all writes.

        Raises:
            TierError: a tier fails.
        """
        if (batch := self._under_way) is None:
            return
        known = self._stored.find({key for _, key, _ in batch.chunks})
        incomplete = {name for name, key, _ in batch.chunks if key not in known}
        self._counts.computed += len(batch.names) - len(incomplete)
        self._counts.tokens += sum(prompt.chunks[0].num_tokens for _, key, prompt in batch.chunks if key in known)

    def _batches(self, paths: dict[str, Path], system: str | None) -> Iterator[_Batch]:
        batch, num_bytes = _Batch(), 0
        for name, path in paths.items():
            self._stop.check()
            try:
                chunks = self._chunks(document_of(name, read_file(path)), system)
            except (InvalidDocument, InvalidPrompt, MissingExtra) as error:
                self._counts.problems[name] = str(error)
                self._bar.advance([name])
                continue
            size = sum(prompt.chunks[0].num_tokens for _, prompt in chunks) * self._bytes_per_token
            if batch.names and (num_bytes + size > self._max_bytes or len(batch.names) == _MAX_AT_ONCE):
                yield batch
                batch, num_bytes = _Batch(), 0
            batch.names.append(name)
            batch.chunks += [(name, key, prompt) for key, prompt in chunks]
            num_bytes += size
        if batch.names:
            yield batch

    def _chunks(self, document: dict[str, str], system: str | None) -> list[tuple[Key, Prompt]]:
        encoder = self._llm.encoder
        found = encoder.settings.find_documents
        prompt = encoder.encode_documents([document], system, find_documents=found)
        prompt = replace(prompt, tenant=self._tenant)
        with_places = self._llm.chunk_cache_config.context_in() == "companions"
        return [
            (span.key, single)
            for single in prompt.singles()
            for copy in single.singles(with_places=with_places)
            for span in self._llm.plan(copy).spans
            if span.is_chunk
        ]

    def _warm(self, batch: _Batch) -> None:
        known = self._stored.find({key for _, key, _ in batch.chunks}) | self._counts.chunks.keys()
        wanted = {key: prompt for _, key, prompt in batch.chunks if key not in known}
        incomplete = {name for name, key, _ in batch.chunks if key in wanted}
        tokens = sum(prompt.chunks[0].num_tokens for prompt in wanted.values())
        if wanted:
            self._stored.wait_for_room(tokens * self._bytes_per_token)
            before = self._counts.tokens

            def progress(done: int, total: int) -> None:
                self._bar.within(batch.names, done / total, before + tokens * done // total)
                self._stop.check()

            try:
                self._llm.chunks.warm(list({id(prompt): prompt for prompt in wanted.values()}.values()), progress)
            except (InvalidPrompt, CacheError, RequestTooLarge) as error:
                if len(batch.names) > 1:  # one of them failed: retry each alone
                    for name in batch.names:
                        self._warm(_Batch([name], [chunk for chunk in batch.chunks if chunk[0] == name]))
                else:
                    self._counts.problems[batch.names[0]] = str(error)
                return
        self._counts.chunks.update((key, None) for _, key, _ in batch.chunks)
        self._counts.tokens += tokens
        self._counts.computed += len(incomplete)
        self._counts.skipped += len(batch.names) - len(incomplete)


def _leave(bar: WarmingBar, notices: Console) -> NoReturn:
    """Exits the process immediately, like a kill, which is safe for every tier."""
    bar.__exit__()
    notices.print("stopped; what is in the tiers stays, and the same command goes on from there", style="yellow")
    sys.stdout.flush()
    os._exit(INTERRUPTED)


CALL_SECONDS = 60.0
"""Timeout of one call to a tier; no request waits for it."""
_AT_ONCE = 256
_LOOK_SECONDS = 0.2


class StoredKeys:
    """The tiers of an engine as one store in which every tier must have every chunk."""

    def __init__(self, llm: LLM, seal: Checksum) -> None:
        """Raises InvalidConfig if a tier does not outlive this process."""
        assert llm.engine.offloader is not None, "an engine with a chunk cache and tiers has an offloader"
        self._tiered_store = llm.engine.offloader.tiered_store
        for tier in self._tiered_store.tiers:
            if not tier.is_persistent:
                raise InvalidConfig(f"what a {tier.name} tier has is gone with this process; leave it out")
        self._codecs = ("none", llm.tier_config.chunk_codec)
        self._seal = seal
        self._max_pending = parse_bytes(llm.tier_config.chunk_pending)
        pool = llm.engine.kv_cache.chunk_pool
        self._max_bytes = pool.num_blocks * pool.block_size * llm.model.bytes_per_token() + MAX_PREAMBLE_BYTES
        """Of an entry whose chunk fits into the pool."""

    @property
    def tiers(self) -> Sequence[Tier]:
        """All of them, the fastest first."""
        return self._tiered_store.tiers

    def find(self, keys: Collection[Key]) -> set[Key]:
        """Returns the keys of which every tier has a usable entry; entries that only some tiers have are copied.

        Every byte is checked. An entry that cannot be used here (damaged, of another secret, or with numbers that are
        rounded more) is removed, so that the chunk can be stored again.

        Raises:
            InvalidConfig: there is a secret, and none was given. TierError: a tier fails.
        """
        found = [self._usable(tier, keys) for tier in self.tiers]
        for key in set().union(*found):
            self._copy(key, found)
        return set(keys).intersection(*found)

    def missing(self, keys: Collection[Key]) -> list[Key]:
        """Returns the keys missing in some tier, for any reason.

        Raises:
            TierError: a tier fails.
        """
        every = list(keys)
        missing: dict[Key, None] = {}
        for tier in self.tiers:
            for first in range(0, len(every), _AT_ONCE):
                some = every[first : first + _AT_ONCE]
                there = tier.exists_many(some, Deadline(CALL_SECONDS))
                missing.update((key, None) for key in some if key not in there)
        return list(missing)

    def wait_for_room(self, num_bytes: int) -> None:
        """Waits until `num_bytes` more may be computed without drops from a full write queue."""
        while self._tiered_store.pending_bytes + num_bytes > self._max_pending:
            if self._tiered_store.flush(_LOOK_SECONDS):
                return

    def wait(self, bar: WarmingBar) -> None:
        """Waits until all writes have succeeded or failed."""
        while not self._tiered_store.flush(_LOOK_SECONDS):
            bar.writing()

    def bytes_written(self) -> int:
        """Returns the bytes written by this process, in all tiers."""
        return sum(tier.stat().put_bytes for tier in self.tiers)

    def _usable(self, tier: Tier, keys: Collection[Key]) -> set[Key]:
        there = tier.exists_many(keys, Deadline(CALL_SECONDS))
        useless = {key for key in there if self._entry(tier, key) is None}
        tier.delete_many(useless, Deadline(CALL_SECONDS))
        return there - useless

    def _entry(self, tier: Tier, key: Key) -> Entry | None:
        """An entry that can be used here."""
        try:
            entry = tier.get_many([key], Deadline(CALL_SECONDS), max_bytes=self._max_bytes).get(key)
            header = None if entry is None else check_entry(entry, key, self._seal)
        except OtherSecret as error:
            if self._seal.label == NO_LABEL:
                raise InvalidConfig(
                    f"the {tier.name} tier has entries that are sealed with a secret, and {SECRET_VARIABLE} is not "
                    "set; set it, or give another place"
                ) from error
            return None
        except InvalidEntry:
            return None
        return entry if header is not None and header.codec in self._codecs else None

    def _copy(self, key: Key, found: Sequence[set[Key]]) -> None:
        """Copies an entry to the tiers without it."""
        if all(key in there for there in found):
            return
        source = next(tier for tier, there in zip(self.tiers, found, strict=True) if key in there)
        if (entry := self._entry(source, key)) is not None:
            for other, lacking in zip(self.tiers, found, strict=True):
                if key not in lacking:
                    lacking |= other.put_many({key: entry}, Deadline(CALL_SECONDS))


class WarmingBar:
    """Progress bar drawn on terminals only. Its length counts file bytes, the best estimate of the remaining time."""

    def __init__(self, notices: Console, paths: Mapping[str, Path]) -> None:
        self._sizes: dict[str, int] = dict.fromkeys(paths, 1)
        for name, path in paths.items():
            with contextlib.suppress(OSError):
                self._sizes[name] += path.stat().st_size
        self._began = time.perf_counter()
        self._num_documents = self._num_bytes = 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[documents]:,} of {task.fields[all_documents]:,} documents"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=notices, transient=True, disable=not notices.is_terminal)
        self._task = self._bar.add_task(
            "computing", total=sum(self._sizes.values()), documents=0, all_documents=len(paths), speed=0.0
        )

    def advance(self, names: Iterable[str]) -> None:
        """Marks documents as done."""
        for name in names:
            self._num_documents += 1
            self._num_bytes += self._sizes[name]
        self._bar.update(self._task, completed=self._num_bytes, documents=self._num_documents)

    def within(self, names: list[str], share: float, num_tokens: int) -> None:
        """Sets the progress within these documents, and the number of tokens computed so far."""
        self._bar.update(
            self._task,
            completed=self._num_bytes + share * sum(self._sizes[name] for name in names),
            documents=self._num_documents + int(share * len(names)),
            speed=num_tokens / (time.perf_counter() - self._began),
        )

    def writing(self) -> None:
        """Shows that all chunks are computed, but not yet written."""
        self._bar.update(self._task, description="writing")

    def __enter__(self) -> WarmingBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


MAX_LINES = 50
"""Maximum number of failed documents listed; more are only counted."""


@dataclass(slots=True)
class WarmCounts:
    """Counts of warming."""

    documents: int
    computed: int = 0
    """Documents computed, in whole or in part."""
    skipped: int = 0
    """Documents that the tiers already had."""
    tokens: int = 0
    """Tokens computed."""
    chunks: dict[Key, None] = field(default_factory=dict)
    """All chunks of all documents, in order."""
    problems: dict[str, str] = field(default_factory=dict)
    """Errors of documents that cannot be computed, by name."""
    missing: list[Key] = field(default_factory=list)
    """Chunks missing in some tier at the end."""
    num_bytes: int = 0
    """Bytes written to the tiers."""
    seconds: float = 0.0
    is_interrupted: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether every document is in all tiers."""
        return not (self.missing or self.problems or self.is_interrupted)

    @property
    def num_left(self) -> int:
        """Documents not processed."""
        return self.documents - self.computed - self.skipped - len(self.problems)


def show_counts(tally: WarmCounts, as_json: bool) -> None:
    """Prints what was done, and what is left."""
    console, notices = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    for name, problem in islice(tally.problems.items(), MAX_LINES):
        notices.print(f"not computed: {printable(name)}: {one_line(problem, 400)}", markup=False)
    if len(tally.problems) > MAX_LINES:
        notices.print(f"… {len(tally.problems) - MAX_LINES:,} more were not computed")
    if as_json:
        print(json.dumps(_fields(tally)), flush=True)
    else:
        console.print(_summary(tally))
    if tally.is_interrupted:
        notices.print(
            f"interrupted with {tally.num_left:,} documents left; the same command goes on where this one stopped",
            style="yellow",
        )
    if tally.missing:
        notices.print(
            f"{len(tally.missing):,} of {len(tally.chunks):,} chunks are not in every tier: one failed, or its quota "
            "is too small for all of them",
            style="red",
        )


def _fields(tally: WarmCounts) -> dict[str, object]:
    return {
        "documents": tally.documents,
        "computed": tally.computed,
        "skipped": tally.skipped,
        "failed": len(tally.problems),
        "left": tally.num_left,
        "not_stored": len(tally.missing),
        "tokens": tally.tokens,
        "bytes": tally.num_bytes,
        "seconds": round(tally.seconds, 3),
        "interrupted": tally.is_interrupted,
    }


def _summary(tally: WarmCounts) -> str:
    speed = f", {tally.tokens / tally.seconds:,.0f} tokens/s" if tally.tokens and tally.seconds else ""
    failed = f", {len(tally.problems):,} failed" if tally.problems else ""
    took = f"{size_text(tally.num_bytes)} written in {duration_text(tally.seconds)}{speed}"
    return (
        f"{tally.documents:,} documents: {tally.computed:,} computed, {tally.skipped:,} skipped (stored already)"
        f"{failed}; {tally.tokens:,} tokens, {took}"
    )
