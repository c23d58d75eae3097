"""Learning rates on the device, where a captured step, or one that may leave its update out, reads them."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotlap.engine.optimizers import recording
from hotlap.engine.schedules import Schedule
from hotlap.engine.watch import meant

AHEAD = 256
"""Updates for which a counted schedule is drawn up at once: after as many the host waits once, to learn how many were
made. Until then a schedule has to be a function of their number alone."""
LOOKED_AT = 1024
"""Moves of a schedule that are tried to see what it moves."""


class Rates:
    """The learning rates of the updates to come, a row each, and the schedule that moves them.

    The optimizer's own groups keep plain numbers: for the host, and for the schedule, nothing is changed.

    Where every update is made, the host knows each one's rate: it moves the schedule as it writes the rows. Where
    the device may leave an update out (`counted`), only the device knows how far the schedule is: it counts real
    updates and reads its row by that, and the host follows when it settles.
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
        """Have the rates of the next updates on the device, without waiting for it; `ended` is called after them."""
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
        """The updates are made, or launched: the schedule moves on to the next one."""
        if not self.counted:
            self._move()

    def _move(self) -> None:
        if self._schedule.moves_per_update:
            # Its first step is there or about to come; a schedule that moves before it would warn.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            self._schedule.move()

    def _write_counted(self, updates: int) -> None:
        now = self._now()
        changed = self._written and self._written[0] != now
        if changed:
            # The user has set a rate: the updates made so far go by the old one, those to come by the new.
            for group, old in zip(self._optimizer.param_groups, self._written[0], strict=True):
                group["lr"] = old
            old_rates = self._written[0]
            self.settle()
            for group, new, old in zip(self._optimizer.param_groups, now, old_rates, strict=True):
                if new != old:
                    group["lr"] = new
        if not self._written or self._asked + updates > AHEAD:
            self.settle()
            self._send(self._drawn_up(max(AHEAD, updates)))
        self._asked += updates

    def given(self, update: int) -> AbstractContextManager[None]:
        """Inside, the optimizer reads the rates of the `update`-th row; with a count, of the row it has reached."""
        row = self._row[0] if self.counted else self._table[update]
        if self.counted:
            torch.index_select(self._table, 0, self._made, out=self._row)
        return recording(self._optimizer, row.unbind())

    def made(self, found_inf: Tensor | None) -> None:
        """Count an update, unless it was left out."""
        if self.counted and found_inf is not None:
            self._made.add_((found_inf == 0).reshape(1))

    def settle(self) -> None:
        """Move the schedule as far as the device has come; waits for it."""
        if not self.counted or not self._asked:
            return
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        with meant():
            made = int(self._made)
        for _ in range(made):
            self._schedule.move()
        self._written, self._asked = [], 0

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _drawn_up(self, count: int) -> list[list[float]]:
        """The rates of the updates to come, from a schedule that is put back afterwards."""
        rows = []
        with _PutBack(self._optimizer, self._schedule.scheduler):
            for _ in range(count):
                rows.append(self._now())
                try:
                    self._schedule.scheduler.step()
                except ValueError:  # its end; who goes beyond it is told when the schedule really moves
                    rows += [rows[-1]] * (count - len(rows))
                    break
        self._made.zero_()
        return rows

    def _send(self, rows: list[list[float]]) -> None:
        on_gpu = self._device.type == "cuda"
        # A copy from pageable memory would wait for all that was launched before.
        here = torch.tensor(rows, dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        self._table[: len(rows)].copy_(here, non_blocking=True)
        self._written = rows


def moves_rates_only(schedule: Schedule, optimizer: Optimizer) -> bool:
    """Whether a schedule leaves everything but learning rates as it is (some move the momentum too)."""
    if not schedule.moves_per_update:
        return True
    with _PutBack(optimizer, schedule.scheduler):
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


class _PutBack:
    """Whatever the schedule does inside is undone afterwards."""

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
