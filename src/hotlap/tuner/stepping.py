"""Steps from one moment of a training under one plan, and what is found out of those that others are held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hotlap import machine
from hotlap.core.plan import Plan
from hotlap.engine.rig import Place, Rig
from hotlap.engine.snapshot import rate_name
from hotlap.engine.step import Window
from hotlap.tuner.gradients import Gaps, Outcome, gaps_between, mean_outcome, whole
from hotlap.tuner.moment import Moment, Windows
from hotlap.tuner.rounding import Noise, noise_of

MOST_RUNS = 6
"""Runs until a plan that records is at its pace: some to warm up, one to record."""
ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""How far a product is off by rounding, at most and as a fraction."""
SUMMED = 64.0
"""How many times as far a sum of products in fp32 may be: it is rounded as often as it has parts. Sums of narrower
products are taken in fp32, which does not count beside them."""
DRAWN_APART = 1e-3
"""Gradients of two draws that differ by more, as a fraction, were drawn from other randomness."""
STEADY = 0.25
"""As a fraction of what another draw changes: runs that differ by more did not draw the same."""


class Stepping:
    """Updates from one moment under one plan."""

    def __init__(self, rig: Rig, moment: Moment, plan: Plan, windows: Windows | None) -> None:
        """Of these windows; None where the plan's own feed holds them on the device."""
        self._rig, self._moment, self._plan, self.windows = rig, moment, plan, windows

    @property
    def plan(self) -> Plan:
        """What the rig obeys meanwhile."""
        return self._moment.stepped(self._plan)

    def run(self, first: int, updates: int, **how: Any) -> Outcome:
        """Make so many updates, from this window on; `how` as `Moment.run` has it."""
        return self._moment.run(self.plan, self._ahead(first, updates), **how)

    def at_pace(self, first: int, updates: int) -> Outcome:
        """As `run`, once the plan does what it will do from then on.

        What is recorded is recorded elsewhere in the data, lest a replay look right that reads what was there then.
        """
        rig, others = self._rig, [place for place in self._moment.places(updates) if place != first]
        elsewhere = others[-1] if others and self.windows is None else first
        settled = self.plan.execution.mode != "captured"
        for number in range(MOST_RUNS):
            recording = number < 2 and not settled
            rig.use(self.plan)
            before = rig.warmup_steps
            made = self.run(elsewhere if recording else first, updates)
            settled = rig.warmup_steps == before
            if settled and not recording:
                break
        return made

    def draws(self, count: int, updates: int) -> list[Outcome]:
        """So many times the same updates, each with randomness as the one before has left it."""
        first = self._moment.first
        return [self.run(first, updates, draws_on=number > 0, gradients_only=True) for number in range(count)]

    def _ahead(self, first: int, updates: int) -> Iterator[Window]:
        rig = self._rig
        if self.windows is None:
            rig.place = Place(rig.place.epoch, first, rig.place.served)
            yield from rig.windows(steps=rig.place.served + updates)
            return
        self.windows.bring(range(first, first + updates))
        for number in range(first, first + updates):
            yield self.windows.fresh(number)


class Reference(Stepping):
    """Steps that others are held against; what they do from one moment is found out once."""

    def __init__(self, rig: Rig, moment: Moment, plan: Plan, windows: Windows | None) -> None:
        super().__init__(rig, moment, plan, windows)
        self.roundoff = roundoff(rig.modules, rig.device, plan.numerics.precision)
        self._through: dict[tuple[int, int], Outcome] = {}
        self._noise: dict[tuple[int, int], Noise] = {}
        self._gradients: dict[int, Outcome] = {}
        self._rounding: dict[int, Gaps] = {}

    def through(self, first: int, updates: int) -> Outcome:
        """What so many updates do, from this window on."""
        if (first, updates) not in self._through:
            self._through[first, updates] = self.run(first, updates)
        return self._through[first, updates]

    def noise(self, first: int, updates: int) -> Noise:
        """How far rounding alone takes them."""
        if (first, updates) not in self._noise:
            truth = self.through(first, updates)
            nudged = self.run(first, updates, nudge=self.roundoff)
            self._noise[first, updates] = noise_of(truth, nudged, self.roundoff)
        return self._noise[first, updates]

    def gradients(self, window: int) -> Outcome:
        """The gradients of one update with the batch of this window."""
        if window not in self._gradients:
            self._gradients[window] = self.run(window, 1, gradients_only=True)
        return self._gradients[window]

    def rounding(self, window: int) -> Gaps:
        """How far rounding alone takes these gradients."""
        if window not in self._rounding:
            nudged = self.run(window, 1, nudge=self.roundoff, gradients_only=True)
            self._rounding[window] = gaps_between(self.gradients(window).gradients, nudged.gradients)
        return self._rounding[window]

    def mean_gradients(self, **how: Any) -> Outcome:
        """The mean over some batches of the gradients of one update each; `how` as `Moment.run` has it."""
        places = self._moment.places(1)
        return mean_outcome(self.run(place, 1, gradients_only=True, **how) for place in places)

    def another_batch(self, than: int) -> Outcome | None:
        """The gradients of another batch than that window's, from the same weights; None where there is no other."""
        others = [number for number in self._moment.places(1) if number != than]
        return self.gradients(others[0]) if others else None

    @cached_property
    def _drawn(self) -> tuple[float, float]:
        """How far one update is from itself made again, and from one with other randomness, as fractions."""
        first = self._moment.first
        truth = self.gradients(first)
        again = _apart(truth, self.run(first, 1, gradients_only=True))
        return again, _apart(truth, self.run(first, 1, draws_on=True, gradients_only=True))

    @property
    def apart(self) -> float:
        """How far another draw of the randomness takes a gradient, as a fraction."""
        return self._drawn[1]

    @property
    def is_random(self) -> bool:
        """Whether the training draws: dropout, augmentation on the device."""
        return max(self._drawn) > max(DRAWN_APART, 8 * self.roundoff)

    @property
    def is_steady(self) -> bool:
        """Whether the same randomness gives the same gradients; cuDNN's recurrent layers draw from their own."""
        return not self.is_random or self._drawn[0] <= STEADY * self._drawn[1]


def _apart(one: Outcome, other: Outcome) -> float:
    found: Gaps = gaps_between(one.gradients, other.gradients)
    return whole(found).relative if found else 0.0


def roundoff(modules: Sequence[nn.Module], device: torch.device, precision: str) -> float:
    """How far rounding takes what a layer computes in this precision, as a fraction."""
    if precision == "fp32" and not _takes_tf32(modules, device):
        return SUMMED * ROUNDOFF["fp32"]
    return ROUNDOFF["tf32" if precision == "fp32" else precision]


def _takes_tf32(modules: Sequence[nn.Module], device: torch.device) -> bool:
    """Whether the user lets the GPU round products of fp32; torch does so in convolutions and RNNs unless told."""
    if device.type != "cuda" or machine.dtype_fact(device, "tf32").support is not machine.Support.HARDWARE:
        return False
    layers = [type(layer) for module in modules for layer in module.modules()]
    by_cudnn = any(issubclass(kind, (nn.modules.conv._ConvNd, nn.RNNBase)) for kind in layers)
    return (by_cudnn and _is_on(torch.backends.cudnn)) or _is_on(torch.backends.cuda.matmul)


def _is_on(switch: Any) -> bool:
    try:
        return bool(switch.allow_tf32)
    except RuntimeError:  # the newer switches say another thing, for some of it at least
        return True


@contextmanager
def without_dropout(modules: Iterable[nn.Module]) -> Iterator[bool]:
    """Inside, layers of torch that drop drop nothing; gives whether there are any. Captures know them for others."""
    named = [(layer, rate_name(layer)) for module in modules for layer in module.modules()]
    rates = [(layer, name, getattr(layer, name)) for layer, name in named if name is not None]
    found = [(layer, name, rate) for layer, name, rate in rates if rate > 0]
    try:
        for layer, name, _ in found:
            setattr(layer, name, 0.0)
        yield bool(found)
    finally:
        for layer, name, rate in found:
            setattr(layer, name, rate)
