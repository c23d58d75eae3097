"""Learning-rate schedules, and the rates on the device that a captured step reads."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hotlap.core.errors import JobError, TrainingError
from hotlap.engine.capture.recording import intended_wait
from hotlap.engine.optimizers import recording


class Schedule:
    """A torch schedule, and when it moves."""

    def __init__(self, scheduler: Any, per: str = "update", make: Callable[[int], Any] | None = None) -> None:
        """`make` gives the schedule anew for another number of moves, where that is possible."""
        self.scheduler = scheduler
        self._make = make
        self.waits_for_plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.moves_per_update = scheduler is not None and per == "update" and not self.waits_for_plateau
        self._moves_per_epoch = scheduler is not None and per == "epoch" and not self.waits_for_plateau

    @property
    def spans_the_run(self) -> bool:
        """Whether it is made for a number of moves, and can be made again for another."""
        return self._make is not None and type(getattr(self.scheduler, "last_epoch", None)) is int

    def span(self, length: int) -> None:
        """Make it again for so many moves, and take it to where it stands."""
        assert self._make is not None, "it spans no run"
        moved, self.scheduler = self.scheduler.last_epoch, self._make(length)
        for _ in range(min(moved, length)):
            self.move()

    def move(self) -> None:
        """One step of the schedule."""
        try:
            self.scheduler.step()
        except ValueError as error:
            raise TrainingError(
                f"the schedule {type(self.scheduler).__name__} cannot go on: {error}; make it for as many updates "
                "as there are: schedule=lambda optimizer, updates: …"
            ) from error

    def epoch_ended(self) -> None:
        """Move, if the schedule moves by epochs."""
        if self._moves_per_epoch:
            self.move()

    def evaluated(self, score: float) -> None:
        """Move, if the schedule waits for a plateau."""
        if self.waits_for_plateau:
            self.scheduler.step(score)


def make_schedule(wanted: Any, optimizer: Optimizer, length: int | None, per: str = "update") -> Schedule:
    """The schedule of a training. A function gets the optimizer, and `length` if it takes two arguments.

    `length` is the number of moves: updates or epochs.
    """
    if wanted is None or isinstance(wanted, (LRScheduler, ReduceLROnPlateau)):
        return Schedule(wanted, per)
    two = takes_two(wanted)
    if two and length is None:
        raise JobError([f"schedule takes (optimizer, {per}s), but the number of {per}s is not known"])
    first = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    made = wanted(optimizer, length) if two else wanted(optimizer)
    if not hasattr(made, "step") or not hasattr(made, "state_dict"):
        raise JobError([f"schedule returned {type(made).__name__}, not a learning-rate scheduler"])

    def make(length: int) -> Any:
        for group, was in zip(optimizer.param_groups, first, strict=True):
            for name in _BY_SCHEDULE & group.keys():
                group.pop(name)
            group.update({name: was[name] for name in _BY_SCHEDULE & was.keys()})
        # A schedule that moves before the first update would warn.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return wanted(optimizer, length)

    can_be_made_again = two and not any(_is_tensor(group["lr"]) for group in optimizer.param_groups)
    return Schedule(made, per, make if can_be_made_again else None)


_BY_SCHEDULE = {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum"}
"""Settings of an optimizer's group that schedules change or add."""


def takes_two(function: Any) -> bool:
    """Whether a function needs a second positional argument."""
    try:
        required = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
    except ValueError:
        return False
    return len(required) >= 2


# --- rates on the device -------------------------------------------------------------------------------


AHEAD = 256
"""Updates for which a counted schedule is computed in advance. After that many the host waits once, to learn how many
were made. Until then the schedule must depend on their number alone."""
LOOKED_AT = 1024
"""Moves of a schedule that are tried, to see which settings it changes."""


class Rates:
    """The learning rates of the next updates, a row each, and the schedule that moves them.

    The optimizer's groups keep plain numbers; nothing changes for the host and the schedule.

    If every update is made, the host knows each rate and moves the schedule as it writes the rows. If the device may
    skip updates (`counted`), only the device knows the schedule's position: it counts real updates and reads its row by
    that count. The host catches up when it settles.
    """

    def __init__(
        self, optimizer: Optimizer, schedule: Schedule, device: torch.device, *, updates: int, counted: bool
    ) -> None:
        self._optimizer, self._schedule, self._device = optimizer, schedule, device
        self.counted = counted and schedule.moves_per_update
        self._rows = max(AHEAD, updates)
        self._made = torch.zeros(1, dtype=torch.int64, device=device)
        self._asked = 0
        self._make_room()

    def _make_room(self) -> None:
        groups = len(self._optimizer.param_groups)
        self._table = torch.zeros(self._rows, groups, device=self._device)
        self._row = torch.zeros(1, groups, device=self._device)
        self._written: list[list[float]] = []

    def write(self, updates: int) -> None:
        """Write the rates of the next updates to the device without waiting for it. Call `ended` after them."""
        if len(self._optimizer.param_groups) != self._table.shape[1]:
            self.settle()
            self._make_room()
        if self.counted:
            self._write_counted(updates)
            return
        rows = [self._now()]
        for _ in range(updates - 1):
            self._move()
            rows.append(self._now())
        if rows != self._written[:updates]:
            self._send(rows + self._written[updates:])

    def ended(self) -> None:
        """Move the schedule to the next update, once updates are made or launched."""
        if not self.counted:
            self._move()

    def _move(self) -> None:
        if self._schedule.moves_per_update:
            # Its first step has run or is about to; a schedule that moves before it would warn.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            self._schedule.move()

    def _write_counted(self, updates: int) -> None:
        now = self._now()
        changed = self._written and self._written[0] != now
        if changed:
            # The user has set a rate: updates so far use the old one, later ones the new one.
            for group, old in zip(self._optimizer.param_groups, self._written[0], strict=True):
                group["lr"] = old
            old_rates = self._written[0]
            self.settle()
            for group, new, old in zip(self._optimizer.param_groups, now, old_rates, strict=True):
                if new != old:
                    group["lr"] = new
        if not self._written or self._asked + updates > AHEAD:
            self.settle()
            self._send(self._rates_ahead(max(AHEAD, updates)))
        self._asked += updates

    def given(self, update: int) -> AbstractContextManager[None]:
        """Inside, the optimizer reads the rates of the `update`-th row; if counted, of the row that it has reached."""
        row = self._row[0] if self.counted else self._table[update]
        if self.counted:
            torch.index_select(self._table, 0, self._made, out=self._row)
        return recording(self._optimizer, row.unbind())

    def made(self, found_inf: Tensor | None) -> None:
        """Count an update, unless it was skipped."""
        if self.counted and found_inf is not None:
            self._made.add_((found_inf == 0).reshape(1))

    def settle(self) -> None:
        """Move the schedule to the device's position; waits for the device."""
        if not self.counted or not self._asked:
            return
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        with intended_wait():
            made = int(self._made)
        for _ in range(made):
            self._schedule.move()
        self._written, self._asked = [], 0

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _rates_ahead(self, count: int) -> list[list[float]]:
        """The rates of the next updates, from a schedule that is restored afterwards."""
        rows = []
        with _Restored(self._optimizer, self._schedule.scheduler):
            for _ in range(count):
                rows.append(self._now())
                try:
                    self._schedule.scheduler.step()
                except ValueError:  # its end; going beyond it raises when the schedule really moves
                    rows += [rows[-1]] * (count - len(rows))
                    break
        self._made.zero_()
        return rows

    def _send(self, rows: list[list[float]]) -> None:
        on_gpu = self._device.type == "cuda"
        # A copy from pageable memory would wait for everything queued before.
        here = torch.tensor(rows, dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        self._table[: len(rows)].copy_(here, non_blocking=True)
        self._written = rows


def moves_rates_only(schedule: Schedule, optimizer: Optimizer) -> bool:
    """Whether a schedule changes learning rates only. Some change the momentum too."""
    if not schedule.moves_per_update:
        return True
    with _Restored(optimizer, schedule.scheduler):
        before = [_others(group) for group in optimizer.param_groups]
        for _ in range(LOOKED_AT):
            try:
                schedule.scheduler.step()
            except ValueError:  # its end
                return True
            if before != [_others(group) for group in optimizer.param_groups]:
                return False
        return True


def _others(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "lr") and not _is_tensor(value)}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class _Restored:
    """Restores the schedule, whatever it does inside."""

    def __init__(self, optimizer: Optimizer, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler

    def __enter__(self) -> None:
        self._state = copy.deepcopy(self._scheduler.state_dict())
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        self._called = getattr(self._optimizer, "_opt_called", None)
        # A schedule that moves before the first update would warn.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        self._scheduler.load_state_dict(self._state)
        for group, was in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(was)
        if self._called is None:
            del self._optimizer._opt_called  # type: ignore[attr-defined]
        else:
            self._optimizer._opt_called = self._called  # type: ignore[attr-defined]
