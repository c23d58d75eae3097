"""The training loop of a script, as a training that obeys plans."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotlap.core.errors import PlanError, first_line
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Execution, Feed, Numerics, Plan
from hotlap.core.torch_private import cuda_sleep
from hotlap.core.tricks import EARLY_ITEM, LOSS_WITHOUT_WAITING, ONE_THREAD_BACKWARD, REPLAYED_LOSS
from hotlap.data.sources import Source
from hotlap.engine.cursor import Place
from hotlap.engine.protocol import TunableTraining
from hotlap.moves import MOVES, OTHERS
from hotlap.script.calls.call import ModuleCall
from hotlap.script.calls.early_loss import EarlyLoss
from hotlap.script.calls.loss_replay import LossReplay
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.loop_finder import Loop, ManualUpdates
from hotlap.script.update.capture import parameters_of
from hotlap.script.update.updates import BackwardThread, Updates
from hotlap.tuner.probe import CLOCK_HZ

FEED_MOVES = tuple(move.name for move in (*MOVES, *OTHERS) if move.feeds)
"""Moves that change the feed."""
ENDLESS = 2**62
"""Windows in an epoch of unknown length."""


class ScriptTraining(TunableTraining):
    """A loop of the user's script; loaders, module calls and optimizer steps in it obey the plan."""

    steps = 0
    """Steps since hotlap found the loop."""

    def __init__(self, loop: Loop, proxies: list[LoaderProxy], ledger: Ledger, without: Sequence[str] = ()) -> None:
        """`without` names tricks to leave out under every plan."""
        self._loop, self.proxies, self.ledger = loop, proxies, ledger
        self.device: torch.device = parameters_of(loop.optimizers[0])[0].device
        self.updates = Updates([one for one in loop.optimizers if not isinstance(one, ManualUpdates)])
        self._backwards = BackwardThread()
        self.early_loss = EarlyLoss(self.device)
        self.compute_timer: ComputeTimer | None = None
        """Times the GPU's computation; set while the tuner asks for it."""
        self.loss_replay = LossReplay(self.early_loss)
        self.calls = [ModuleCall(one, device=self.device, loss_replay=self.loss_replay) for one in loop.modules]
        own = proxies[0].own if proxies else Feed(kind="loader")
        self.own = self._plan = Plan(
            feed=own,
            numerics=Numerics(optimizer=self.updates.own),
            execution=Execution(
                autotune=self.device.type == "cuda" and torch.backends.cudnn.benchmark, without=tuple(without)
            ),
        )
        """The script's own plan."""
        self.computes_otherwise = False
        """Whether the plan in force changes how modules compute."""
        self.before = loop.before
        """Steps before hotlap found the loop."""
        self._given_before = proxies[0].given if proxies else 0
        self._why_calls_stay: str | None = None
        self._waited = 0
        self._reported: set[str] = set()
        self._left_feed: Feed | None = None

    # --- for the tuner -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the script calls while it trains."""
        return self._loop.modules

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose steps count."""
        return self._loop.optimizers[0]

    @property
    def optimizers(self) -> list[Optimizer]:
        """All optimizers of the loop."""
        return self._loop.optimizers

    @property
    def source(self) -> Source:
        """The source of the first loader's samples; ask only where there is a loader."""
        found = self.proxies[0].source if self.proxies else None
        assert found is not None, "check that there is a loader first"
        return found

    @property
    def epoch_windows(self) -> int:
        """Batches in the first loader's current epoch."""
        return (self.proxies[0].length if self.proxies else None) or ENDLESS

    @property
    def epoch_updates(self) -> int:
        """Updates in an epoch of the first loader at the pace so far; scripts may accumulate gradients."""
        return self._updates_of(self.epoch_windows)

    def _updates_of(self, batches: int) -> int:
        given = self.proxies[0].given - self._given_before if self.proxies else 0
        return math.ceil(batches / max(1.0, given / max(1, self.steps)))

    @property
    def place(self) -> Place:
        if not self.proxies:
            return Place(0, self.steps, self.steps)
        first = self.proxies[0]
        return Place(first.epochs, first.served, self.steps)

    @place.setter
    def place(self, place: Place) -> None:
        """Ignored: only the script moves through its data."""

    @property
    def warmup_steps(self) -> int:
        """Steps so far that ran slower than the plan in force will, such as warm-ups and recordings."""
        return self._waited + sum(call.warmup_steps for call in self.calls) + self.updates.warmup_steps

    @property
    def given_up(self) -> str | None:
        """Why hotlap does not fully apply the plan in force; None if it does."""
        return next((call.given_up for call in self.calls if call.given_up is not None), None)

    def allowed_plan(self, plan: Plan) -> Plan:
        """The plan within the limits of the data and the user.

        A feed that hotlap gave up because the data changed stays the script's own. Tricks in `without` stay out.
        """
        without = self.own.execution.without
        if not {*without} <= {*plan.execution.without}:
            plan = plan.but(without=(*plan.execution.without, *without))
        return plan.with_feed(self.own.feed) if plan.feed == self._left_feed else plan

    def uses(self, trick: str) -> bool:
        """Whether the plan in force uses a trick."""
        return trick not in self._plan.execution.without

    def supports(self, plan: Plan) -> str | None:
        """Why the plan cannot be applied here; None if it can."""
        return next(filter(None, self._reasons(self.allowed_plan(plan))), None)

    def _reasons(self, plan: Plan) -> Iterator[str | None]:
        own = self.own
        if plan.memory.checkpoint != own.memory.checkpoint:
            yield "hotlap checkpoints blocks only in trainings that it runs itself, not in a script"
        if plan.memory != own.memory:
            yield "the script sets its own batch size"
        if plan.execution.replay_steps > 1:
            yield "the script makes its steps one by one"
        if plan.execution.compile != "no":
            yield "hotlap does not compile the calls of a script"
        if plan.feed != own.feed:
            yield self._why_not_fed(plan.feed)
        if plan.numerics.optimizer != own.numerics.optimizer:
            yield self.updates.supports(plan.numerics.optimizer)
        if self.changes_calls(plan):
            yield self._why_calls_stay
            yield None if self.calls else "the script calls no whole module"
            yield from (call.supports(plan.numerics, plan.execution) for call in self.calls)

    def changes_calls(self, plan: Plan) -> bool:
        """Whether modules compute differently under a plan than under the script's own."""
        mine, own = plan.choices(), self.own.choices()
        return any(mine[name] != own[name] for name in ("precision", "layout", "mode", "autotune"))

    def _why_not_fed(self, feed: Feed) -> str | None:
        if not self.proxies:
            return "the script gets its batches from no DataLoader"
        return next(filter(None, (proxy.supports(feed) for proxy in self.proxies)), None)

    def use(self, plan: Plan, *, why: str = "", outcome: str = "chosen") -> None:
        """Apply `plan` from the next step on. Raises PlanError if it is not supported."""
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
        self._backwards.use(here=captured and self.uses(ONE_THREAD_BACKWARD))
        self.early_loss.use(early=captured and self.uses(EARLY_ITEM))
        if captured and (self.uses(REPLAYED_LOSS) or self.uses(EARLY_ITEM)):
            self.loss_replay.put(replays=self.uses(REPLAYED_LOSS), waits=not self.uses(LOSS_WITHOUT_WAITING))
        else:
            self.loss_replay.take_out()
        for call in self.calls:
            call.use(plan.numerics, plan.execution)
        changes = before.changes(plan)
        self.write_down(", ".join(f"{name} {was} → {now}" for name, (was, now) in changes.items()), outcome, why)

    def _feed_by(self, feed: Feed) -> None:
        for proxy in self.proxies:
            if feed == self.own.feed:
                proxy.use(proxy.own)
                continue
            try:
                proxy.use(feed)
            except PlanError:
                raise
            except Exception as error:  # holding the user's dataset may raise anything
                raise PlanError(f"the feed {feed.kind} failed: {first_line(error)}") from error

    def release_other_plans(self) -> None:
        for proxy in self.proxies:
            proxy.tidy()
        for call in self.calls:
            call.tidy()
        self.updates.tidy()

    def holding_s(self, feed: Feed) -> float:
        """Estimated seconds to hold all samples for a feed."""
        return sum(proxy.holding_s(feed) for proxy in self.proxies)

    def keep_samples(self, epochs_left: float) -> int | None:
        """Collect the samples, in the background or as they pass; returns updates until more of them are there.

        None if this saves nothing.
        """
        found = [proxy.learn(epochs_left) for proxy in self.proxies]
        return max((self._updates_of(batches) for batches in found if batches is not None), default=None)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def write_down(self, what: str, outcome: str, why: str = "", **fields: Any) -> None:
        """Add an entry to the ledger under the current plan; `fields` are other fields of `Entry`."""
        step = max(self.steps, self.ledger.last_step)
        self.ledger.record(Entry(step=step, what=what, outcome=outcome, plan=self._plan, why=why, **fields))

    # --- events of the session ---------------------------------------------------------------

    def data_changed(self, feed: Feed, why: str) -> None:
        """A loader's data changed and its feed went back to the script's own: the other loaders follow."""
        self._left_feed = feed
        where = f"{why}; the script's own loader makes the batches from step {self.before + self.steps} on"
        kept = {entry.what: entry.outcome for entry in self.ledger if entry.what in FEED_MOVES}
        self.use(self._plan, why=why)
        self.write_down("data changed", "fault", where)
        for name in [name for name, outcome in kept.items() if outcome == "kept"]:
            self.write_down(name, "rejected", f"the data changed: {where}")

    def stepped(self) -> None:
        """The optimizer whose steps count made one."""
        self.steps += 1
        if self.compute_timer is not None:
            self._waited += self.compute_timer.stepped()
        reason = self.updates.uncaptured
        if reason is not None and reason not in self._reported:
            self._reported.add(reason)
            self.write_down("capture", "fault", f"the optimizer's step is not captured: {reason}")
        for proxy in self.proxies:
            if proxy.waiting:
                self._waited += 1
                break

    def keep_calls_as_they_are(self, reason: str) -> None:
        """From here on, refuse all plans that change how modules compute."""
        self._why_calls_stay = reason

    def remove_patches(self) -> None:
        """Remove the patches that captured calls install; captured calls work without them."""
        self.loss_replay.take_out()
        self.early_loss.close()

    def close(self) -> None:
        """Restore the loaders, modules and optimizers of the script."""
        for proxy in self.proxies:
            proxy.close()
        for call in self.calls:
            call.use(self.own.numerics, self.own.execution)
            call.forget()
        self.remove_patches()
        self.updates.close()
        self._backwards.use(here=False)


# --- GPU time of one step ----------------------------------------------------------------


LOOKS = 3
"""Steps to time; the shortest counts."""
MOST_S = 0.1
"""About how many seconds all timings may take; longer steps are not timed."""
LONGER = 1.5
"""How long the GPU is delayed, in steps, so that the host has issued the whole step by then."""


class ComputeTimer:
    """Times what the GPU computes in one step, without gaps, by delaying the GPU in a few steps until all is issued.

    The figure is too high if gaps remain: where the script waits for the GPU within a step, or fills its launch queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._looks = device, LOOKS if device.type == "cuda" else 0
        self._last: float | None = None
        self._step_s = 0.0
        self._began: torch.cuda.Event | None = None
        self.step_s: float | None = None
        """Seconds of GPU computation in a step; None while unknown."""

    def stepped(self) -> bool:
        """A step has ended. Returns whether this step or the next one is slowed down by the timing."""
        if not self._looks:
            return False
        if self._began is not None:
            self._look(self._began)
            self._began, self._last = None, None
            return True
        now = time.perf_counter()
        if self._last is not None:
            self._step_s = max(self._step_s, now - self._last)
        before, self._last = self._last, now
        if before is None:
            return False
        if LONGER * self._step_s > MOST_S / 2:
            self._looks = min(self._looks, 1)
        if LONGER * self._step_s > MOST_S:
            self._looks = 0
            return False
        self._wait()
        return True

    def _wait(self) -> None:
        with torch.cuda.device(self._device):
            cuda_sleep(int(LONGER * self._step_s * CLOCK_HZ))
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._began.record()

    def _look(self, began: torch.cuda.Event) -> None:
        with torch.cuda.device(self._device):
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended.record()
            ended.synchronize()
        seconds = began.elapsed_time(ended) / 1000
        self.step_s = seconds if self.step_s is None else min(seconds, self.step_s)
        self._looks -= 1
        self._step_s = 0.0
