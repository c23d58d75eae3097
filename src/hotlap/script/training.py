"""The loop of somebody's script as a training that obeys plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotlap.core.errors import PlanError, first_line
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Execution, Feed, Numerics, Plan
from hotlap.core.tricks import EARLY_ITEM, LOSS_WITHOUT_WAITING, ONE_THREAD_BACKWARD, REPLAYED_LOSS
from hotlap.data.sources import Source
from hotlap.engine.cursor import Place
from hotlap.moves import MOVES, OTHERS
from hotlap.script.busy import Busy
from hotlap.script.calls.call import Call
from hotlap.script.calls.endings import Endings
from hotlap.script.calls.readings import Readings
from hotlap.script.feed.serving import Serving
from hotlap.script.find.finder import ByHand, Loop
from hotlap.script.update.updates import Backwards, Updates

FEED_MOVES = tuple(move.name for move in (*MOVES, *OTHERS) if move.feeds)
"""Moves that bring batches another way."""
ENDLESS = 2**62
"""Windows in an epoch where nobody knows of any."""


class ScriptTraining:
    """A loop that somebody else's script makes; what it calls underneath obeys the plan."""

    def __init__(self, loop: Loop, servings: list[Serving], ledger: Ledger, without: Sequence[str] = ()) -> None:
        """Under every plan, the tricks of these names are left out."""
        self._loop, self.servings, self.ledger = loop, servings, ledger
        first = next(p for group in loop.optimizers[0].param_groups for p in group["params"])
        self.device: torch.device = first.device
        self.updates = Updates([one for one in loop.optimizers if not isinstance(one, ByHand)])
        self._backwards = Backwards()
        self.readings = Readings(self.device)
        self.busy: Busy | None = None
        """Told of every step, where somebody wants to know how long the device computes."""
        self.endings = Endings(self.readings)
        self.calls = [Call(one, device=self.device, endings=self.endings) for one in loop.modules]
        own = servings[0].own if servings else Feed(kind="loader")
        self.own = self._plan = Plan(
            feed=own,
            numerics=Numerics(optimizer=self.updates.own),
            execution=Execution(
                autotune=self.device.type == "cuda" and torch.backends.cudnn.benchmark, without=tuple(without)
            ),
        )
        """The script's own plan."""
        self.computes_otherwise = False
        """Whether modules compute otherwise under the plan in force than under the script's own."""
        self.steps, self.before = 0, loop.before
        """Steps since it is known, and those before."""
        self._given_before = servings[0].given if servings else 0
        self._why_calls_stay: str | None = None
        self._waited = 0
        self._told: set[str] = set()
        self._left: Feed | None = None

    # --- what the tuner knows of it --------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    @property
    def modules(self) -> list[nn.Module]:
        """What the script calls while it trains."""
        return self._loop.modules

    @property
    def optimizer(self) -> Optimizer:
        """The one whose steps are counted."""
        return self._loop.optimizers[0]

    @property
    def optimizers(self) -> list[Optimizer]:
        """All of the loop."""
        return self._loop.optimizers

    @property
    def source(self) -> Source:
        """Where the samples of the first loader come from."""
        found = self.servings[0].source if self.servings else None
        assert found is not None, "ask whether there is a loader first"
        return found

    @property
    def epoch_windows(self) -> int:
        """Batches in the current epoch of the first loader."""
        return (self.servings[0].length if self.servings else None) or ENDLESS

    @property
    def epoch_updates(self) -> int:
        """Updates in an epoch of the first loader, at the pace so far: gradients of several batches may add up."""
        return self._updates_of(self.epoch_windows)

    def _updates_of(self, batches: int) -> int:
        given = self.servings[0].given - self._given_before if self.servings else 0
        return math.ceil(batches / max(1.0, given / max(1, self.steps)))

    @property
    def place(self) -> Place:
        """Where in its data the training is."""
        if not self.servings:
            return Place(0, self.steps, self.steps)
        first = self.servings[0]
        return Place(first.epochs, first.served, self.steps)

    @place.setter
    def place(self, place: Place) -> None:
        """Nobody but the script moves it."""

    @property
    def skipped(self) -> int:
        """None: hotlap scales no losses of a script."""
        return 0

    @property
    def most_replay_steps(self) -> int:
        """One: the script makes its steps one by one."""
        return 1

    @property
    def shapes(self) -> int:
        """One, as far as anybody knows who has not seen the script's batches."""
        return 1

    @property
    def warmup_steps(self) -> int:
        """Steps so far that were not at the pace of the plan in force."""
        return self._waited + sum(call.warmup_steps for call in self.calls) + self.updates.warmup_steps

    @property
    def given_up(self) -> str | None:
        """Why the plan in force is not obeyed as it stands."""
        return next((call.given_up for call in self.calls if call.given_up is not None), None)

    def why_no_workers(self) -> str | None:
        """None: what each loader says, `supports` tells."""
        return None

    def allowed_plan(self, plan: Plan) -> Plan:
        """The plan as the data and the user allow it.

        A feed that was left since the data changed stays the script's own, and tricks that the user left out stay out.
        """
        without = self.own.execution.without
        if not {*without} <= {*plan.execution.without}:
            plan = plan.but(without=(*plan.execution.without, *without))
        return plan.with_feed(self.own.feed) if plan.feed == self._left else plan

    def may(self, trick: str) -> bool:
        """Whether the plan in force leaves a trick in."""
        return trick not in self._plan.execution.without

    def supports(self, plan: Plan) -> str | None:
        """Why the plan cannot be obeyed here, or None where it can."""
        plan = self.allowed_plan(plan)
        if plan.memory.checkpoint != self.own.memory.checkpoint:
            return "blocks are checkpointed in trainings that hotlap runs itself; in a script that is the script's own"
        if plan.memory != self.own.memory:
            return "the batches are the script's own"
        if plan.execution.replay_steps > 1:
            return "the script makes its steps one by one"
        if plan.execution.compile != "no":
            return "the script's own calls are not compiled"
        if plan.feed != self.own.feed:
            reason = self._why_not_fed(plan.feed)
            if reason is not None:
                return reason
        if plan.numerics.optimizer != self.own.numerics.optimizer:
            reason = self.updates.supports(plan.numerics.optimizer)
            if reason is not None:
                return reason
        if self.changes_calls(plan):
            if self._why_calls_stay is not None:
                return self._why_calls_stay
            if not self.calls:
                return "the script calls no module as a whole"
            for call in self.calls:
                reason = call.supports(plan.numerics, plan.execution)
                if reason is not None:
                    return reason
        return None

    def changes_calls(self, plan: Plan) -> bool:
        """Whether the modules compute otherwise under a plan than under the script's own."""
        mine, own = plan.choices(), self.own.choices()
        return any(mine[name] != own[name] for name in ("precision", "layout", "mode", "autotune"))

    def _why_not_fed(self, feed: Feed) -> str | None:
        if not self.servings:
            return "the script's batches come from no DataLoader"
        return next(filter(None, (serving.supports(feed) for serving in self.servings)), None)

    def use(self, plan: Plan, *, why: str = "", outcome: str = "chosen") -> None:
        """Obey `plan` from the next step on."""
        plan = self.allowed_plan(plan)
        if plan == self._plan:
            return
        reason = self.supports(plan)
        if reason is not None:
            raise PlanError(reason)
        before, self._plan = self._plan, plan
        self.computes_otherwise = self.changes_calls(plan)
        if plan.feed != before.feed:
            self._feed_by(plan.feed)
        captured = plan.execution.mode == "captured"
        self.updates.use(plan.numerics.optimizer, captured=captured)
        self._backwards.use(here=captured and self.may(ONE_THREAD_BACKWARD))
        self.readings.use(early=captured and self.may(EARLY_ITEM))
        if captured and (self.may(REPLAYED_LOSS) or self.may(EARLY_ITEM)):
            self.endings.put(replays=self.may(REPLAYED_LOSS), waits=not self.may(LOSS_WITHOUT_WAITING))
        else:
            self.endings.take_out()
        for call in self.calls:
            call.use(plan.numerics, plan.execution)
        changes = before.changes(plan)
        self.write_down(", ".join(f"{name} {was} → {now}" for name, (was, now) in changes.items()), outcome, why)

    def _feed_by(self, feed: Feed) -> None:
        for serving in self.servings:
            if feed == self.own.feed:
                serving.use(serving.own)
                continue
            try:
                serving.use(feed)
            except PlanError:
                raise
            except Exception as error:  # whatever the user's dataset makes of being held
                raise PlanError(f"the feed {feed.kind} failed: {first_line(error)}") from error

    def keep_plans(self) -> None:
        """What belongs to a plan stays by itself, until `release_other_plans`."""

    def release_other_plans(self) -> None:
        """Let go of all that belongs to other plans than the one in force."""
        for serving in self.servings:
            serving.tidy()
        for call in self.calls:
            call.tidy()
        self.updates.tidy()

    def holding_s(self, feed: Feed) -> float:
        """About how many seconds it would take to hold all of the data as a feed needs it."""
        return sum(serving.holding_s(feed) for serving in self.servings)

    def keep_samples(self) -> int | None:
        """Keep samples as they come by; updates until more of them are there, None where that spares nothing."""
        found = [serving.learn() for serving in self.servings]
        return max((self._updates_of(batches) for batches in found if batches is not None), default=None)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def write_down(self, what: str, outcome: str, why: str = "", **fields: Any) -> None:
        """Add an entry to the ledger under the current plan; `fields` are other fields of `Entry`."""
        step = max(self.steps, self.ledger.last_step)
        self.ledger.record(Entry(step=step, what=what, outcome=outcome, plan=self._plan, why=why, **fields))

    # --- what the session tells it ---------------------------------------------------------------

    def data_changed(self, feed: Feed, why: str) -> None:
        """Told that the data of a loader changed: its feed was left for the script's own, and so are the others'."""
        self._left = feed
        where = f"{why}; the script's own loader makes batches from step {self.before + self.steps} on"
        kept = {entry.what: entry.outcome for entry in self.ledger if entry.what in FEED_MOVES}
        self.use(self._plan, why=why)
        self.write_down("data changed", "fault", where)
        for name in [name for name, outcome in kept.items() if outcome == "kept"]:
            self.write_down(name, "rejected", f"the data changed: {where}")

    def stepped(self) -> None:
        """Told that the optimizer whose steps are counted made one."""
        self.steps += 1
        if self.busy is not None:
            self._waited += self.busy.stepped()
        reason = self.updates.uncaptured
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            self.write_down("capture", "fault", f"the optimizer's step stays outside the capture: {reason}")
        for serving in self.servings:
            if serving.waiting:
                self._waited += 1
                break

    def leave_calls(self, reason: str) -> None:
        """Refuse all plans that change what the modules compute, from here on."""
        self._why_calls_stay = reason

    def stand_back(self) -> None:
        """Take out all that stands in for functions of torch's while calls are captured; captured calls do without."""
        self.endings.take_out()
        self.readings.close()

    def close(self) -> None:
        """Leave everything as the script made it."""
        for serving in self.servings:
            serving.close()
        for call in self.calls:
            call.use(self.own.numerics, self.own.execution)
            call.forget()
        self.endings.take_out()
        self.readings.close()
        self.updates.close()
        self._backwards.use(here=False)
