"""Entries of a disk tier that somebody damages in every way, asked for as the engine asks."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from entries.entries import Stored, expectation, header, same_bits, tensors

from kvmosaic.cache.keys import Key
from kvmosaic.entries import EntryBound, decode_entry, encode_entry
from kvmosaic.errors import InvalidEntry, TierError
from kvmosaic.tiers import Deadline
from kvmosaic.tiers.disk.files import QUARANTINE
from kvmosaic.tiers.disk.tier import DiskTier

QUOTA = 2**22
SPARSE_BYTES = 2**40
CODECS = ("none", "int8")


class Damaged:
    """Twelve entries in a folder. Each round damages one, or two; what is read then is right, or nothing."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place = place
        self.choose = random.Random(seed)
        self.stored: dict[Key, Stored] = {}
        for number in range(12):
            key = Key(bytes([number % 3, number]) * 16)
            head = header(
                5 + number,
                key=key,
                codec=CODECS[number % 2],
                tokens=bytes([number]) * 4 * (5 + number),
            )
            layers = tensors(head, number)
            entry = bytes(encode_entry(head, layers))
            self.stored[key] = Stored(head, decode_entry(entry, expectation(head)).layers, entry)
        self.tier = DiskTier(place, QUOTA, durable=False)
        self.done: Counter[str] = Counter({"wrong": 0, "right": 0, "refused": 0, "missing": 0, "failed": 0})

    def path(self, key: Key) -> Path:
        return self.place / key[:1].hex() / f"{key.hex()}.safetensors"

    def run(self, count: int, seconds: float | None = None) -> dict[str, int]:
        """So many damages, or as many as there is CPU time for, and what became of them."""
        end = time.process_time() + (seconds or float("inf"))
        names = sorted(DAMAGES)
        for number in range(count):
            if time.process_time() > end and number >= len(names):
                break
            self.restore()
            name = names[number % len(names)] if number < len(names) else self.choose.choice(names)
            keys = self.choose.sample(sorted(self.stored), 2)
            DAMAGES[name](self, *keys)
            self.done[name] += 1
            if self.choose.random() < 0.1:
                self.tier = DiskTier(self.place, QUOTA, durable=False)
            for key in keys:
                self.ask(key)
            self.tier.check_invariants()
        return dict(self.done)

    def restore(self) -> None:
        """All entries as they were written, whatever was there."""
        shutil.rmtree(self.place / QUARANTINE, ignore_errors=True)
        for key, stored in self.stored.items():
            path = self.path(key)
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            assert self.tier.put_many({key: stored.entry}, Deadline()) == {key}

    def ask(self, key: Key) -> None:
        """Reads an entry as the engine does."""
        stored = self.stored[key]
        expected = expectation(stored.header)
        most = EntryBound(stored.header.layers, stored.header.dtype).max_bytes(stored.header.num_tokens)
        try:
            entry = self.tier.get_many([key], Deadline(), max_bytes=most).get(key)
            if entry is None:
                self.done["missing"] += 1
                return
            self.done["wrong"] += len(entry) > most
            found = decode_entry(entry, expected)
        except InvalidEntry as error:
            self.done["refused"] += 1
            self.tier.quarantine(key, str(error), Deadline())
            assert self.tier.exists_many([key], Deadline()) == set()
        except TierError:
            self.done["failed"] += 1
        else:
            is_right = found.header.key == key and same_bits(found.layers, stored.layers)
            self.done["right" if is_right else "wrong"] += 1

    def truncate(self, key: Key, _: Key) -> None:
        path = self.path(key)
        os.truncate(path, self.choose.randrange(path.stat().st_size))

    def flip(self, key: Key, _: Key) -> None:
        data = bytearray(self.path(key).read_bytes())
        for _number in range(self.choose.choice([1, 1, 2, 50])):
            data[self.choose.randrange(len(data))] ^= 1 << self.choose.randrange(8)
        self.path(key).write_bytes(data)

    def zero(self, key: Key, _: Key) -> None:
        data = bytearray(self.path(key).read_bytes())
        begin = self.choose.randrange(len(data))
        data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
        self.path(key).write_bytes(data)

    def grow(self, key: Key, _: Key) -> None:
        with self.path(key).open("ab") as file:
            file.write(self.choose.randbytes(self.choose.choice([1, 64, 5000, 200_000])))

    def sparse(self, key: Key, _: Key) -> None:
        os.truncate(self.path(key), self.choose.choice([QUOTA, QUOTA // 2, SPARSE_BYTES, QUOTA // 40]))

    def swap(self, key: Key, other: Key) -> None:
        ours, theirs = self.path(key).read_bytes(), self.path(other).read_bytes()
        self.path(key).write_bytes(theirs)
        self.path(other).write_bytes(ours)

    def other_content(self, key: Key, other: Key) -> None:
        self.path(key).write_bytes(self.path(other).read_bytes())

    def mixed(self, key: Key, other: Key) -> None:
        ours, theirs = self.path(key).read_bytes(), self.path(other).read_bytes()
        at = self.choose.randrange(min(len(ours), len(theirs)))
        self.path(key).write_bytes(ours[:at] + theirs[at:])

    def folder(self, key: Key, _: Key) -> None:
        self.path(key).unlink()
        self.path(key).mkdir()

    def link(self, key: Key, other: Key) -> None:
        self.path(key).unlink()
        self.path(key).symlink_to(self.choose.choice([self.path(other), Path("/dev/zero"), Path("/nowhere")]))

    def hard_link(self, key: Key, other: Key) -> None:
        self.path(key).unlink()
        os.link(self.path(other), self.path(key))

    def pipe(self, key: Key, _: Key) -> None:
        self.path(key).unlink()
        os.mkfifo(self.path(key))

    def gone(self, key: Key, _: Key) -> None:
        self.path(key).unlink()


DAMAGES: dict[str, Callable[[Damaged, Key, Key], None]] = {
    method.__name__: method
    for method in (
        Damaged.truncate,
        Damaged.flip,
        Damaged.zero,
        Damaged.grow,
        Damaged.sparse,
        Damaged.swap,
        Damaged.other_content,
        Damaged.mixed,
        Damaged.folder,
        Damaged.link,
        Damaged.hard_link,
        Damaged.pipe,
        Damaged.gone,
    )
}
