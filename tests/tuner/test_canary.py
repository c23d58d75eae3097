"""The canary: when it looks, what it takes for drift, and which plan it goes back to."""

from types import SimpleNamespace

import pytest

from hotlap.core.plan import Feed, Plan
from hotlap.tuner import tuner
from hotlap.tuner.gates import Judgement
from hotlap.tuner.tuner import FIRST_S, QUIET, SHARE, SOON_S, STORM_STEPS, Canary

OWN = Plan()
EXACT = OWN.but(optimizer="fused")
TUNED = EXACT.but(precision="bf16")


class Training:
    """A training that makes steps, a gate that answers as a test says, and the clock of both."""

    def __init__(self):
        self.now_s, self.steps, self.skipped, self.plan, self.told = 1000.0, 100, 0, TUNED, []
        self.is_good, self.asked, self.look_s, self.forgot = lambda plan: True, [], 0.0, 0
        self.allowed_plan, self.is_ready = lambda plan: plan, True

    def perf_counter(self):
        return self.now_s

    def use(self, plan, why):
        self.plan = plan

    def write_down(self, what, outcome, why):
        self.told.append((what, outcome, why))

    def check(self, plan):
        self.asked.append((self.steps, plan))
        self.now_s += self.look_s
        return Judgement(ok=self.is_good(plan), why="gradients differ")

    def forget(self):
        self.forgot += 1

    def step(self, watcher, after_s=0.0):
        self.now_s += after_s
        self.steps += 1
        watcher.stepped()


@pytest.fixture
def training(monkeypatch):
    made = Training()
    monkeypatch.setattr(tuner, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


@pytest.fixture
def watcher(training):
    return Canary(training, training, plan=TUNED, baseline=OWN)


def looks_of(training):
    return [step for step, _ in training.asked]


def test_one_bad_look_is_not_enough(training, watcher):
    training.step(watcher, FIRST_S)
    assert watcher.good == 101
    for _ in range(3):  # each followed by a good one
        training.is_good = lambda plan: False
        training.step(watcher, FIRST_S)
        training.is_good = lambda plan: True
        training.step(watcher)
    assert (watcher.plan, training.plan, watcher.drifted, training.told) == (TUNED, TUNED, None, [])
    assert watcher.good == training.steps


def test_after_a_bad_look_the_very_next_step_is_looked_at_and_a_second_one_is_drift(training, watcher):
    training.step(watcher, FIRST_S)
    training.is_good = lambda plan: plan != TUNED
    training.step(watcher, FIRST_S)
    assert watcher.drifted is None
    training.step(watcher)
    assert looks_of(training) == [101, 102, 103, 103]
    assert watcher.drifted == 101, "the last step at which they agreed"
    assert training.told == [("canary", "fault", "gradients differ")]
    assert training.forgot == 4


def test_it_goes_back_to_the_same_plan_in_the_users_precision_where_that_agrees(training, watcher):
    training.is_good = lambda plan: plan == EXACT
    training.step(watcher, FIRST_S)
    training.step(watcher)
    assert watcher.plan == training.plan == EXACT
    training.step(watcher, FIRST_S)
    assert training.asked[-1] == (103, EXACT), "which is watched as the other one was"


def test_it_goes_back_to_the_users_own_plan_where_nothing_else_agrees_and_looks_no_more(training, watcher):
    training.is_good = lambda plan: False
    training.step(watcher, FIRST_S)
    training.step(watcher)
    assert watcher.plan == training.plan == OWN
    assert watcher.drifted == 100, "where it was tuned"
    before = len(training.asked)
    training.step(watcher, 100 * FIRST_S)
    assert len(training.asked) == before
    assert not watcher.looks_soon


def test_the_users_own_precision_is_not_asked_for_where_the_plan_has_it(training):
    watcher = Canary(training, training, plan=EXACT, baseline=OWN)
    training.is_good = lambda plan: False
    training.step(watcher, FIRST_S)
    training.step(watcher)
    assert [plan for _, plan in training.asked] == [EXACT, EXACT]
    assert watcher.plan == OWN


def test_looking_takes_its_share_of_the_time_and_no_more(training, watcher):
    training.look_s = 2 * FIRST_S * SHARE
    training.step(watcher, 0.9 * FIRST_S)
    assert looks_of(training) == []
    training.step(watcher, 0.2 * FIRST_S)
    assert looks_of(training) == [102]
    training.step(watcher, 1.9 * FIRST_S)
    assert looks_of(training) == [102]
    training.step(watcher, 0.2 * FIRST_S)
    assert looks_of(training) == [102, 104]
    training.look_s = 0.0
    training.step(watcher, 2.1 * FIRST_S)
    training.step(watcher, 0.9 * FIRST_S)
    assert looks_of(training) == [102, 104, 105], "never more often than that"


def test_the_first_look_waits_for_as_long_as_a_look_is_known_to_take(training):
    watcher = Canary(training, training, plan=TUNED, baseline=OWN, takes_s=4 * FIRST_S * SHARE)
    training.step(watcher, 3.9 * FIRST_S)
    assert looks_of(training) == []
    training.step(watcher, 0.2 * FIRST_S)
    assert looks_of(training) == [102]


def test_a_look_is_announced_before_it_is_due(training):
    watcher = Canary(training, training, plan=TUNED, baseline=OWN, takes_s=10 * SOON_S * SHARE)
    training.now_s += 8.9 * SOON_S
    assert not watcher.looks_soon
    training.now_s += 0.2 * SOON_S
    assert watcher.looks_soon


@pytest.mark.parametrize(("precision", "share", "looks"), [("fp16", 0.6, 1), ("fp16", 0.4, 0), ("bf16", 0.6, 0)])
def test_a_storm_of_skipped_updates_in_fp16_is_looked_at_at_once(training, precision, share, looks):
    watcher = Canary(training, training, plan=TUNED.but(precision=precision), baseline=OWN)
    for _ in range(STORM_STEPS - 1):
        training.step(watcher)
    training.skipped = share * STORM_STEPS
    assert looks_of(training) == []
    training.step(watcher)
    assert len(training.asked) == looks


def test_a_feed_that_was_left_since_the_data_changed_is_not_looked_at(training):
    watcher = Canary(training, training, plan=TUNED.with_feed(Feed(kind="gather")), baseline=OWN)
    training.allowed_plan = lambda plan: plan.with_feed(OWN.feed)
    training.step(watcher, FIRST_S)
    assert [plan for _, plan in training.asked] == [TUNED]


def test_a_look_waits_until_there_is_something_to_compare(training, watcher):
    training.is_ready = False
    training.step(watcher, FIRST_S)
    training.step(watcher)
    assert looks_of(training) == []
    assert watcher.looks_soon
    assert watcher.quiet == 0, "so that the next step is seen"
    training.is_ready = True
    training.step(watcher)
    assert looks_of(training) == [103]
    assert watcher.quiet == QUIET
    training.now_s += FIRST_S - SOON_S / 2
    assert watcher.quiet == 0
