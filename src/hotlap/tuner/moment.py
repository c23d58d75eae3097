"""One moment of a training, from which updates are made again and again, under one plan and another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.plan import Plan
from hotlap.data.batches import map_tensors
from hotlap.data.resident import PendingRows
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import Randomness
from hotlap.engine.step import Window
from hotlap.tuner.allowance import check_allowed
from hotlap.tuner.gradients import Outcome, brought_near, gaps_between

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


class Windows:
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
        self.windows = Windows(rig, baseline)
        """As the user's own plan brings them."""
        self._scale: Any = None
        # Where the device's randomness must not be set, it must not be without dropout either, on behalf of captures.
        self._device_draws_on = rig.draws_on
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
        randomness = Randomness(rig.device, host_only=self._device_draws_on) if draws_on else None
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
