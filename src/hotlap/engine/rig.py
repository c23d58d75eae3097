"""The Rig is the running training: it obeys a plan from one step to the next, whichever plan that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hotlap import machine
from hotlap.core.data_checks import data_problems
from hotlap.core.errors import JobError, PlanError, TrainingError, did_you_mean, shown
from hotlap.core.job import Job
from hotlap.core.job_checks import is_whole, metric_problems
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import MOST_REPLAY_STEPS, PARTS, Feed, Plan
from hotlap.core.tricks import FIT_TRICKS
from hotlap.data.batches import Batch, count_samples, cut
from hotlap.data.dataset import OrderedDataset, training_dataset
from hotlap.data.feeds import why_not
from hotlap.data.purity import proof_of
from hotlap.data.sources import Columns, Source
from hotlap.engine.blocks import why_not_checkpointed
from hotlap.engine.compiling import Compiling
from hotlap.engine.cursor import Cursor
from hotlap.engine.cursor import Place as Place
from hotlap.engine.evaluate import Evaluator
from hotlap.engine.layout import BufferPool, Layout, why_not_channels_last
from hotlap.engine.objective import Objective, Totals
from hotlap.engine.optimizers import Fusion, is_fused, why_not_fused
from hotlap.engine.precision import why_not_precision
from hotlap.engine.scaling import Guards
from hotlap.engine.schedules import make_schedule
from hotlap.engine.snapshot import PythonState, Snapshot
from hotlap.engine.step import Window, explained
from hotlap.engine.step_cache import StepCache
from hotlap.machine.cuda import usable_bytes

EVAL_BATCHES = 4
"""How many training batches make one of evaluation, which keeps no activations."""

FEED_SETTINGS = ("batch_size", "epochs", "steps", "order", "reorder", "drop_last", "collate", "accumulate", "seed")
"""What of a Job's settings belongs to its data."""

MOST_CHANGES = 3
"""How often data that changes is brought anew, before it comes by the job's own feed for good."""
FEW_WIDTHS = 2
"""Of batches, with which several in a row may well have the same."""


@dataclass(frozen=True)
class RigSnapshot:
    """All that `restore` puts back."""

    training: Snapshot
    totals: tuple[Tensor, Tensor, int]
    guards: Any
    place: Place
    counters: tuple[int, int]


class Rig:
    """A model in training, with its optimizer, loss and data, under a plan that can change between steps.

    With a loop of your own:

        rig = Rig(model, optimizer, loss)
        for batch in rig.feed(data, batch_size=64, epochs=10):
            rig.step(batch)

    `step` also takes batches of your own loader. A model handed over in evaluation mode is put into training
    mode; one in training mode keeps its layers as they are, frozen batch norms too. A schedule that moves by
    epochs moves with `feed`; in a loop over your own loader call `rig.schedule.epoch_ended()`. One that waits
    for a plateau moves with `rig.schedule.evaluated(score)`. Raises JobError with all mistakes at once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[..., Optimizer],
        loss: Callable[..., Any],
        *,
        forward: Callable[[nn.Module, Batch], tuple[Any, Any]] | None = None,
        prepare: Callable[[Batch], Batch] | None = None,
        augment: Callable[[Batch], Batch] | None = None,
        schedule: Any = None,
        schedule_per: str = "update",
        updates: int | None = None,
        clip: float | None = None,
        skip_nonfinite: bool = False,
        plan: Plan | None = None,
        device: str | torch.device = "auto",
    ) -> None:
        _check(
            model=model,
            optimizer=optimizer,
            loss=loss,
            forward=forward,
            prepare=prepare,
            augment=augment,
            schedule=None if isinstance(schedule, ReduceLROnPlateau) else schedule,
            schedule_per=schedule_per,
            clip=clip,
            skip_nonfinite=skip_nonfinite,
            device=str(device),
        )
        self.device = machine.choose_device(device) if isinstance(device, str) else device
        self.model = model.to(self.device)
        self.loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss
        if not model.training:
            model.train()
        self.optimizer = _made(optimizer, self.modules, self.device)
        self.schedule = make_schedule(schedule, self.optimizer, updates, schedule_per)
        self.objective = Objective(self.model, self.loss, forward, prepare=prepare, augment=augment)
        self.totals = Totals(self.device)
        """Running loss since the last reset."""
        self.ledger = Ledger()
        self.steps = 0
        """Windows gone through, updated or skipped."""
        self.samples = 0
        """Samples seen."""
        self.guards = Guards(self.optimizer, self.schedule, self.device, skip_nonfinite=skip_nonfinite)
        self._rooms = BufferPool()
        self._fusion = Fusion(self.optimizer, self._rooms)
        self._layout = Layout(self.modules, self.optimizer, self._rooms)
        self._compiling = Compiling(self.model, self.device, steps=lambda: self.steps, write_down=self.write_down)
        self._cursor: Cursor | None = None
        self._feed_given: tuple[Any, dict[str, Any]] | None = None
        self._evaluator = Evaluator(self.objective, self.device, self._layout, draws_on=lambda: self.draws_on)
        self._follows_user = plan is None
        self.plan = Plan().but(optimizer="fused" if is_fused(self.optimizer) else "plain")
        """The plan in force."""
        self.settled = self.plan
        """The last plan that was meant to stay: not the one of a lap that is measured."""
        self._drops_in_rnn = False
        self._steps = StepCache(
            self.objective,
            self.optimizer,
            self.schedule,
            self.totals,
            modules=self.modules,
            device=self.device,
            layout=self._layout,
            guards=self.guards,
            compiling=self._compiling,
            clip=clip,
            note=self._note,
            tell_attention=lambda why, cost_s: self.write_down("attention", "chosen", why, cost_s=cost_s),
        )
        self._step = self._steps.of(self.plan)
        self._changes = 0
        self.ledger.record(Entry(step=0, what="start", outcome="chosen", plan=self.plan))
        if plan is not None:
            self.use(plan, why="given")

    @property
    def modules(self) -> list[nn.Module]:
        """What is trained: the model, and the loss where it is a module."""
        return [module for module in (self.model, self.loss) if isinstance(module, nn.Module)]

    # --- plans -----------------------------------------------------------------------------------

    def supports(self, plan: Plan) -> str | None:
        """Why the plan cannot be obeyed here, or None where it can."""
        feed, numerics = plan.feed, plan.numerics
        foreign = [name for name in plan.execution.without if name not in FIT_TRICKS]
        if foreign:
            return f"execution.without={foreign} is for scripts under `hotlap run` alone"
        if self._cursor is not None:
            reason = why_not(self._cursor.dataset.source, feed, device=self.device)
            if reason is None and feed.kind == "resident":
                reason = self._cursor.why_not_resident(self._reserve())
            if reason:
                return reason
        if plan.execution.mode == "captured" and not self._on_gpu:
            return f"execution.mode='captured' needs a GPU, and this is trained on {self.device.type}"
        if plan.execution.mode == "captured" and self._takes_closure:
            return f"{type(self.optimizer).__name__} calls the model by itself, so its step cannot be captured"
        if plan.execution.compile != "no":
            if plan.memory.checkpoint:
                return f"memory.checkpoint={plan.memory.checkpoint} is for blocks that are not compiled"
            if numerics.depthwise == "direct":
                return "numerics.depthwise='direct' is for steps that are not compiled"
            reason = self._compiling.why_not(plan.execution.compile)
            if reason:
                return reason
        if numerics.precision != "fp32":
            reason = why_not_precision(numerics.precision, self.device)
            if reason:
                return reason
        if numerics.layout == "channels_last":
            reason = why_not_channels_last(self.modules)
            if reason:
                return reason
        if plan.memory.checkpoint:
            reason = why_not_checkpointed(self.model, plan.memory.checkpoint, self.device)
            if reason:
                return reason
        return why_not_fused(self.optimizer, self.modules) if numerics.optimizer == "fused" else None

    @property
    def _takes_closure(self) -> bool:
        return isinstance(self.optimizer, torch.optim.LBFGS)

    def _reserve(self) -> int:
        """Bytes to leave free beside resident data: gradients and the optimizer's state, and a tenth for all else."""
        weights = sum(p.numel() * p.element_size() for module in self.modules for p in module.parameters())
        return 4 * weights + (usable_bytes(self.device) // 10 if self._on_gpu else 0)

    def use(self, plan: Plan, *, why: str = "", outcome: str = "chosen") -> None:
        """Obey `plan` from the next step on, with the same weights, optimizer state and place in the data."""
        if not isinstance(plan, Plan):
            raise PlanError(f"a plan is a hotlap.Plan, not {type(plan).__name__}; read a file with hotlap.load_plan")
        plan = self.obeyed(plan)
        if outcome != "measured":
            self.settled = plan
        if plan == self.plan:
            return
        reason = self.supports(plan)
        if reason:
            raise PlanError(reason)
        self.settle()
        before, changes = self.plan, self.plan.changes(plan)
        parts = [part for part in PARTS if getattr(plan, part) != getattr(before, part)]
        self.plan = plan
        # A part rests on those before it: from the first that differs on, all are built anew.
        if self._cursor is not None and ("feed" in parts or "layout" in changes):
            self._cursor.change(before.feed)
        elif self._cursor is not None and ("micro_batch" in changes or "replay_steps" in changes):
            self._cursor.recut()
        if "numerics" in parts or "mode" in changes:
            self.conform()
        if "layout" in changes and not self._rooms.keeps:
            self._steps.clear()  # what was recorded reads weights where they no longer are
        what = ", ".join(f"{name} {before} → {after}" for name, (before, after) in changes.items())
        why = "; ".join(filter(None, (why, *self.cautions(plan))))
        self.write_down(what, outcome, why)
        self._step = self._steps.of(plan)

    def keep_plans(self) -> None:
        """From now on what belongs to a plan stays when another takes its place: captures, workers, data, memory.

        So plans can be tried in turn, until `tidy`.
        """
        self._rooms.keeps = True
        if self._cursor is not None:
            self._cursor.keeps = True

    def tidy(self) -> None:
        """Let go of all that belongs to other plans than the one in force."""
        self._rooms.forget()
        self._steps.keep(self._step)
        if self._cursor is not None:
            self._cursor.tidy()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, plans and steps leave no trace: afterwards all is as it was before, ledger, running loss and what
        modules, the optimizer and the user's functions remember too. See `why_no_trial`.

        What is noted in the ledger meanwhile can be read there until then.
        """
        kept = self._rooms.keeps
        self.keep_plans()
        plan, settled, ledger, snapshot = self.plan, self.settled, self.ledger, self.snapshot()
        remembered = self.python_state()
        self.ledger = Ledger()
        try:
            yield
        finally:
            self.use(plan)
            self.restore(snapshot)
            remembered.restore()
            stays = [entry for entry in self.ledger if entry.what in ("compile", "attention")]
            self.ledger, self.settled = ledger, settled
            for entry in stays:  # what was compiled or chosen stays, and was paid for
                self.write_down(entry.what, entry.outcome, entry.why, figures=entry.figures, cost_s=entry.cost_s)
            if not kept:
                self.tidy()

    def python_state(self) -> PythonState:
        """What modules, the optimizer and the user's functions remember now, beside what a snapshot holds."""
        return PythonState(self.modules, self.optimizer, self.objective.functions)

    def why_no_trial(self) -> str | None:
        """Why steps cannot be made aside without a trace: something would move that cannot be put back."""
        return next(iter(self.python_state().unknown), None)

    def attention(self, plan: Plan) -> AbstractContextManager[None]:
        """Inside, attention is made by the kernels that the plan's steps are recorded with, where it records."""
        return self._steps.attention(plan.execution)

    @property
    def warmup_steps(self) -> int:
        """Windows so far that were not at the plan's own pace, since they were still to be recorded or compiled."""
        return self._step.warmup_steps + (self._compiling.warmup_steps if self.plan.execution.compile != "no" else 0)

    @property
    def most_replay_steps(self) -> int:
        """Updates that a plan may make at once: one, where hardly any that follow each other have the same shape."""
        return 1 if self.shapes > FEW_WIDTHS else MOST_REPLAY_STEPS

    @property
    def shapes(self) -> int:
        """Shapes that whole batches have: as many as there are widths."""
        source = self._cursor.dataset.source if self._cursor is not None else None
        return max(1, len(source.widths)) if isinstance(source, Columns) else 1

    @property
    def given_up(self) -> str | None:
        """Why the plan in force is not obeyed as it stands: why nothing is captured, or compiled; None where it is."""
        return self._step.given_up or self._compiling.given_up.get(self.plan.execution.compile)

    def wait(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def cautions(self, plan: Plan) -> list[str]:
        """What a plan changes in the training beyond rounding, a line each; it is the user's to want that."""
        micro = plan.memory.micro_batch
        if micro is None or (self._cursor is not None and micro >= self._cursor.dataset.batch_size):
            return []
        found = []
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training for layer in self.model.modules()):
            found.append("batch norms see micro-batches, so their statistics differ")
        if not self.objective.adds_up:
            name = getattr(self.loss, "__name__", type(self.loss).__name__)
            found.append(f"the loss {name} is taken as a mean over samples; return (sum, count) where it is not")
        return found

    def _note(self, why: str) -> None:
        """Write down that the plan in force is obeyed in part only, and why."""
        self.write_down("capture", "fault", why)

    def _data_changed(self, why: str) -> None:
        """Told that the data is not what it was: it is brought anew a few times, then only as the user does."""
        assert self._cursor is not None
        own = self._cursor.dataset.feed
        if self.plan.feed in (own, Feed(kind="gather")):
            return  # which reads it where it lies
        self._changes += 1
        if self._changes <= MOST_CHANGES:
            self.write_down("data changed", "fault", f"{why}; it is brought anew")
            return
        self.write_down("data changed", "fault", f"{why}; feed {self.plan.feed.kind} is left for the job's own")
        self.use(self.plan, why="the data keeps changing")

    def obeyed(self, plan: Plan) -> Plan:
        """The plan as the data allows it: with the job's own feed where the data keeps changing."""
        if self._changes <= MOST_CHANGES or self._cursor is None or plan.feed.kind == "gather":
            return plan
        execution = dataclasses.replace(plan.execution, replay_steps=1)
        return dataclasses.replace(plan, feed=self._cursor.dataset.feed, execution=execution)

    def write_down(
        self,
        what: str,
        outcome: str,
        why: str = "",
        *,
        figures: Mapping[str, float] | None = None,
        cost_s: float = 0.0,
    ) -> None:
        """Add a line to the ledger, under the plan in force."""
        # After a snapshot was put back the steps since then are made again; the ledger does not run backwards.
        step = max(self.steps, self.ledger.last_step)
        entry = Entry(
            step=step, what=what, outcome=outcome, plan=self.plan, why=why, figures=figures or {}, cost_s=cost_s
        )
        self.ledger.record(entry)

    def conform(self) -> None:
        """Bring weights and optimizer state into the form that the plan asks for; also after they were put in anew."""
        numerics = self.plan.numerics
        self._fusion.set(numerics.optimizer == "fused", captured=self.plan.execution.mode == "captured")
        self._layout.set(numerics.layout)

    def hand_back(self) -> None:
        """Lay the weights out as the user gave them; the plan is over."""
        self._layout.set("as given")

    def settle(self) -> None:
        """Let the host know what only the device knew: how far a schedule is where updates may be left out."""
        self._steps.settle()

    # --- data ------------------------------------------------------------------------------------

    def feed(self, data: Any, **settings: Any) -> Iterator[Window]:
        """Windows of `data` for `step`: batch_size, and epochs or steps.

        Also order, reorder, drop_last, collate, accumulate and seed, as a Job has them.
        The same data with the same settings goes on with the next epoch, so that a loop of one epoch each
        sees another order each time.
        """
        wrong = [
            f"{name} is not a setting of feed{did_you_mean(name, FEED_SETTINGS)}"
            for name in settings
            if name not in FEED_SETTINGS
        ]
        try:
            job = Job(
                model=self.model,
                optimizer=self.optimizer,
                loss=self.loss,
                forward=self.objective.forward,
                data=data,
                **{name: value for name, value in settings.items() if name in FEED_SETTINGS},
            )
        except JobError as error:
            raise JobError([*wrong, *error.problems]) from None
        if wrong:
            raise JobError(wrong)
        lasting = {name: value for name, value in settings.items() if name not in ("epochs", "steps")}
        given = self._feed_given
        if given is None or given[0] is not data or given[1] != lasting:
            self.attach(training_dataset(job, workers=machine.workers_wanted(), on_gpu=self._on_gpu))
            self._feed_given = (data, lasting)
        elif self.place.window:  # left in the middle of an epoch: the next one begins
            self.place = Place(self.place.epoch + 1, 0, self.place.served)
        epochs = None if job.epochs is None else self.place.epoch + job.epochs
        steps = None if job.steps is None else self.place.served + job.steps
        return self.windows(epochs=epochs, steps=steps)

    def attach(self, dataset: OrderedDataset) -> None:
        """Train on a dataset from its beginning; without a plan of its own the rig feeds it as the user would."""
        if self._cursor is not None:
            self._cursor.leave()
            self._steps.forget()
        self._cursor, self._feed_given = (
            Cursor(dataset, lambda: self.plan, device=self.device, ignored=self.objective.ignored),
            None,
        )
        self._cursor.on_change, self._changes = self._data_changed, 0
        if self._follows_user:
            self.use(dataclasses.replace(self.plan, feed=dataset.feed), why="as the data is given")
        reason = self.supports(self.plan)
        if reason:
            raise PlanError(reason)
        if dataset.padding is not None:
            shares = {"padding": dataset.padding.share, "padding_at_one_width": dataset.padding.share_at_one_width}
            self.write_down("batches by length", "chosen", dataset.padding.line, figures=shares)

    @property
    def source(self) -> Source:
        """Where the samples come from."""
        assert self._cursor is not None, "attach data first"
        return self._cursor.dataset.source

    def windows(
        self, *, epochs: int | None = None, steps: int | None = None, room: Callable[[], int] | None = None
    ) -> Iterator[Window]:
        """Windows from the current place on, until so many epochs are behind or so many updates were given out.

        A window holds several updates where the plan replays as many at once: never more than `room` allows.
        """
        assert self._cursor is not None, "attach data first"
        return self._cursor.windows(epochs=epochs, steps=steps, epoch_ended=self._epoch_ended, room=room)

    def look(self, plan: Plan, windows: Iterable[int]) -> Generator[Window, None, None]:
        """Some windows of the current epoch, by their numbers, as `plan` would bring them; the training stays."""
        assert self._cursor is not None, "attach data first"
        return self._cursor.look(plan, windows)

    @property
    def windows_here(self) -> int:
        """Windows in the epoch that the training stands in, whether it has begun or not."""
        assert self._cursor is not None, "attach data first"
        return self._cursor.windows_here

    def _epoch_ended(self) -> None:
        self.schedule.epoch_ended()

    @property
    def place(self) -> Place:
        """Where in the data the training stands."""
        return self._cursor.place if self._cursor is not None else Place()

    @place.setter
    def place(self, place: Place) -> None:
        if self._cursor is not None:
            self._cursor.place = place

    @property
    def epoch_windows(self) -> int:
        """Windows in the current epoch."""
        return self._cursor.epoch_windows if self._cursor is not None else 0

    @property
    def epoch_updates(self) -> int:
        """As many: each window is an update."""
        return self.epoch_windows

    def why_not_spread(self) -> str | None:
        """Why samples may be others where processes fetch them that the user did not ask for; None where not.

        Draws from the generators of Python, numpy and torch are no reason: they are seeded for each sample.
        """
        return proof_of(self.source, may_draw=True).why_traces

    def learn(self) -> int | None:
        """None: samples are fetched when they are held."""
        return None

    def holding_s(self, feed: Feed) -> float:
        """About how many seconds it would take to hold all of the data on the device; 0 where it is there."""
        return self._cursor.holding_s() if feed.kind == "resident" and self._cursor is not None else 0.0

    def close(self) -> None:
        """End worker processes, and let go of data and captures on the device.

        The rig can go on afterwards; all of it comes back when it is needed.
        """
        if self._cursor is not None:
            self._cursor.let_go()
        self._evaluator.close()
        self._steps.forget()

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    # --- steps -----------------------------------------------------------------------------------

    def step(self, batch: Window | Batch) -> Tensor:
        """Make an update with a window from `feed`, or with a batch of your own; its loss, on the device.

        A window from `feed` holds as many updates as the plan replays at once; the loss is the last one's.
        """
        step = self._step
        return step.kept(self.advance(batch))

    def advance(self, batch: Window | Batch) -> Tensor:
        """As `step`; the loss may be overwritten by the next one."""
        window = batch if isinstance(batch, Window) else self._window_of(batch)
        try:
            loss = self._step(window)
        except (RuntimeError, ValueError, TypeError) as error:
            hint = explained(error, window, self.model)
            if hint is None:
                raise
            raise TrainingError(hint) from error
        self.steps += window.updates
        self.samples += window.samples
        return loss

    @property
    def updates(self) -> int:
        """Real updates of the weights; where the device decides which are made, waits for it."""
        return self.steps - self.skipped

    @updates.setter
    def updates(self, updates: int) -> None:
        self.guards.set_skipped(self.steps - updates)

    def _window_of(self, batch: Batch) -> Window:
        micro = self.plan.memory.micro_batch
        if micro is None:
            # Where nobody can count, every batch has the same weight in the running loss.
            return Window([batch], [count_samples(batch) or 1])
        return Window(*cut(batch, micro))

    @property
    def skipped(self) -> int:
        """Steps whose update was left out, since their gradients were not finite."""
        return self.guards.skipped

    def evaluate(
        self,
        data: Any,
        metrics: Sequence[str] | Mapping[str, Any] = (),
        *,
        batch_size: int | None = None,
        collate: Any = None,
    ) -> dict[str, float]:
        """Loss and metrics over all of `data`; mode, randomness and training stay as they were."""
        wrong = [*data_problems("data", data), *metric_problems(metrics), *_size_problems(batch_size)]
        if wrong:
            raise JobError(wrong)
        size = batch_size or self._evaluation_batch
        return self._evaluator(data, metrics, batch_size=size, collate=collate, plan=self.plan)

    def predict(self, data: Any, *, batch_size: int | None = None, collate: Any = None) -> Any:
        """The model's outputs for all of `data`, in its order, on the host; mode, randomness and training stay.

        `data` is given as for training, with targets, which are not looked at; or, where one input goes into the
        model, that input alone.
        """
        wrong = [*data_problems("data", data), *_size_problems(batch_size)]
        if wrong:
            raise JobError(wrong)
        size = batch_size or self._evaluation_batch
        return self._evaluator.outputs(data, batch_size=size, collate=collate, plan=self.plan)

    @property
    def _evaluation_batch(self) -> int:
        dataset = self._cursor.dataset if self._cursor is not None else None
        return EVAL_BATCHES * (self.plan.memory.micro_batch or (dataset.batch_size if dataset is not None else 16))

    # --- state -----------------------------------------------------------------------------------

    def snapshot(self) -> RigSnapshot:
        """The whole state of the training, in memory."""
        self.settle()
        return RigSnapshot(
            training=Snapshot(
                self.modules, self.optimizer, self.schedule.scheduler, self.device, draws_on=self.draws_on
            ),
            totals=self.totals.saved(),
            guards=self.guards.saved(),
            place=self.place,
            counters=(self.steps, self.samples),
        )

    @property
    def draws_on(self) -> bool:
        """Whether the device's generator must not be set back.

        cuDNN's recurrent layers keep the state of their dropout in a memory of torch's, which is made anew once the
        generator was set: a capture would go on reading where it was, and cannot be recorded before it is there.
        """
        if not self._drops_in_rnn:  # once it did, it may again, though its rate be 0 for now
            layers = [layer for module in self.modules for layer in module.modules()]
            self._drops_in_rnn = any(isinstance(layer, nn.RNNBase) and layer.dropout > 0 for layer in layers)
        return self._drops_in_rnn and self._on_gpu and (self._rooms.keeps or self._steps.has_recorded)

    def restore(self, snapshot: RigSnapshot) -> None:
        """Go back to a snapshot without a trace; the plan stays the one in force.

        Only the device's randomness goes on where recurrent layers that drop out have been captured.
        """
        self.settle()
        snapshot.training.restore()
        self.conform()
        self.totals.put_back(snapshot.totals)
        self.guards.put_back(snapshot.guards)
        self.place = snapshot.place
        self.steps, self.samples = snapshot.counters


def _size_problems(size: Any) -> list[str]:
    if size is None or (is_whole(size) and size >= 1):
        return []
    return [f"batch_size={shown(size)} must be a whole number of at least 1"]


def _check(**settings: Any) -> None:
    """Raise JobError with all that is wrong with a rig's own settings."""
    Job(data=torch.zeros(1, dtype=torch.int64), batch_size=1, epochs=1, **settings)


def _made(wanted: Any, modules: list[nn.Module], device: torch.device) -> Optimizer:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = wanted if isinstance(wanted, Optimizer) else wanted(parameters)
    if not isinstance(optimizer, Optimizer):
        raise JobError([f"optimizer returned {type(optimizer).__name__}, which is no torch optimizer"])
    if optimizer.state and device.type != "cpu":
        # State made before the model moved: loading it sends each part where its parameter is now.
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer
