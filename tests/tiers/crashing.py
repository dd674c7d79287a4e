"""Processes on one folder of a disk tier that are killed, again and again. Run by `test_disk_crash.py`, and by hand.

    python tests/tiers/crashing.py kill FOLDER ROUNDS SEED     one process at a time; looks at the folder after each
    python tests/tiers/crashing.py share FOLDER SECONDS SEED   several at once, some of which are killed meanwhile

Prints what was done as JSON. It imports no torch, so a process starts in a millisecond, by a fork.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiers.conformance import is_marked, listed, marked
from tiers.faulty_files import FaultyFiles

from kvmosaic.cache.keys import Key
from kvmosaic.tiers import Deadline
from kvmosaic.tiers.disk.files import is_draft
from kvmosaic.tiers.disk.tier import DiskTier

QUOTA = 40_000
KEYS = [Key(bytes([number % 5, number]) * 16) for number in range(24)]
LONGEST_ROUND = 0.02

Twin = OrderedDict[Key, bytes]


def act(tier: DiskTier, choose: random.Random, version: int, log: int) -> None:
    """One call, which is written down before and after."""
    key = choose.choice(KEYS)
    kind = choose.choice(["put", "put", "put", "get", "touch", "delete", "quarantine", "scan"])
    keys = choose.sample(KEYS, 2) if kind == "put" and choose.random() < 0.3 else [key]
    sizes = [choose.randrange(40, 9000) for _ in keys]
    words = [kind, version, [each.hex() for each in keys], sizes]
    os.write(log, json.dumps(["begin", *words]).encode() + b"\n")
    deadline = Deadline()
    match kind:
        case "put":
            tier.put_many({k: marked(k, size, version) for k, size in zip(keys, sizes, strict=True)}, deadline)
        case "get":
            assert all(is_marked(k, entry) for k, entry in tier.get_many(keys, deadline).items())
        case "touch":
            tier.touch(keys, deadline)
        case "delete":
            tier.delete_many(keys, deadline)
        case "quarantine":
            tier.quarantine(key, "a test", deadline)
        case "scan":
            listed(tier)
    os.write(log, json.dumps(["end", *words]).encode() + b"\n")


def follow(twin: Twin, kind: str, version: int, keys: list[Key], sizes: list[int]) -> None:
    """Does to the twin what a call does to the tier."""
    for key, size in zip(keys, sizes, strict=True):
        match kind:
            case "put":
                twin.pop(key, None)
                while sum(map(len, twin.values())) + size > QUOTA:
                    twin.popitem(last=False)
                twin[key] = marked(key, size, version)
            case "get" | "touch" if key in twin:
                twin.move_to_end(key)
            case "delete" | "quarantine":
                twin.pop(key, None)


def check(folder: Path, before: Twin, log: bytes, done: Counter[str]) -> Twin:
    """Opens the folder after a crash; whatever was done before it must be there, and nothing else."""
    # a kill may cut the last line at the end of a page: what it says was not begun, or not acknowledged
    lines = [json.loads(line) for line in log.splitlines(keepends=True) if line.endswith(b"\n")]
    twin = before.copy()
    under_way: list | None = None
    for state, kind, version, names, sizes in lines:
        call = [kind, version, [Key(bytes.fromhex(name)) for name in names], sizes]
        under_way = call if state == "begin" else None
        if state == "end":
            follow(twin, *call)
            done[kind] += 1
    after = twin.copy()
    uncertain: dict[Key, list[bytes]] = {}
    if under_way is not None:
        done["cut off"] += 1
        follow(after, *under_way)
        kind, version, keys, sizes = under_way
        if kind == "put":
            uncertain = {key: [marked(key, size, version)] for key, size in zip(keys, sizes, strict=True)}

    done["drafts left over"] += len(drafts_in(folder))
    tier = DiskTier(folder, QUOTA, durable=False)
    assert not drafts_in(folder), "drafts of a dead writer"
    tier.check_invariants()
    facts = listed(tier)
    order = sorted(facts, key=lambda key: facts[key].last_used)
    found = tier.get_many(order, Deadline())
    stat = tier.stat()
    assert (stat.num_entries, stat.num_bytes) == (len(found), sum(map(len, found.values())))
    assert stat.num_bytes <= QUOTA
    for key in KEYS:
        allowed = [twin.get(key), after.get(key), *uncertain.get(key, []), *([None] if key in uncertain else [])]
        assert found.get(key) in allowed, f"{key.hex()}: lost or wrong after {under_way and under_way[0]}"
    assert found.keys() <= set(KEYS)
    return OrderedDict((key, bytes(found[key])) for key in order)


def fault_of(choose: random.Random) -> tuple[FaultyFiles | None, float]:
    """How a process ends: at a random moment, or at a random call, before, within or after it."""
    if choose.random() < 0.5:
        return None, choose.uniform(0.0, LONGEST_ROUND)
    fatal, how = choose.randrange(1, 400), choose.choice(["killed before", "killed in the middle", "killed after"])
    return FaultyFiles(lambda number, name: how if number == fatal else None), 1.0


def kill(folder: Path, num_rounds: int, seed: int) -> Counter[str]:
    """One process after the other uses the folder, and is killed."""
    choose = random.Random(seed)
    done: Counter[str] = Counter()
    twin: Twin = OrderedDict()
    log_path = folder.with_suffix(".log")
    for round_number in range(num_rounds):
        files, seconds = fault_of(choose)
        log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        child = os.fork()
        if child == 0:
            try:
                own = random.Random(f"{seed} {round_number}")
                tier = DiskTier(folder, QUOTA, durable=files is not None, files=files)
                version = 0
                while True:
                    version += 1
                    act(tier, own, round_number * 1000 + version, log)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
            finally:
                os._exit(1)
        end = time.monotonic() + seconds
        status = 0
        while files is not None and time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            time.sleep(0.0005)
        else:
            time.sleep(max(0.0, end - time.monotonic()))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, f"round {round_number} ended by itself"
        done["kills"] += 1
        done["kills at a call"] += files is not None
        twin = check(folder, twin, os.pread(log, 2**24, 0), done)
        os.close(log)
    later = DiskTier(folder, QUOTA, clock=lambda: time.time_ns() + 3600 * 10**9)
    assert later.get_many(KEYS, Deadline()) == twin, "changed by being opened"
    assert sum(path.stat().st_size for path in (folder / "quarantine").glob("*")) <= QUOTA / 16, "quarantine"
    done["entries at the end"] = len(twin)
    return done


def work(folder: Path, seed: int) -> None:
    """Uses the folder until it is killed; ends before that if something is wrong."""
    choose = random.Random(seed)
    tier = DiskTier(folder, QUOTA, durable=False)
    version = 0
    while True:
        version += 1
        key = choose.choice(KEYS)
        match choose.randrange(8):
            case 0 | 1 | 2:
                tier.put_many({key: marked(key, choose.randrange(40, 9000), version)}, Deadline())
            case 3 | 4 | 5:
                for found, entry in tier.get_many(choose.sample(KEYS, 4), Deadline()).items():
                    assert is_marked(found, entry), f"{found.hex()}: a wrong entry"
            case 6:
                choose.choice([tier.delete_many, tier.exists_many, tier.touch])([key], Deadline())
            case 7:
                tier.quarantine(key, "a test", Deadline()) if choose.random() < 0.2 else listed(tier)
        tier.check_invariants()


def share(folder: Path, seconds: float, seed: int) -> Counter[str]:
    """Three processes use the folder at once. Now and then one of them is killed, and another takes its place."""
    choose = random.Random(seed)
    done: Counter[str] = Counter()
    DiskTier(folder, QUOTA).close()
    children: set[int] = set()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            while len(children) < 3:
                number = choose.randrange(2**32)
                child = os.fork()
                if child == 0:
                    try:
                        work(folder, number)
                    except BaseException as error:
                        print(repr(error), file=sys.stderr, flush=True)
                    finally:
                        os._exit(1)
                children.add(child)
            time.sleep(choose.uniform(0.01, 0.2))
            num_bytes = size_of(folder)
            done["most bytes"] = max(done["most bytes"], num_bytes)
            done["looks"] += 1
            child = choose.choice(sorted(children))
            stop(child, children)
            done["kills"] += 1
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    for child in sorted(children):
        stop(child, children)
    done["drafts left over"] = len(drafts_in(folder))
    tier = DiskTier(folder, QUOTA, durable=False)
    assert not drafts_in(folder), "drafts of dead writers"
    assert tier.stat().num_bytes == size_of(folder) <= QUOTA
    for key, entry in tier.get_many(KEYS, Deadline()).items():
        assert is_marked(key, entry)
        done["entries at the end"] += 1
    return done


def size_of(folder: Path) -> int:
    """Bytes of all entries and drafts, as `ls -a` sees them."""
    num_bytes = 0
    for path in folder.glob("??/*"):
        try:
            num_bytes += path.stat().st_size
        except FileNotFoundError:
            continue
    return num_bytes


def drafts_in(folder: Path) -> list[Path]:
    """All drafts, whoever writes them."""
    return [path for path in folder.rglob("*") if is_draft(path.name)]


def stop(child: int, children: set[int]) -> None:
    os.kill(child, signal.SIGKILL)
    children.discard(child)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "a process saw something wrong and ended by itself"


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "kill":
        print(json.dumps(kill(place, int(sys.argv[3]), int(sys.argv[4]))))
    else:
        print(json.dumps(share(place, float(sys.argv[3]), int(sys.argv[4]))))
