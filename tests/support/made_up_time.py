"""Time that passes by what a training does, in place of the machine's: what a tuner finds depends on nothing else."""

import random
import sys
import time
from types import SimpleNamespace

import torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from hotlap.tuner.laps import LapClock

TIMED = ("hotlap.tuner.", "hotlap.fitting.", "hotlap.script.", "hotlap.searching.")
"""Modules that time trainings, by how their names begin."""
SAMPLE_S = 5e-5
"""What a loader takes for a sample, in the process that trains; out of memory it takes nothing."""
STEP_S = 2e-4
"""What a backward pass takes."""


class MadeUpTime:
    """Stands in for `time.perf_counter` where trainings are timed; a little passes with every look at it."""

    def __init__(self):
        self.now_s, self._chance = 1000.0, random.Random(0)

    def __call__(self):
        self.now_s += 1e-6
        return self.now_s

    def passes(self, seconds):
        """As steps do, of which no two take as long."""
        self.now_s += seconds * self._chance.lognormvariate(0, 0.01)


def make_up_time(monkeypatch):
    """Have time pass so until the monkeypatch is undone."""
    made, fetch, backward = MadeUpTime(), _MapDatasetFetcher.fetch, torch.autograd.backward

    def fetched(fetcher, indices):
        made.passes(SAMPLE_S * len(indices))
        return fetch(fetcher, indices)

    def went_back(*args, **settings):
        made.passes(STEP_S)
        return backward(*args, **settings)

    clock = SimpleNamespace(**{**vars(time), "perf_counter": made})
    for name, module in sys.modules.items():
        if name.startswith(TIMED) and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", clock)
    monkeypatch.setitem(LapClock.__init__.__kwdefaults__, "clock", made)
    monkeypatch.setattr(_MapDatasetFetcher, "fetch", fetched)
    monkeypatch.setattr(torch.autograd, "backward", went_back)
    return made
