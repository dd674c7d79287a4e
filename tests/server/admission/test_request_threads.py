"""Threads that tenants share in turns, by the CPU time that their work took."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait

import pytest

from kvmosaic.server.admission import FairThreads


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    threads = FairThreads(2)
    yield threads
    threads.shutdown()


def spin(seconds: float) -> None:
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def test_results_and_errors_come_back(threads: FairThreads) -> None:
    assert threads.submit("a", divmod, 7, 2).result(30) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        threads.submit("a", divmod, 1, 0).result(30)


def test_one_tenant_leaves_a_thread_to_the_others(threads: FairThreads) -> None:
    free = threading.Event()
    blocked = [threads.submit("hostile", free.wait, 60) for _ in range(50)]
    assert threads.submit("honest", divmod, 7, 2).result(30) == (3, 1)
    free.set()
    wait(blocked, 60)


def test_turns_go_by_time_and_not_by_number() -> None:
    threads, free, order = FairThreads(1), threading.Event(), []

    def work(name: str, seconds: float) -> None:
        spin(seconds)
        order.append(name)

    threads.submit("first", free.wait, 60)  # all others line up behind it
    for _ in range(5):
        threads.submit("heavy", work, "heavy", 0.05)
    ends = [threads.submit("light", work, "light", 0.005) for _ in range(10)]
    free.set()
    wait(ends, 60)
    assert order.count("heavy") <= 2
    threads.shutdown()


def test_work_of_other_processes_is_charged_by_the_clock() -> None:
    """As reading a file is: its thread only waits."""
    now = [0.0]
    threads, free, order = FairThreads(1, clock=lambda: now[0]), threading.Event(), []

    def work(name: str, seconds: float) -> None:
        now[0] += seconds
        order.append(name)

    threads.submit("first", free.wait, 60)
    for _ in range(3):
        threads.submit("heavy", work, "heavy", 30.0)
    ends = [threads.submit("light", work, "light", 1.0) for _ in range(5)]
    free.set()
    wait(ends, 60)
    assert order[:6].count("light") == 5
    threads.shutdown()


def test_who_waited_for_nothing_saved_nothing_up(threads: FairThreads) -> None:
    """Nor does one that worked alone for long have to pay for it when another comes."""
    threads.submit("early", spin, 0.2).result(30)
    order: list[str] = []
    free = threading.Event()
    blocked = [threads.submit(f"busy {number}", free.wait, 60) for number in range(2)]
    work = [threads.submit(name, order.append, name) for _ in range(3) for name in ("late", "early")]
    free.set()
    wait(work + blocked, 60)
    assert "early" in order[:3] and "late" in order[:3]


def test_what_waits_is_cancelled_when_the_threads_end(threads: FairThreads) -> None:
    free = threading.Event()
    blocked = [threads.submit(f"busy {number}", free.wait, 60) for number in range(2)]
    waiting = threads.submit("a", divmod, 1, 1)
    threads.shutdown()
    with pytest.raises(CancelledError):
        waiting.result(30)
    with pytest.raises(RuntimeError):
        threads.submit("a", divmod, 1, 1)
    free.set()
    wait(blocked, 60)


def test_who_waits_for_work_that_was_cancelled_is_woken(threads: FairThreads) -> None:
    free = threading.Event()
    running = [threads.submit(f"busy {number}", free.wait, 60) for number in range(2)]
    queued = [threads.submit("a", divmod, 1, 1) for _ in range(3)]
    threads.shutdown()
    assert not wait(queued, 5).not_done
    free.set()
    assert not wait(running, 30).not_done


def test_nothing_is_kept_of_tenants_that_have_gone(threads: FairThreads) -> None:
    wait([threads.submit(f"tenant {number}", divmod, 7, 2) for number in range(200)], 60)
    assert threads.submit("last", divmod, 7, 2).result(30)
    end = time.monotonic() + 30
    while threads._lines and time.monotonic() < end:
        time.sleep(0.01)
    assert not threads._lines
