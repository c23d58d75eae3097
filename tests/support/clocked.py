"""A tuner in a loop on a clock of its own: every update, gate and look takes as long as a test says, on any machine."""

from __future__ import annotations

import functools
from random import Random
from types import SimpleNamespace

import torch
from plain import Computed, small_mlp
from torch import nn

from hotlap import Rig, Tuner
from hotlap.moves import FUSED, RESIDENT
from hotlap.tuner.gates import Judgement
from hotlap.tuner.laps import LapClock
from hotlap.tuner.probe import CountingProbe

OWN_S, HELD_S, FUSED_S = 0.010, 0.006, 0.010
"""Seconds an update: the user's own plan, with the data held, and with a fused optimizer, which gives nothing."""


class Gatekeeper:
    """Lets everything through, and takes its time."""

    updates, is_ready = 16, True

    def __init__(self, clock, takes_s=0.0):
        self._clock, self._takes_s, self.asked = clock, takes_s, []

    def check(self, plan, **limits):
        self.asked.append(plan)
        self._clock.now += self._takes_s
        return Judgement(ok=True, why="same maths")

    def forget(self):
        pass


class Clocked:
    """A training of which every update takes what `pace(plan)` says."""

    def __init__(self, monkeypatch, *, pace=None, gate_s=0.0, updates=1_000_000, data=None, coin=0, **settings):
        self.now = 100.0
        self.pace = pace or (lambda plan: HELD_S if plan.feed.kind == "resident" else OWN_S)
        here = SimpleNamespace(perf_counter=self)
        for module in ("tuner", "trials", "search", "search_state", "budget"):
            monkeypatch.setattr(f"hotlap.tuner.{module}.time", here)
        monkeypatch.setattr("hotlap.tuner.tuner.LapClock", functools.partial(LapClock, clock=self))
        monkeypatch.setattr("hotlap.tuner.trials.Random", lambda: Random(coin))
        monkeypatch.setattr("hotlap.tuner.probe.calibration", lambda device, known_only: None)
        monkeypatch.setattr("hotlap.tuner.search.MOVES", settings.pop("moves", (FUSED, RESIDENT)))
        monkeypatch.setattr("hotlap.tuner.search.OTHERS", ())
        monkeypatch.setattr(Rig, "holding_s", lambda rig, feed: 0.0)
        torch.manual_seed(0)
        self.rig = Rig(small_mlp(), lambda p: torch.optim.AdamW(p, lr=0.01), nn.CrossEntropyLoss(), device="cpu")
        next(self.rig.feed(Computed() if data is None else data, batch_size=8, epochs=100_000))
        self.gate = Gatekeeper(self, gate_s)
        probe = settings.pop("probe", None) or CountingProbe(self.rig)
        self.began = self.now
        self.tuner = Tuner(self.rig, updates=updates, gate=self.gate, probe=probe, **settings)

    def __call__(self):
        return self.now

    def train(self, updates):
        """Count so many updates; none is made."""
        for _ in range(updates):
            step_s = self.pace(self.rig.plan)
            self.now += 0.6 * step_s
            self.tuner.fed(0.6 * step_s)
            self.now += 0.4 * step_s
            self.rig.steps += 1
            self.tuner.stepped()

    @property
    def took_s(self):
        return self.now - self.began

    def figures(self, what="tuned"):
        """The last ones that the ledger has of this name."""
        return next(entry.figures for entry in reversed(list(self.rig.ledger)) if entry.what == what)
