"""The breaker against a twin that is obviously right, and against a real clock."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.tiers import TroubledTier

from kvmosaic.cache import Key
from kvmosaic.errors import InvalidConfig, TierFull, TierUnavailable
from kvmosaic.tiers import Deadline, Tier
from kvmosaic.tiers.breaker import Breaker, BreakerState

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
        lambda: list(tier.scan(Deadline(1))),
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

    @initialize(failures=st.integers(1, 3))
    def begin(self, failures: int) -> None:
        self.clock, self.tier, self.failures = Clock(), TroubledTier(), failures
        self.breaker = Breaker(self.tier, failures=failures, jitter=0.0, clock=self.clock, in_background=False)
        self.is_open, self.in_a_row, self.next_probe = False, 0, 0.0
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
            self.in_a_row += 1
            if self.in_a_row == self.failures:
                self.is_open, self.opened, self.next_probe = True, self.opened + 1, self.clock.now + 1.0
        else:
            self.in_a_row = 0
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
                self.is_open, self.in_a_row = False, 0
        assert self.breaker.probe_if_due() == (not self.is_open)

    @invariant()
    def agree(self) -> None:
        stat = self.breaker.breaker_stat
        assert stat.state is (BreakerState.OPEN if self.is_open else BreakerState.CLOSED)
        assert self.breaker.is_open == self.is_open
        assert (stat.opened, stat.skipped, stat.probes) == (self.opened, self.skipped, self.probes)


TestAgainstTwin = AgainstTwin.TestCase
TestAgainstTwin.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
    with pytest.raises(TierUnavailable, match=r"^the cable is out$"):
        breaker.touch([KEY], Deadline(1))
    assert all(isinstance(answer, TierUnavailable) and "the cable is out" in str(answer) for answer in ask_all(breaker))
    assert len(tier.calls) == 1
    assert breaker.breaker_stat.skipped == 7
    assert breaker.breaker_stat.reason == "the cable is out"


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


def test_a_failure_while_scanning_opens() -> None:
    class Broken(TroubledTier):
        def scan(self, deadline: Deadline):  # type: ignore[no-untyped-def]
            yield from super().scan(deadline)
            raise TierUnavailable("half way")

    tier = Broken()
    tier.entries[KEY] = b"entry"
    breaker = Breaker(tier, in_background=False)
    infos = breaker.scan(Deadline(1))
    assert next(infos).key == KEY
    with pytest.raises(TierUnavailable, match="half way"):
        next(infos)
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
    while breaker.breaker_stat.state is not BreakerState.HALF_OPEN:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert not breaker.probe_if_due()  # one at a time
    with pytest.raises(TierUnavailable):
        breaker.touch([KEY], Deadline(1))
    tier.gate.set()
    prober.join()
    assert breaker.breaker_stat.state is BreakerState.CLOSED
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
    assert breaker.breaker_stat.state is BreakerState.OPEN
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
        failed, end = breaker.breaker_stat.failed_probes, time.monotonic() + 60
        while breaker.breaker_stat.failed_probes == failed:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert breaker.is_open
        tier.error = None
        end = time.monotonic() + 60
        while breaker.is_open:
            assert time.monotonic() < end
            time.sleep(0.005)
    stat = breaker.breaker_stat
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


@pytest.mark.parametrize(
    "wrong", [{"failures": 0}, {"failures": 10**6}, {"interval_seconds": 0.0}, {"probe_seconds": -1.0}, {"jitter": 1.0}]
)
def test_numbers_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig, match=r"got"):
        Breaker(TroubledTier(), **wrong)  # type: ignore[arg-type]
