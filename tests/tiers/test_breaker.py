"""The breaker against a twin that is obviously right, and against a real clock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.examples import examples
from support.tiers import TroubledTier

from kvmosaic.cache import Key
from kvmosaic.errors import TierFull, TierUnavailable
from kvmosaic.tiers import Deadline, Tier
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.tier import Notices

KEY = Key(b"k" * 32)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask_all(tier: Tier) -> list[object]:
    """Every question that a tier can be asked, once."""
    questions = [
        lambda: tier.put_many({KEY: b"entry"}, Deadline(1)),
        lambda: tier.get_many([KEY], Deadline(1)),
        lambda: tier.exists_many([KEY], Deadline(1)),
        lambda: tier.touch([KEY], Deadline(1)),
        lambda: tier.quarantine(KEY, "because", Deadline(1)),
        lambda: tier.delete_many([KEY], Deadline(1)),
    ]
    answers: list[object] = []
    for question in questions:
        try:
            answers.append(question())
        except TierUnavailable as error:
            answers.append(error)
    return answers


class AgainstTwin(RuleBasedStateMachine):
    """Calls, probes and time in any order; the twin is a few numbers and one `if` each."""

    @initialize()
    def begin(self) -> None:
        self.clock, self.tier = Clock(), TroubledTier()
        self.breaker = Breaker(self.tier, jitter=0.0, clock=self.clock, in_background=False)
        self.is_open, self.next_probe = False, 0.0
        self.opened = self.skipped = self.probes = 0

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(error=st.sampled_from([None, TierUnavailable("down"), TierFull("full")]))
    def place(self, error: TierUnavailable | TierFull | None) -> None:
        self.tier.error = error

    @rule()
    def call(self) -> None:
        asked = len(self.tier.calls)
        expected = type(self.tier.error)
        if self.is_open:
            expected, self.skipped = TierUnavailable, self.skipped + 1
        elif expected is TierUnavailable:
            self.is_open, self.opened, self.next_probe = True, self.opened + 1, self.clock.now + 1.0
        was_open = self.breaker.is_open
        try:
            self.breaker.get_many([KEY], Deadline(1))
            outcome: type[object] = type(None)
        except (TierUnavailable, TierFull) as error:
            outcome = type(error)
        assert outcome is expected
        assert len(self.tier.calls) - asked == (not was_open)

    @rule()
    def probe(self) -> None:
        if self.is_open and self.clock.now >= self.next_probe:
            self.probes += 1
            if isinstance(self.tier.error, TierUnavailable):
                self.next_probe = self.clock.now + 1.0
            else:
                self.is_open = False
        assert self.breaker.probe_if_due() == (not self.is_open)

    @invariant()
    def agree(self) -> None:
        reads = self.breaker.reads
        assert self.breaker.is_open == reads.is_open == self.is_open
        assert (reads.opened, reads.skipped, reads.probes) == (self.opened, self.skipped, self.probes)


TestAgainstTwin = AgainstTwin.TestCase
TestAgainstTwin.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_breaker_is_a_tier_and_hands_every_question_on() -> None:
    tier = TroubledTier()
    breaker = Breaker(tier)
    assert isinstance(breaker, Tier)
    assert ask_all(breaker) == ask_all(TroubledTier())
    assert [name for name, _ in tier.calls] == ["put", "get", "exists", "touch", "quarantine", "delete"]
    assert (breaker.name, breaker.is_persistent, breaker.stat()) == (tier.name, tier.is_persistent, tier.stat())
    breaker.close()
    assert tier.is_closed


def test_open_breaker_asks_nothing_and_says_why() -> None:
    tier = TroubledTier()
    breaker = Breaker(tier, in_background=False)
    tier.error = TierUnavailable("the cable is out")
    for call in (breaker.touch, breaker.get_many):
        with pytest.raises(TierUnavailable, match=r"^the cable is out$"):
            call([KEY], Deadline(1))
    assert all(isinstance(answer, TierUnavailable) and "the cable is out" in str(answer) for answer in ask_all(breaker))
    assert len(tier.calls) == 2
    assert breaker.reads.skipped + breaker.writes.skipped == 6
    assert breaker.reads.reason == breaker.writes.reason == "the cable is out"


def test_a_call_that_its_deadline_ends_counts_as_failed_unless_it_was_short() -> None:
    clock, tier = Clock(), TroubledTier()
    breaker = Breaker(tier, clock=clock, in_background=False)

    def slow(seconds: float, allowed: float) -> None:
        deadline = Deadline(allowed, clock=clock)
        tier._call = lambda *_: setattr(clock, "now", clock.now + seconds)  # type: ignore[method-assign]
        breaker.get_many([KEY], deadline)

    slow(0.05, 0.01)
    slow(5.0, 10.0)
    assert not breaker.is_open
    slow(0.5, 0.4)
    assert breaker.is_open


def test_others_leave_the_tier_alone_while_it_is_probed() -> None:
    tier = TroubledTier()
    breaker = Breaker(tier, jitter=0.0, interval_seconds=0.001, in_background=False)
    tier.error = TierUnavailable("down")
    with pytest.raises(TierUnavailable):
        breaker.touch([KEY], Deadline(1))
    tier.error = None
    tier.gate.clear()
    time.sleep(0.01)
    prober = threading.Thread(target=breaker.probe_if_due)
    prober.start()
    end = time.monotonic() + 60
    while not breaker.writes.probes:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert not breaker.probe_if_due()  # one at a time
    with pytest.raises(TierUnavailable):
        breaker.touch([KEY], Deadline(1))
    tier.gate.set()
    prober.join()
    assert not breaker.is_open
    breaker.touch([KEY], Deadline(1))


def test_a_probe_that_raises_something_unheard_of_leaves_it_open_and_probing() -> None:
    clock, tier = Clock(), TroubledTier()
    breaker = Breaker(tier, jitter=0.0, clock=clock, in_background=False)
    tier.error = TierUnavailable("down")
    with pytest.raises(TierUnavailable):
        breaker.touch([KEY], Deadline(1))
    tier.error = ValueError("a bug")  # type: ignore[assignment]
    clock.now += 1
    assert not breaker.probe_if_due()
    assert breaker.is_open
    tier.error = None
    clock.now += 1
    assert breaker.probe_if_due()


def test_it_is_back_by_itself_soon_after_the_place_is() -> None:
    tier = TroubledTier()
    breaker = Breaker(tier, interval_seconds=0.02)
    for _ in range(3):
        tier.error = TierUnavailable("down")
        with pytest.raises(TierUnavailable):
            breaker.touch([KEY], Deadline(1))
        failed, end = breaker.writes.failed_probes, time.monotonic() + 60
        while breaker.writes.failed_probes == failed:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert breaker.is_open
        tier.error = None
        end = time.monotonic() + 60
        while breaker.is_open:
            assert time.monotonic() < end
            time.sleep(0.005)
    stat = breaker.writes
    assert stat.opened == 3
    assert stat.failed_probes >= 3
    assert stat.probes == stat.failed_probes + 3
    breaker.close()


def test_closing_ends_the_probing() -> None:
    tier = TroubledTier("closing")
    breaker = Breaker(tier, interval_seconds=0.01)
    tier.error = TierUnavailable("down")
    with pytest.raises(TierUnavailable):
        breaker.touch([KEY], Deadline(1))
    breaker.close()
    end = time.monotonic() + 60
    while any(thread.name == "kvmosaic-probe-closing" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)


class OneWay(TroubledTier):
    """Can be read, or written, but not both."""

    def __init__(self, failing: set[str]) -> None:
        super().__init__("one-way")
        self.failing = failing

    def _call(self, what: str, keys: Collection[Key], seconds: float = 0.0) -> None:
        super()._call(what, keys, seconds)
        if what in self.failing:
            raise TierUnavailable("not this way")


def test_a_tier_that_cannot_be_written_is_read_and_the_other_way_round() -> None:
    reading, writing = {"get", "exists"}, {"put", "touch", "delete", "quarantine"}
    for failing in (writing, reading):
        clock, tier = Clock(), OneWay(failing)
        breaker = Breaker(tier, jitter=0.0, clock=clock, in_background=False)
        for _ in range(2):
            answers = ask_all(breaker)
            assert [isinstance(answer, TierUnavailable) for answer in answers] == (
                [True, False, False, True, True, True]
                if failing is writing
                else [False, True, True, False, False, False]
            )
        failed, other = (breaker.writes, breaker.reads) if failing is writing else (breaker.reads, breaker.writes)
        assert failed.is_open and failed.opened == 1 and failed.reason == "not this way"
        assert not other.is_open and other.opened == 0
        clock.now += 1
        assert not breaker.probe_if_due()
        tier.failing = set()
        clock.now += 1
        assert breaker.probe_if_due() and not breaker.is_open
        assert bytes(32) not in tier.entries, "the probe left something"


def test_a_probe_of_writing_that_may_not_delete_is_an_answer_all_the_same() -> None:
    clock, tier = Clock(), OneWay({"put", "delete"})
    breaker = Breaker(tier, jitter=0.0, clock=clock, in_background=False)
    with pytest.raises(TierUnavailable):
        breaker.put_many({KEY: b"entry"}, Deadline(1))
    tier.failing = {"delete"}
    clock.now += 1
    assert breaker.probe_if_due()


def test_a_failing_tier_is_logged_once_then_once_a_minute_and_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    clock, tier = Clock(), TroubledTier()
    breaker = Breaker(tier, jitter=0.0, clock=clock, in_background=False)
    tier.error = TierUnavailable("the cable is out")

    def said() -> list[str]:
        messages = [record.message for record in caplog.records]
        caplog.clear()
        return messages

    for _ in range(59):
        with pytest.raises(TierUnavailable):
            breaker.get_many([KEY], Deadline(1))
        clock.now += 1
        breaker.probe_if_due()
    text = "the troubled tier cannot be read; it is left alone until it answers again: the cable is out"
    assert said() == [text]
    for _ in range(60):
        clock.now += 1
        breaker.probe_if_due()
    assert said() == [f"{text} (59 times more in the last 60 s)"]
    tier.error = None
    clock.now += 1
    assert breaker.probe_if_due()
    assert said() == ["the troubled tier can be read again"]
    for _ in range(20):  # it comes and goes, which is said once; that is a minute after it was said before
        tier.error = TierUnavailable("the cable is out")
        with pytest.raises(TierUnavailable):
            breaker.get_many([KEY], Deadline(1))
        tier.error = None
        clock.now += 1
        assert breaker.probe_if_due()
    assert [message[:40] for message in said()] == [text[:40], "the troubled tier can be read again"]
    clock.now += 60
    tier.error = TierUnavailable("the cable is out")
    with pytest.raises(TierUnavailable):
        breaker.get_many([KEY], Deadline(1))
    [message] = said()
    assert message.startswith(text) and "more in the last" in message


def test_what_is_said_of_many_subjects_is_remembered_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(logging.getLogger("kvmosaic"), clock=Clock())
    for number in range(1000):
        assert notices.warn(number, "again")
        assert not notices.warn(number, "again")
        notices.warn_once(f"once {number}", "once")
    assert len(caplog.records) == 2000 and len(notices._said) <= 256
