"""The Rig is the running training. It obeys a plan from one step to the next, and the plan may change between steps."""

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
from hotlap.core.torch_private import BatchNormBase
from hotlap.core.tricks import FIT_TRICKS, MOVE_WORDS
from hotlap.data.batches import Batch, count_samples, cut
from hotlap.data.dataset import OrderedDataset, training_dataset
from hotlap.data.feeds import why_not
from hotlap.data.order import Epoch
from hotlap.data.pure.proof import proof_of
from hotlap.data.sources import Columns, Source
from hotlap.engine.blocks import why_not_checkpointed
from hotlap.engine.compiling import Compiling
from hotlap.engine.cursor import Cursor
from hotlap.engine.cursor import Place as Place
from hotlap.engine.evaluate import Evaluator
from hotlap.engine.exchange import Exchange
from hotlap.engine.layout import BufferPool, Layout
from hotlap.engine.objective import Objective, Totals
from hotlap.engine.optimizers import Fusion, is_fused, why_not_fused
from hotlap.engine.precision import why_not_numerics
from hotlap.engine.scaling import Guards
from hotlap.engine.schedules import make_schedule
from hotlap.engine.snapshot import PythonState, Snapshot
from hotlap.engine.step import Window, explained
from hotlap.engine.step_cache import StepCache
from hotlap.machine.cuda import usable_bytes

EVAL_BATCHES = 4
"""Training batches in one batch of evaluation, which keeps no activations."""

FEED_SETTINGS = ("batch_size", "epochs", "steps", "order", "reorder", "drop_last", "collate", "accumulate", "seed")
"""The settings of a Job that belong to its data."""

MOST_CHANGES = 3
"""How often hotlap fetches changed data again before it uses the job's own feed for good."""
NO_SAMPLES = "update left out"
"""The entry in the ledger for a window whose samples were all left out."""
FEW_WIDTHS = 2
"""Widths of batches up to which several consecutive batches may well have the same width."""


@dataclass(frozen=True)
class RigSnapshot:
    """Everything that `restore` restores."""

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

    `step` also takes batches of your own loader. A model in evaluation mode is switched to training mode. A model in
    training mode keeps the mode of each layer, frozen batch norms included.

    A schedule that moves by epochs moves with `feed`. In a loop over your own loader call `rig.schedule.epoch_ended()`.
    For one that waits for a plateau call `rig.schedule.evaluated(score)`. Raises JobError with all mistakes at once.
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
        """Windows so far, updated or skipped."""
        self.samples = 0
        """Samples so far."""
        self.guards = Guards(self.optimizer, self.schedule, self.device, skip_nonfinite=skip_nonfinite)
        self._pool = BufferPool()
        self._fusion = Fusion(self.optimizer, self._pool)
        self._layout = Layout(self.modules, self.optimizer, self._pool)
        self._compiling = Compiling(self.model, self.device, steps=lambda: self.steps, write_down=self.write_down)
        self.exchange: Exchange | None = None
        """What ranks exchange, where several processes share this training."""
        self._cursor: Cursor | None = None
        self._feed_given: tuple[Any, dict[str, Any]] | None = None
        self._evaluator = Evaluator(self.objective, self.device, self._layout)
        self._evaluator.on_smaller = lambda what, why: self.write_down(what, "fault", why)
        self._follows_user = plan is None
        self.plan = Plan().but(optimizer="fused" if is_fused(self.optimizer) else "plain")
        """The current plan."""
        self.settled = self.plan
        """The last plan that was chosen to stay, not just for a timed lap."""
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
        """The trained modules: the model, and the loss if it is a module."""
        return [module for module in (self.model, self.loss) if isinstance(module, nn.Module)]

    # --- plans -----------------------------------------------------------------------------------

    def supports(self, plan: Plan) -> str | None:
        """Why the plan cannot be obeyed here, or None where it can."""
        feed, numerics = plan.feed, plan.numerics
        foreign = [name for name in plan.execution.without if name not in (*FIT_TRICKS, *MOVE_WORDS)]
        if foreign:
            return f"execution.without={foreign} is for scripts under `hotlap run` alone"
        if self._cursor is not None:
            reason = why_not(self._cursor.dataset.source, feed, device=self.device)
            if reason is None and feed.kind == "resident":
                reason = self._cursor.why_not_resident(self._reserve())
            if reason:
                return reason
        if plan.execution.ranks > 1 and (reason := self._why_not_shared(plan)):
            return reason
        if plan.execution.mode == "captured" and not self._on_gpu:
            return f"execution.mode='captured' needs a GPU; this training runs on {self.device.type}"
        if plan.execution.mode == "captured" and self._takes_closure:
            return f"{type(self.optimizer).__name__} calls the model by itself, so its step cannot be captured"
        if plan.execution.compile != "no":
            if plan.memory.checkpoint:
                return f"memory.checkpoint={plan.memory.checkpoint} needs blocks that are not compiled"
            if numerics.depthwise == "direct":
                return "numerics.depthwise='direct' needs steps that are not compiled"
            reason = self._compiling.why_not(plan.execution.compile)
            if reason:
                return reason
        reason = why_not_numerics(numerics, self.modules, self.device)
        if reason:
            return reason
        if plan.memory.checkpoint:
            reason = why_not_checkpointed(self.model, plan.memory.checkpoint, self.device)
            if reason:
                return reason
        return why_not_fused(self.optimizer, self.modules) if numerics.optimizer == "fused" else None

    def share(self, exchange: Exchange) -> None:
        """Let plans have several ranks share the batches from here on."""
        self.exchange = self._steps.exchange = exchange
        if self._cursor is not None:
            self._cursor.rank = exchange.rank

    def _why_not_shared(self, plan: Plan) -> str | None:
        """Why ranks cannot share the batches of this training under a plan, or None where they can."""
        execution, exchange = plan.execution, self.exchange
        if exchange is None or exchange.size != execution.ranks:
            there = 1 if exchange is None else exchange.size
            return f"execution.ranks={execution.ranks} needs as many processes, and there is {there}: fit(job, gpus=…)"
        if execution.mode != "eager" or execution.compile != "no":
            return f"execution.ranks={execution.ranks} needs mode='eager' and compile='no' in this version"
        if self._takes_closure:
            return f"{type(self.optimizer).__name__} calls the model by itself, so ranks cannot share its batches"
        if self._cursor is not None and self._cursor.dataset.bad is not None:
            return "skip_bad_samples needs one rank: the others cannot know which samples were left out"
        trained = {id(p) for module in self.modules for p in module.parameters()}
        if any(id(p) not in trained for group in self.optimizer.param_groups for p in group["params"]):
            return "the optimizer holds parameters of neither model nor loss, whose gradients ranks do not exchange"
        return None

    @property
    def _takes_closure(self) -> bool:
        return isinstance(self.optimizer, torch.optim.LBFGS)

    def _reserve(self) -> int:
        """Bytes to leave free besides resident data: gradients, optimizer state, and a tenth for everything else."""
        weights = sum(p.numel() * p.element_size() for module in self.modules for p in module.parameters())
        return 4 * weights + (usable_bytes(self.device) // 10 if self._on_gpu else 0)

    def use(self, plan: Plan, *, why: str = "", outcome: str = "chosen") -> None:
        """Use `plan` from the next step on, with the same weights, optimizer state and place in the data."""
        if not isinstance(plan, Plan):
            raise PlanError(f"plan must be a hotlap.Plan, not {type(plan).__name__}; hotlap.load_plan reads a file")
        plan = self.allowed_plan(plan)
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
        # Each part builds on those before it. From the first that differs on, all are set up again.
        if self._cursor is not None and ("feed" in parts or "layout" in changes):
            self._cursor.change(before.feed)
        elif self._cursor is not None and {"micro_batch", "replay_steps", "ranks"} & set(changes):
            self._cursor.recut()
        if "numerics" in parts or "mode" in changes:
            self.apply_numerics()
        if "layout" in changes and not self._pool.keeps:
            self._steps.clear()  # recordings read weights at addresses that they have left
        what = ", ".join(f"{name} {before} → {after}" for name, (before, after) in changes.items())
        why = "; ".join(filter(None, (why, *self.cautions(plan))))
        self.write_down(what, outcome, why)
        self._step = self._steps.of(plan)

    def keep_plans(self) -> None:
        """Keep what belongs to each plan when another replaces it: captures, workers, data, memory.

        So plans can be tried in turn, until `release_other_plans`.
        """
        self._pool.keeps = True
        if self._cursor is not None:
            self._cursor.keeps = True

    def release_other_plans(self) -> None:
        """Release everything that belongs to plans other than the current one."""
        self._pool.forget()
        self._steps.keep(self._step)
        if self._cursor is not None:
            self._cursor.release_other_plans()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, plans and steps leave no trace: afterwards everything is restored, ledger and running loss included.

        That includes the Python state of modules, the optimizer and the user's functions; see `why_no_trial`. Until the
        end, the ledger shows what was written meanwhile.
        """
        kept = self._pool.keeps
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
            for entry in stays:  # compiled code and chosen kernels stay, and have been paid for
                self.write_down(entry.what, entry.outcome, entry.why, figures=entry.figures, cost_s=entry.cost_s)
            if not kept:
                self.release_other_plans()

    def python_state(self) -> PythonState:
        """The Python state of modules, the optimizer and the user's functions, which a snapshot does not hold."""
        return PythonState(self.modules, self.optimizer, self.objective.functions)

    def why_no_trial(self) -> str | None:
        """Why trial steps would leave a trace: some state could not be restored. None if there is no such state."""
        return next(iter(self.python_state().unknown), None)

    def attention(self, plan: Plan) -> AbstractContextManager[None]:
        """Inside, attention uses the kernels that the plan's steps are recorded with, if the plan records."""
        return self._steps.attention(plan.execution)

    @property
    def warmup_steps(self) -> int:
        """Warm-up windows so far: those that were still to be recorded or compiled."""
        return self._step.warmup_steps + (self._compiling.warmup_steps if self.plan.execution.compile != "no" else 0)

    @property
    def most_replay_steps(self) -> int:
        """The largest number of updates in one replay: one, if hardly any consecutive batches have the same shape."""
        return 1 if self.shapes > FEW_WIDTHS else MOST_REPLAY_STEPS

    @property
    def shapes(self) -> int:
        """Number of shapes that whole batches have: one for each width."""
        source = self._cursor.dataset.source if self._cursor is not None else None
        return max(1, len(source.widths)) if isinstance(source, Columns) else 1

    @property
    def given_up(self) -> str | None:
        """Why nothing is captured, or compiled, though the current plan asks for it; None if the plan is obeyed."""
        return self._step.given_up or self._compiling.given_up.get(self.plan.execution.compile)

    def wait(self) -> None:
        """Wait until the device has finished everything queued."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def cautions(self, plan: Plan) -> list[str]:
        """What a plan changes in the training beyond rounding, a line each. The user decides whether to accept that."""
        micro, is_shared = plan.memory.micro_batch, plan.execution.ranks > 1
        is_cut = micro is not None and (self._cursor is None or micro < self._cursor.dataset.batch_size)
        if not is_cut and not is_shared:
            return []
        found = []
        if any(isinstance(layer, BatchNormBase) and layer.training for layer in self.model.modules()):
            seen = "their rank's part of each batch" if is_shared else "micro-batches"
            found.append(f"batch norms see {seen}, so their statistics differ")
        if not self.objective.adds_up:
            name = getattr(self.loss, "__name__", type(self.loss).__name__)
            found.append(f"the loss {name} is taken as a mean over samples; return (sum, count) where it is not")
        return found

    def _note(self, why: str) -> None:
        """Write to the ledger why the current plan is obeyed in part only."""
        self.write_down("capture", "fault", why)

    def _data_changed(self, why: str) -> None:
        """Called when the data has changed. hotlap fetches it again a few times, then uses the user's own feed only."""
        assert self._cursor is not None
        if self.exchange is not None:
            self.exchange.data_changed()
        own = self._cursor.dataset.feed
        if self.plan.feed in (own, Feed(kind="gather")):
            return  # this feed reads the data in place
        self._changes += 1
        if self._changes <= MOST_CHANGES:
            self.write_down("data changed", "fault", f"{why}; hotlap fetches it again")
            return
        self.write_down(
            "data changed", "fault", f"{why}; hotlap replaces the feed {self.plan.feed.kind} by the job's own"
        )
        self.use(self.plan, why="the data keeps changing")

    def allowed_plan(self, plan: Plan) -> Plan:
        """The plan that the data allows: with the job's own feed if the data keeps changing."""
        if self._changes <= MOST_CHANGES or self._cursor is None or plan.feed.kind == "gather":
            return plan
        execution = dataclasses.replace(plan.execution, replay_steps=1)
        return dataclasses.replace(plan, feed=self._cursor.dataset.feed, execution=execution)

    def write_down(self, what: str, outcome: str, why: str = "", **fields: Any) -> None:
        """Add an entry to the ledger under the current plan; `fields` are other fields of `Entry`."""
        # After a snapshot is restored, the steps since then are made again. The ledger does not go backwards.
        step = max(self.steps, self.ledger.last_step)
        self.ledger.record(Entry(step=step, what=what, outcome=outcome, plan=self.plan, why=why, **fields))

    def apply_numerics(self) -> None:
        """Bring weights and optimizer state into the form that the plan asks for. Call it too after loading them."""
        numerics = self.plan.numerics
        self._fusion.set(numerics.optimizer == "fused", captured=self.plan.execution.mode == "captured")
        self._layout.set(numerics.layout)

    def outdate_ranks(self) -> None:
        """Note that weights, state or data have changed otherwise than by steps: other ranks lack that."""
        if self.exchange is not None:
            self.exchange.is_stale = True

    def restore_layout(self) -> None:
        """Restore the user's own layout of the weights, at the end of the plan."""
        self._layout.set("as given")

    def settle(self) -> None:
        """Bring the host up to date with the device: the schedule's position, if updates may be skipped.

        With several ranks, the running loss then counts the samples of all.
        """
        self._steps.settle()
        if self.exchange is not None:
            for numbers in self.exchange.take_totals():
                self.totals.add_numbers(numbers)

    # --- data ------------------------------------------------------------------------------------

    def feed(self, data: Any, **settings: Any) -> Iterator[Window]:
        """Windows of `data` for `step`. Give batch_size, and epochs or steps.

        Optional are order, reorder, drop_last, collate, accumulate and seed, as in a Job. Another call with the same
        data and settings goes on with the next epoch. So a loop of one epoch each sees another order each time.
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
        elif self.place.window:  # the last loop ended within an epoch: begin the next one
            self.place = Place(self.place.epoch + 1, 0, self.place.served)
        epochs = None if job.epochs is None else self.place.epoch + job.epochs
        steps = None if job.steps is None else self.place.served + job.steps
        return self.windows(epochs=epochs, steps=steps)

    def attach(self, dataset: OrderedDataset) -> None:
        """Train on a dataset from its beginning. Without a given plan, the rig uses the user's own feed."""
        if self._cursor is not None:
            self._cursor.leave()
            self._steps.forget()
        self._cursor, self._feed_given = (
            Cursor(dataset, lambda: self.plan, device=self.device, ignored=self.objective.ignored),
            None,
        )
        self._cursor.on_change, self._changes = self._data_changed, 0
        self._evaluator.bad = dataset.bad
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

    def order_of(self, epoch: int) -> Epoch:
        """The samples of an epoch, over all ranks."""
        assert self._cursor is not None, "attach data first"
        return self._cursor.dataset.order.epoch(epoch)

    def windows(
        self, *, epochs: int | None = None, steps: int | None = None, room: Callable[[], int] | None = None
    ) -> Iterator[Window]:
        """Windows from the current place on, until this many epochs are done or this many updates were given out.

        A window holds several updates if the plan replays several at once, but never more than `room` allows.
        """
        assert self._cursor is not None, "attach data first"
        return self._cursor.windows(epochs=epochs, steps=steps, epoch_ended=self._epoch_ended, room=room)

    def look(self, plan: Plan, windows: Iterable[int]) -> Generator[Window, None, None]:
        """The numbered windows of the current epoch, as `plan` would bring them. The training does not move."""
        assert self._cursor is not None, "attach data first"
        return self._cursor.look(plan, windows)

    @property
    def windows_here(self) -> int:
        """Windows in the training's current epoch, whether it has begun or not."""
        assert self._cursor is not None, "attach data first"
        return self._cursor.windows_here

    def _epoch_ended(self) -> None:
        self.schedule.epoch_ended()

    @property
    def place(self) -> Place:
        """Where in the data the training is."""
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
        """Updates in the current epoch: each window is one."""
        return self.epoch_windows

    def why_no_workers(self) -> str | None:
        """Why worker processes that the user did not ask for might change samples; None if they cannot.

        Draws from the generators of Python, numpy and torch are no reason: hotlap seeds them for each sample.
        """
        return proof_of(self.source, may_draw=True).why_traces

    def keep_samples(self, epochs_left: float) -> int | None:
        """None: samples are fetched when they are to be held."""
        return None

    def holding_s(self, feed: Feed) -> float:
        """Seconds to hold all data on the device, about; 0 if it is there."""
        return self._cursor.holding_s() if feed.kind == "resident" and self._cursor is not None else 0.0

    def close(self) -> None:
        """End worker processes, and release data and captures on the device.

        The rig can go on afterwards: it sets up again what it needs.
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
        """Make an update with a window from `feed`, or with your own batch. Returns its loss, on the device.

        A window from `feed` holds all updates of one replay; the loss is that of the last.
        """
        step = self._step
        return step.kept(self.advance(batch))

    def advance(self, batch: Window | Batch) -> Tensor:
        """As `step`, but the next call may overwrite the loss."""
        window = batch if isinstance(batch, Window) else self._window_of(batch)
        if not window.pieces and not window.of:
            return self._pass_over()
        try:
            if self.exchange is not None:
                self.exchange.begin_step(self, window)
            loss = self._step(window)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if self.exchange is not None:
                self.exchange.raise_lost(error)
            hint = explained(error, window, self.model)
            if hint is None:
                raise
            raise TrainingError(hint) from error
        self.steps += window.updates
        self.samples += window.samples
        return loss

    def _pass_over(self) -> Tensor:
        """A window whose samples were all left out: a step without an update."""
        self.steps += 1
        self.updates -= 1
        self.write_down(NO_SAMPLES, "fault", "all samples of its batch were left out")
        return torch.zeros((), device=self.device)

    @property
    def updates(self) -> int:
        """Real updates of the weights. Waits for the device if the device decides which are made."""
        return self.steps - self.skipped

    @updates.setter
    def updates(self, updates: int) -> None:
        self.guards.set_skipped(self.steps - updates)

    def _window_of(self, batch: Batch) -> Window:
        micro = self.plan.memory.micro_batch
        if micro is None:
            # Without a count of samples, every batch has the same weight in the running loss.
            return Window([batch], [count_samples(batch) or 1])
        return Window(*cut(batch, micro))

    @property
    def skipped(self) -> int:
        """Steps whose update was skipped because their gradients were not finite."""
        return self.guards.skipped

    def evaluate(
        self,
        data: Any,
        metrics: Sequence[str] | Mapping[str, Any] = (),
        *,
        batch_size: int | None = None,
        collate: Any = None,
    ) -> dict[str, float]:
        """Loss and metrics over all of `data`. Mode, random generators and training stay unchanged."""
        wrong = [*data_problems("data", data), *metric_problems(metrics), *_size_problems(batch_size)]
        if wrong:
            raise JobError(wrong)
        size = batch_size or self._evaluation_batch
        share = None if self.exchange is None else self.exchange.evaluation(self, data, size)
        return self._evaluator(data, metrics, batch_size=size, collate=collate, plan=self.plan, share=share)

    def evaluate_part(
        self, data: Any, metrics: Sequence[str] | Mapping[str, Any], batch_size: int, collate: Any
    ) -> list[list[Tensor]]:
        """The sums of this rank's part of an evaluation."""
        assert self.exchange is not None, "there is one rank"
        return self._evaluator.sums(
            data, metrics, batch_size=batch_size, collate=collate, plan=self.plan, share=self.exchange.own_share
        )

    def predict(self, data: Any, *, batch_size: int | None = None, collate: Any = None) -> Any:
        """The model's outputs for all of `data`, in its order, on the host. Mode, random generators and training stay
        unchanged.

        Give `data` as for training, with targets, which are ignored. If the model takes one input, that input alone
        will do.
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
            training=Snapshot(self.modules, self.optimizer, self.schedule.scheduler, self.device),
            totals=self.totals.saved(),
            guards=self.guards.saved(),
            place=self.place,
            counters=(self.steps, self.samples),
        )

    def restore(self, snapshot: RigSnapshot) -> None:
        """Return to a snapshot without a trace; the current plan stays."""
        self.settle()
        snapshot.training.restore()
        self.apply_numerics()
        self.outdate_ranks()
        self.totals.put_back(snapshot.totals)
        self.guards.put_back(snapshot.guards)
        self.place = snapshot.place
        self.steps, self.samples = snapshot.counters


def _size_problems(size: Any) -> list[str]:
    if size is None or (is_whole(size) and size >= 1):
        return []
    return [f"batch_size={shown(size)} must be a whole number of at least 1"]


def _check(**settings: Any) -> None:
    """Raise JobError with all mistakes in a rig's own settings."""
    Job(data=torch.zeros(1, dtype=torch.int64), batch_size=1, epochs=1, **settings)


def _made(wanted: Any, modules: list[nn.Module], device: torch.device) -> Optimizer:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = wanted if isinstance(wanted, Optimizer) else wanted(parameters)
    if not isinstance(optimizer, Optimizer):
        raise JobError([f"optimizer returned {type(optimizer).__name__}, not a torch optimizer"])
    if optimizer.state and device.type != "cpu":
        # The state is older than the model's move: loading it sends each part to its parameter's device.
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer
