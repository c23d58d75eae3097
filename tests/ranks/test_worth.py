"""Several ranks are used where they are seen to be faster. Time is made up where the verdict depends on it."""

import json
from types import SimpleNamespace

import pytest

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.ranks import worth
from hotlap.ranks.worth import SharedOrAlone
from hotlap.tuner.tuner import PlanChooser


class Timed:
    """A training whose steps take so many seconds, alone and shared."""

    def __init__(self, alone_s, shared_s):
        self.plan, self.ledger, self.steps, self.now_s = Plan(), Ledger(), 0, 0.0
        self._seconds = {1: alone_s, 2: shared_s}

    def supports(self, plan):
        return None

    def use(self, plan, *, why="", outcome="chosen"):
        self.plan = plan

    def wait(self):
        pass

    def step(self):
        self.steps += 1
        noise = 1 + 0.002 * (self.steps % 7)
        self.now_s += noise * self._seconds[self.plan.execution.ranks]


def verdict_on(monkeypatch, alone_s, shared_s, steps=20_000):
    rig = Timed(alone_s, shared_s)
    monkeypatch.setattr(worth, "time", SimpleNamespace(perf_counter=lambda: rig.now_s))
    chooser = SharedOrAlone(rig, PlanChooser(), 2, lambda: steps - rig.steps)
    while not chooser.done and rig.steps < steps:
        rig.step()
        chooser.stepped()
    (entry,) = [one for one in rig.ledger if one.what == "2 ranks"]
    return entry, rig.plan.execution.ranks


def test_ranks_that_are_faster_are_kept_with_ratio_and_interval_in_the_ledger(monkeypatch):
    entry, ranks = verdict_on(monkeypatch, alone_s=0.05, shared_s=0.03)
    assert (entry.outcome, ranks) == ("kept", 2)
    assert entry.figures["low"] <= entry.figures["ratio"] <= entry.figures["high"]
    assert entry.figures["ratio"] == pytest.approx(5 / 3, rel=0.05)


def test_ranks_that_are_not_faster_are_rejected_and_one_goes_on(monkeypatch):
    entry, ranks = verdict_on(monkeypatch, alone_s=0.05, shared_s=0.06)
    assert (entry.outcome, ranks) == ("rejected", 1)
    assert entry.figures["high"] < 1


def test_ranks_are_not_tried_where_finding_out_takes_longer_than_they_can_save(monkeypatch):
    entry, ranks = verdict_on(monkeypatch, alone_s=0.05, shared_s=0.03, steps=300)
    assert (entry.outcome, ranks) == ("not tried", 1)
    assert entry.why.startswith("finding out takes about ")


def test_laps_of_one_and_of_two_ranks_are_steps_of_the_training_itself(forks, tmp_path):
    code = """
import json, ranked
from hotlap.fitting import tuning
from hotlap.ranks import worth
ranked.by_forks()
tuning.Tuner = lambda *_, **__: tuning.PlanChooser()
worth.START_S, worth.LAP_S, worth.SHARE = 0.0, 0.001, 1e9
one = ranked.fitted("one", epochs=20)
two = ranked.fitted("two", epochs=20, gpus=2, plan="auto")
found = [e.outcome for e in two[0].ledger if e.what == "2 ranks"]
print(json.dumps([ranked.gap(one, two), found, max(e.plan.execution.ranks for e in two[0].ledger)]))
"""
    done = forks.run("-c", code, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    gap, found, ranks = json.loads(done.stdout)
    assert gap < 1e-10
    assert found in (["kept"], ["rejected"])
    assert ranks == 2
