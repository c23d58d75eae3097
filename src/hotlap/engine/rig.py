"""The Rig is the running training: it obeys a plan from one step to the next, whichever plan that is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap import machine
from hotlap.core.errors import JobError, PlanError
from hotlap.core.job import Job
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import PARTS, Plan
from hotlap.data.batches import Batch, count_samples, cut
from hotlap.data.course import Course, evaluation_course, training_course
from hotlap.data.feeds import Feeding, open_feed, why_not
from hotlap.data.order import Epoch
from hotlap.engine.evaluate import evaluate
from hotlap.engine.fused import Fusion, is_fused, why_not_fused
from hotlap.engine.objective import Objective, Totals
from hotlap.engine.schedules import make_schedule
from hotlap.engine.snapshot import Snapshot
from hotlap.engine.step import EagerStep, Window

EVAL_BATCHES = 4
"""How many training batches make one of evaluation, which keeps no activations."""


@dataclass(frozen=True)
class Place:
    """Where in the data a training stands: the window to come."""

    epoch: int = 0
    window: int = 0


@dataclass(frozen=True)
class RigSnapshot:
    """All that `restore` puts back."""

    training: Snapshot
    totals: tuple[Tensor, Tensor, int]
    place: Place
    counters: tuple[int, int, int]


class Rig:
    """A model in training, with its optimizer, loss and data, under a plan that can change between steps.

    With a loop of your own:

        rig = Rig(model, optimizer, loss)
        for batch in rig.feed(data, batch_size=64, epochs=10):
            rig.step(batch)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[..., Optimizer],
        loss: Callable[..., Any],
        *,
        forward: Callable[[nn.Module, Batch], tuple[Any, Any]] | None = None,
        schedule: Any = None,
        schedule_per: str = "update",
        updates: int | None = None,
        clip: float | None = None,
        skip_nonfinite: bool = False,
        plan: Plan | None = None,
        device: str | torch.device = "auto",
    ) -> None:
        self.device = machine.choose_device(device) if isinstance(device, str) else device
        self.model = model.to(self.device)
        self.loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss
        self.optimizer = _made(optimizer, model, self.device)
        self.schedule = make_schedule(schedule, self.optimizer, updates, schedule_per)
        self.objective = Objective(self.model, self.loss, forward)
        self.totals = Totals(self.device)
        """Running loss since the last reset."""
        self.ledger = Ledger()
        self.place = Place()
        self.steps = 0
        """Windows gone through, updated or skipped."""
        self.updates = 0
        """Real updates of the weights."""
        self.samples = 0
        """Samples seen."""
        self.epoch_windows = 0
        """Windows in the current epoch."""
        self._clip, self._skip_nonfinite = clip, skip_nonfinite
        self._forward = forward
        self._fusion = Fusion(self.optimizer)
        self._course: Course | None = None
        self._feeding: Feeding | None = None
        self._evaluations: dict[tuple[int, int], tuple[Course, Feeding]] = {}
        self._opened = 0
        self._follows_user = plan is None
        self.plan = Plan().but(optimizer="fused" if is_fused(self.optimizer) else "plain")
        self._step = self._make_step()
        self.ledger.record(Entry(step=0, what="start", outcome="chosen", plan=self.plan))
        if plan is not None:
            self.use(plan, why="given")

    # --- plans -----------------------------------------------------------------------------------

    def supports(self, plan: Plan) -> str | None:
        """Why the plan cannot be obeyed here, or None where it can."""
        if self._course is not None:
            reason = why_not(self._course.source, plan.feed)
            if reason:
                return reason
        if plan.numerics.precision != "fp32":
            reason = _why_not_precision(plan.numerics.precision, self.device)
            if reason:
                return reason
        return why_not_fused(self.optimizer) if plan.numerics.optimizer == "fused" else None

    def use(self, plan: Plan, *, why: str = "", outcome: str = "chosen") -> None:
        """Obey `plan` from the next step on, with the same weights, optimizer state and place in the data."""
        if plan == self.plan:
            return
        reason = self.supports(plan)
        if reason:
            raise PlanError(reason)
        changes = self.plan.changes(plan)
        parts = [part for part in PARTS if getattr(plan, part) != getattr(self.plan, part)]
        self.plan = plan
        # A part rests on those before it: from the first that differs on, all are built anew.
        if "feed" in parts:
            self._close_feed()
        if "feed" in parts or "memory" in parts:
            self._opened += 1
        if "numerics" in parts:
            self._fusion.set(plan.numerics.optimizer == "fused")
        if parts != ["feed"]:
            self._step = self._make_step()
        what = ", ".join(f"{name} {before} → {after}" for name, (before, after) in changes.items())
        self.ledger.record(Entry(step=self.steps, what=what, outcome=outcome, plan=plan, why=why))

    def _make_step(self) -> EagerStep:
        return EagerStep(
            self.objective,
            self.optimizer,
            self.schedule,
            self.totals,
            device=self.device,
            precision=self.plan.numerics.precision,
            clip=self._clip,
            skip_nonfinite=self._skip_nonfinite,
        )

    # --- data ------------------------------------------------------------------------------------

    def feed(self, data: Any, **settings: Any) -> Iterator[Window]:
        """Windows of `data` for `step`, with the settings that a Job has: batch_size, epochs or steps, order, …"""
        job = Job(model=self.model, optimizer=self.optimizer, loss=self.loss, data=data, **settings)
        on_gpu = self.device.type == "cuda"
        self.attach(training_course(job, workers=machine.workers_wanted(), on_gpu=on_gpu))
        return self.windows(epochs=job.epochs, steps=job.steps)

    def attach(self, course: Course) -> None:
        """Train on a course from its beginning; without a plan of its own the rig feeds it as the user would."""
        self._close_feed()
        self._course, self.place = course, Place()
        if self._follows_user:
            self.use(Plan(**{**_parts(self.plan), "feed": course.feed}), why="as the data is given")
        reason = self.supports(self.plan)
        if reason:
            raise PlanError(reason)

    def windows(self, *, epochs: int | None = None, steps: int | None = None) -> Iterator[Window]:
        """Windows from the current place on, until so many epochs or steps are behind."""
        assert self._course is not None, "attach data first"
        while epochs is None or self.place.epoch < epochs:
            number = self.place.epoch
            epoch = self._course.order.epoch(number)
            self.epoch_windows = len(epoch)
            opened, expected = -1, self.place
            stream: Iterator[Window] = iter(())
            while self.place.epoch == number and self.place.window < len(epoch):
                if steps is not None and self.steps >= steps:
                    return
                if opened != self._opened or self.place != expected:
                    stream = self._stream(epoch, number)
                    opened = self._opened
                window = next(stream)
                expected = Place(number, self.place.window + 1)
                # The place moves before the step, so that between two steps it names the window to come.
                self.place = expected
                yield window
            if self.place == Place(number, len(epoch)):
                self.place = Place(number + 1, 0)
                self.schedule.epoch_ended()

    def _stream(self, epoch: Epoch, number: int) -> Iterator[Window]:
        """The epoch's windows from the current place on, under the current plan."""
        assert self._course is not None
        if self._feeding is None:
            self._feeding = open_feed(
                self._course.source,
                self.plan.feed,
                seed=self._course.seed,
                on_gpu=self.device.type == "cuda",
                extras=self._course.extras,
            )
        sizes: deque[list[int]] = deque()
        first, micro = self.place.window, self.plan.memory.micro_batch

        def asked() -> Iterator[Tensor]:
            for window in range(first, len(epoch)):
                indices = epoch.pieces(window, micro)
                sizes.append([len(piece) for piece in indices])
                yield from indices

        # Workers ask ahead; a window's sizes are known once its first piece is here.
        pieces = self._feeding.pieces(asked(), number)
        for piece in pieces:
            here = sizes.popleft()
            yield Window([piece, *islice(pieces, len(here) - 1)], here)

    def _close_feed(self) -> None:
        if self._feeding is not None:
            self._feeding.close()
            self._feeding = None
        self._opened += 1

    def close(self) -> None:
        """End worker processes. The rig can go on afterwards; they start again when needed."""
        self._close_feed()
        for _, feeding in self._evaluations.values():
            feeding.close()
        self._evaluations.clear()

    # --- steps -----------------------------------------------------------------------------------

    def step(self, batch: Window | Batch) -> Tensor:
        """Make one update with a window from `feed`, or with a batch of your own; its loss, on the device."""
        window = batch if isinstance(batch, Window) else self._window_of(batch)
        loss, updated = self._step(window)
        self.steps += 1
        self.updates += updated
        self.samples += window.samples
        return loss

    def _window_of(self, batch: Batch) -> Window:
        micro = self.plan.memory.micro_batch
        if micro is None:
            return Window([batch], [count_samples(batch)])
        return Window(*cut(batch, micro))

    @property
    def skipped(self) -> int:
        """Steps whose update was left out, since their gradients were not finite."""
        return self.steps - self.updates

    def evaluate(
        self,
        data: Any,
        metrics: Sequence[str] | Mapping[str, Any] = (),
        *,
        batch_size: int | None = None,
        collate: Any = None,
    ) -> dict[str, float]:
        """Loss and metrics over all of `data`; mode, randomness and training stay as they were."""
        size = batch_size or self._evaluation_batch()
        on_gpu = self.device.type == "cuda"

        def opened(batch: int) -> tuple[Course, Feeding]:
            key = (id(data), batch)
            if key not in self._evaluations:
                course = evaluation_course(data, batch_size=batch, collate=collate, on_gpu=on_gpu)
                feeding = open_feed(course.source, course.feed, on_gpu=on_gpu, extras=course.extras)
                self._evaluations[key] = (course, feeding)
            return self._evaluations[key]

        return evaluate(self.objective, opened, metrics, size, self.plan.numerics.precision, self.device)

    def _evaluation_batch(self) -> int:
        micro = self.plan.memory.micro_batch
        if micro is None:
            micro = self._course.batch_size if self._course else 64
        return EVAL_BATCHES * micro

    # --- state -----------------------------------------------------------------------------------

    def snapshot(self) -> RigSnapshot:
        """The whole state of the training, in memory."""
        modules = [m for m in (self.model, self.loss) if isinstance(m, nn.Module)]
        return RigSnapshot(
            training=Snapshot(modules, self.optimizer, self.schedule.scheduler, self.device),
            totals=self.totals.saved(),
            place=self.place,
            counters=(self.steps, self.updates, self.samples),
        )

    def restore(self, snapshot: RigSnapshot) -> None:
        """Go back to a snapshot without a trace; the plan stays the one in force."""
        snapshot.training.restore()
        self._fusion.set(self.plan.numerics.optimizer == "fused")
        self.totals.put_back(snapshot.totals)
        self.place = snapshot.place
        self.steps, self.updates, self.samples = snapshot.counters


def _why_not_precision(precision: str, device: torch.device) -> str | None:
    fact = machine.dtype_support(device)[precision]
    if fact == machine.Support.HARDWARE:
        return None
    # A CPU without instructions for it still trains in bf16, slowly; on a GPU that is never wanted.
    if fact == machine.Support.EMULATED and device.type == "cpu" and machine.detect().pretended is None:
        return None
    return f"{precision} is {fact} on this {device.type}"


def _parts(plan: Plan) -> dict[str, Any]:
    return {part: getattr(plan, part) for part in PARTS}


def _made(wanted: Any, model: nn.Module, device: torch.device) -> Optimizer:
    optimizer = wanted if isinstance(wanted, Optimizer) else wanted(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise JobError([f"optimizer returned {type(optimizer).__name__}, which is no torch optimizer"])
    if optimizer.state and device.type != "cpu":
        # State made before the model moved: loading it sends each part where its parameter is now.
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer
