"""One moment of a training, from which updates are made again and again, under one plan and another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hotlap import machine
from hotlap.core.plan import Plan
from hotlap.core.torch_private import ConvBase
from hotlap.data.batches import map_tensors
from hotlap.data.resident import PendingRows
from hotlap.engine.assists.attention import WithoutPoorMasks
from hotlap.engine.rig import Place, Rig
from hotlap.engine.snapshot import Randomness, rate_name
from hotlap.engine.step import Window
from hotlap.tuner.agreement import Gaps, Noise, Outcome, brought_near, gaps_between, mean_outcome, noise_of, whole
from hotlap.tuner.budget import check_allowed

MOST_UPDATES = 32
"""Updates that are compared at most; a plan that replays more at once is judged with so many."""
LEAST_UPDATES = 2
"""At least: the second one needs what the first has left, in the optimizer, the randomness and the data."""
FIRST_UPDATES = 3
"""Updates made before anything is compared where the optimizer has made none yet, and has no state."""
PLACES = 3
"""Places in the data at which steps are compared at most: where one differs, the next is asked. Rounding may put an
activation on the other side of zero now and then, which changes more than rounding does; a fault is there each time."""
MOST_SETTLING = 20
"""Updates in which the scale of fp16 has to settle: from its start to 1 takes 16 that are left out."""


class TrialWindows:
    """Windows of the current epoch as a plan brings them, each brought once, by their numbers."""

    def __init__(self, rig: Rig, plan: Plan) -> None:
        self._rig, self._plan = rig, plan
        self._brought: dict[int, Window] = {}

    def bring(self, numbers: Iterable[int]) -> None:
        """Have these at hand; in one go, since workers may have to start for it."""
        missing = sorted(set(numbers) - self._brought.keys())
        if not missing:
            return
        with closing(self._rig.look(self._plan, missing)) as windows:
            for number, window in zip(missing, windows, strict=False):
                check_allowed()
                self._brought[number] = window

    def __contains__(self, number: int) -> bool:
        return number in self._brought

    def __getitem__(self, number: int) -> Window:
        return self._brought[number]

    def fresh(self, number: int) -> Window:
        """A window that a step may write to: the user's code may change batches in place."""
        if number not in self._brought:
            self.bring([number])
        window, device = self._brought[number], self._rig.device

        def copied(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.device.type == device.type else tensor

        pieces = [piece if isinstance(piece, PendingRows) else map_tensors(piece, copied) for piece in window.pieces]
        return Window(pieces, window.sizes, window.all_count, window.updates)


class Moment:
    """Where a training stands; to be used inside `rig.aside`."""

    def __init__(self, rig: Rig, baseline: Plan) -> None:
        self._rig = rig
        self.home = rig.plan.feed
        """The feed in force, which stays at work while windows are handed to the rig."""
        self.length = rig.windows_here
        """Windows in the epoch."""
        # Far enough from the end of the epoch for all that is compared; another place in the data is as good as this.
        self.first = min(rig.place.window, max(0, self.length - 1 - MOST_UPDATES))
        self.windows = TrialWindows(rig, baseline)
        """As the user's own plan brings them."""
        self._scale: Any = None
        if not rig.steps:
            rig.use(self.stepped(baseline))
            for number in range(self.first, min(self.first + FIRST_UPDATES, self.length)):
                rig.advance(self.windows.fresh(number))
        self._start, self._remembered = rig.snapshot(), rig.python_state()
        self._weights = {name: tensor.detach().clone() for name, tensor in _named(rig)}

    def updates_of(self, plan: Plan) -> int:
        """How many updates are compared under a plan: what it replays at once, as far as the epoch has them."""
        wanted = min(max(plan.execution.replay_steps, LEAST_UPDATES), MOST_UPDATES)
        return max(1, min(wanted, self.length - self.first))

    def places(self, updates: int) -> list[int]:
        """Windows from which as many updates can be made, none of them twice; this moment's own is the first."""
        starts = range(self.first, self.first + PLACES * updates, updates)
        return [start for start in starts if start == self.first or start + updates < self.length]

    def stepped(self, plan: Plan) -> Plan:
        """The plan with the feed in force, where its windows are handed to the rig; held ones the rig has to bring."""
        return plan if plan.feed.kind == "resident" else plan.with_feed(self.home)

    @cached_property
    def grain(self) -> dict[str, float]:
        """How finely each weight and buffer is written: the length of one unit in the last place of all its numbers."""
        fractions = {name: tensor for name, tensor in self._weights.items() if tensor.is_floating_point()}
        sizes = gaps_between(fractions, {})
        return {name: gap.size * torch.finfo(fractions[name].dtype).eps for name, gap in sizes.items()}

    def run(
        self,
        plan: Plan,
        windows: Iterable[Window],
        *,
        nudge: float = 0.0,
        nudge_seed: int = 1,
        draws_on: bool = False,
        gradients_only: bool = False,
    ) -> Outcome:
        """Make the updates of these windows from here under a plan.

        With `nudge` every weight is moved by that fraction of itself first, up or down at random; with `draws_on`
        randomness goes on from where the last run left it; with `gradients_only` nothing else is kept, which spares
        memory.
        """
        check_allowed()
        rig = self._rig
        rig.use(plan)
        randomness = Randomness(rig.device) if draws_on else None
        rig.restore(self._start)
        self._remembered.restore(generators=not draws_on)
        if plan.numerics.precision == "fp16" and self._scale is not None:
            rig.guards.put_back(self._scale)
        if randomness is not None:
            randomness.restore()
        start = self._nudged(nudge, nudge_seed) if nudge else self._weights
        skipped = rig.skipped
        losses = [rig.advance(window).detach().clone() for window in windows]
        skipped = rig.skipped - skipped
        course = tuple(torch.stack(losses).tolist())
        if gradients_only:
            return Outcome(loss=course[-1], losses=course, gradients=_gradients(rig), skipped=skipped)
        return self._outcome(course, start, skipped)

    def settle_scale(self, plan: Plan) -> str | None:
        """Find the scale that fp16 needs from here; why there is none, where updates keep being left out."""
        rig, numbers = self._rig, range(self.first, self.first + min(LEAST_UPDATES, self.length - self.first))
        rig.use(self.stepped(plan))
        rig.restore(self._start)
        self._remembered.restore()
        made, before = 0, rig.skipped
        for number in range(MOST_SETTLING):
            skipped = rig.skipped
            rig.advance(self.windows.fresh(numbers[number % len(numbers)]))
            made = made + 1 if rig.skipped == skipped else 0
            if made == LEAST_UPDATES:
                self._scale = rig.guards.saved()
                return None
        return f"{rig.skipped - before} of {MOST_SETTLING} updates are left out, since gradients overflow in fp16"

    def _nudged(self, by: float, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator(self._rig.device).manual_seed(seed)
        found = {}
        with torch.no_grad():
            for name, tensor in _named(self._rig):
                if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                    least = torch.finfo(tensor.dtype).eps / 2
                    sign = torch.empty_like(tensor).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
                    # Not by a factor: 1 + 2**-24 is 1.
                    tensor.add_(sign.mul_(tensor), alpha=max(by, least))
                found[name] = tensor.detach().clone()
        return found

    def _outcome(self, losses: tuple[float, ...], start: Mapping[str, Tensor], skipped: int) -> Outcome:
        named = dict(_named(self._rig))
        parameters = {
            name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) or tensor.requires_grad
        }
        now, before = brought_near(named, start)
        moved = {n: _moved(t, before[n]) for n, t in now.items() if t.is_floating_point() or t.is_complex()}
        return Outcome(
            loss=losses[-1],
            losses=losses,
            gradients=_gradients(self._rig),
            weights={name: tensor for name, tensor in moved.items() if name in parameters},
            buffers={name: tensor for name, tensor in moved.items() if name not in parameters},
            counts={name: tensor.clone() for name, tensor in now.items() if name not in moved},
            skipped=skipped,
        )


def _named(rig: Rig) -> Iterator[tuple[str, Tensor]]:
    """All that is trained or remembered, by name; tensors that only the optimizer knows by number."""
    seen: set[int] = set()
    for number, module in enumerate(rig.modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            seen.add(id(tensor))
            yield f"loss.{name}" if number else name, tensor
    for number, tensor in enumerate(p for group in rig.optimizer.param_groups for p in group["params"]):
        if id(tensor) not in seen:
            yield f"parameter {number}", tensor


def _gradients(rig: Rig) -> dict[str, Tensor]:
    found = ((name, tensor.grad) for name, tensor in _named(rig) if tensor.grad is not None)
    return {name: (g if g.layout is torch.strided else g.to_dense()).detach().clone() for name, g in found}


def _moved(now: Tensor, before: Tensor) -> Tensor:
    moved = now - before
    # A mask holds infinities, of which the difference is no number.
    return torch.where((now == before) | (now.isnan() & before.isnan()), torch.zeros_like(moved), moved)


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

    def __init__(self, rig: Rig, moment: Moment, plan: Plan, windows: TrialWindows | None) -> None:
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

    def __init__(self, rig: Rig, moment: Moment, plan: Plan, windows: TrialWindows | None) -> None:
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
    """Whether the user lets the GPU round products of fp32; torch does so in convolutions and RNNs by default."""
    if device.type != "cuda" or machine.dtype_fact(device, "tf32").support is not machine.Support.HARDWARE:
        return False
    layers = [type(layer) for module in modules for layer in module.modules()]
    by_cudnn = any(issubclass(kind, (ConvBase, nn.RNNBase)) for kind in layers)
    return (by_cudnn and _is_on(torch.backends.cudnn)) or _is_on(torch.backends.cuda.matmul)


def _is_on(switch: Any) -> bool:
    try:
        return bool(switch.allow_tf32)
    except RuntimeError:  # the newer switches say another thing, for some of it at least
        return True


@contextmanager
def without_dropout(modules: Iterable[nn.Module]) -> Iterator[bool]:
    """Inside, layers of torch that drop drop nothing; gives whether there are any. Captures know them for others.

    Without dropout torch may choose another kernel for attention, which no step of the training uses and which takes a
    second to set up: it is left out.
    """
    named = [(layer, rate_name(layer)) for module in modules for layer in module.modules()]
    rates = [(layer, name, getattr(layer, name)) for layer, name in named if name is not None]
    found = [(layer, name, rate) for layer, name, rate in rates if rate > 0]
    try:
        for layer, name, _ in found:
            setattr(layer, name, 0.0)
        with WithoutPoorMasks() if found else nullcontext():
            yield bool(found)
    finally:
        for layer, name, rate in found:
            setattr(layer, name, rate)
