"""A training that is set up: what to train and with which rig, before it has a folder or makes a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from hotlap import machine
from hotlap.core.console import Console
from hotlap.core.data_checks import value_warnings
from hotlap.core.errors import JobError
from hotlap.core.job import Job
from hotlap.core.job_checks import plateau_problems
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.object_memory import Path, generators_in
from hotlap.core.plan import Plan
from hotlap.data.dataset import OrderedDataset
from hotlap.data.sources import Columns, Selection, Source
from hotlap.engine.augment import Augment, check_classes
from hotlap.engine.exchange import Exchange
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import Modes, changes_of
from hotlap.fitting.deadline import TimeLimit
from hotlap.fitting.progress import Voice
from hotlap.guard.identity import identity
from hotlap.machine.session_end import SessionEnd, session_end
from hotlap.moves import everything
from hotlap.ranks.worth import shared
from hotlap.tuner.tuner import plan_changes


class TaskMemory:
    """What model, loss, optimizer, functions and sampler come to remember while they train, for checkpoints."""

    def __init__(self, rig: Rig, job: Job) -> None:
        self.changes = changes_of(rig.modules, rig.optimizer, rig.objective.functions)
        self._dataset = job.data.dataset if isinstance(job.data, DataLoader) else job.data
        self._first, self._drawn_from = self._plain(), generators_in("data", self._dataset)
        self._told: set[str] = set()

    def found(self) -> tuple[list[tuple[Path, Any]], str | None]:
        """What has changed, and one line on what of it no checkpoint holds, unless an earlier line said so."""
        found, unsaved = self.changes.found()
        now = self._plain()
        changed = [name for name, value in now.items() if self._first.get(name, value) != value]
        unsaved += [f"data.{name}, which the dataset changes" for name in changed]
        unsaved += [f"{name}, which the dataset draws from" for name in self._drawn_from]
        new = [line for line in unsaved if line not in self._told]
        self._told.update(new)
        return found, f"a resumed run begins anew with what no checkpoint holds: {'; '.join(new)}" if new else None

    def _plain(self) -> dict[str, Any]:
        attributes = getattr(self._dataset, "__dict__", {})
        return {name: value for name, value in attributes.items() if isinstance(value, (int, float, str, type(None)))}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one call of `fit` trains, and what stays fixed meanwhile."""

    job: Job
    dataset: OrderedDataset
    rig: Rig
    voice: Voice
    save_every: int | None
    """Updates between two checkpoints; None leaves it to hotlap, 0 keeps none."""
    total: int
    """Windows to train."""
    identity: dict[str, Any]
    """What a resumed training is known by."""
    versions: dict[str, Any]
    modes: Modes
    """Which layers were in training mode when the model was handed over."""
    start_s: float
    """When it was set up, by the clock of this process."""

    memory: TaskMemory
    """What the training comes to remember beside weights and state."""
    tune_s: float | None = None
    """Seconds that tuning may cost at most."""
    own_plan: Plan
    """What the job itself describes, as it is given."""
    tuned: bool = False
    """Whether the plan is found while it trains."""
    on_evaluation: Callable[[dict[str, Any]], object] | None = None
    """Called with the figures of each evaluation."""
    limit: TimeLimit | None = None
    """When it has to be over."""
    found: Plan | None = None
    """A plan to begin with, where it is looked after."""
    repeats: int = 1
    """Trainings like this one that the plan will serve."""
    replayed: Ledger | None = None
    """The ledger of the run whose plans are used again, each at its step."""
    logs: Sequence[str] = ()
    """Names of the logs that metrics go to beside the run folder."""
    ranks: int = 1
    """Processes that share each batch under a fixed plan; a plan that is tuned begins with one."""
    session_end: SessionEnd | None = None
    """When the session of this process ends, where that is known."""

    def facts(self) -> dict[str, Any]:
        """What a checkpoint and `record.json` say of it, with the plan settled on and how that is chosen."""
        plan = self.rig.settled.to_dict()
        return {"identity": self.identity, "plan": plan, "how": self.how, "versions": self.versions}

    @property
    def how(self) -> str:
        """How the plan is chosen: `auto`, `fixed`, or the lines of the ledger that is replayed."""
        if self.replayed is not None:
            return plan_changes(self.replayed).to_lines()
        return TUNED if self.tuned else FIXED

    @cached_property
    def value_warnings(self) -> list[str]:
        """Numbers in the job's data that spoil weights, a line each."""
        job = self.job
        valid = [] if job.valid is None else value_warnings("valid", job.valid)
        return value_warnings("data", job.data) + valid

    def notes(self) -> list[str]:
        """What is allowed in a job, and seldom meant, a line each."""
        found, rig, samples = [], self.rig, len(self.dataset.source)
        held = {id(p) for group in rig.optimizer.param_groups for p in group["params"]}
        trained = [p for p in rig.model.parameters() if p.requires_grad]
        mine = sum(id(p) in held for p in trained)
        if mine < len(trained):
            found.append(
                f"the optimizer holds {mine} of the model's {len(trained)} parameter tensors that require gradients; "
                "the others are not trained"
            )
        if (size := self.dataset.batch_size) is not None and size > samples:
            found.append(f"batch_size={size:,} is larger than the data: each epoch is one batch of {samples:,} samples")
        if rig.exchange is not None:
            ranks, size = rig.exchange.size, self.dataset.batch_size
            found.append(
                f"each batch of {size:,} samples is shared by {ranks} ranks, {-(-size // ranks):,} at most each"
            )
            if rig.device.type == "cpu":
                found.append(f"on the CPU, gpus={ranks} means {ranks} processes, each with a part of the cores")
        return found

    def with_ranks(self, plan: Plan) -> Plan:
        """A plan of a run with as many ranks as this one has, which may be others."""
        return plan.but(ranks=1) if self.ranks == 1 else shared(plan, self.ranks)

    def weights_bytes(self) -> int:
        """How large the weights are."""
        return sum(t.numel() * t.element_size() for t in trained_tensors(self.rig).values())

    @property
    def keeps_best(self) -> bool:
        """Whether the weights of the best evaluation are kept while it trains."""
        return self.job.patience is not None or (self.limit is not None and self.job.valid is not None)

    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint will be: weights, the optimizer's state, and the best weights."""
        weights = self.weights_bytes()
        defaults = self.rig.optimizer.defaults
        states = 2 if "betas" in defaults else 1 if defaults.get("momentum") else 0
        return weights * (1 + states + self.keeps_best)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan that was found by tuning; given to `fit`, the training begins with it and hotlap looks after it."""

    plan: Plan
    ledger: Ledger
    updates: int
    """Updates that finding it took."""


EVERYTHING, TUNED, OFF = "max", "auto", "off"
"""Names of plans: everything this machine can do; what pays, found while training; the user's own."""
FIXED = "fixed"
"""The word for a plan that nothing changes while it trains."""


def _use_everything(rig: Rig) -> None:
    found = everything(rig)
    rig.use(found.plan, why="all that this machine can do, unmeasured")
    for move, reason in found.not_made:
        rig.ledger.record(
            Entry(step=rig.steps, what=move.name, outcome="not tried", plan=rig.plan, why=reason),
        )


def check_targets(augment: Augment, source: Source) -> None:
    """Raises TrainingError where targets are to be mixed that are of no class, as far as all of them are at hand."""
    inner, rows = (source.inner, source.rows) if isinstance(source, Selection) else (source, None)
    if not isinstance(inner, Columns) or inner.own_collate or len(inner.tensors) != 2:
        return
    _, target = inner.tensors.values()
    if augment.classes and not target.is_floating_point() and target.ndim == 1:
        check_classes(target if rows is None else target[rows.to(target.device)], augment.classes)


def set_up(
    job: Job,
    dataset: OrderedDataset,
    plan: Plan | Found | Mapping[str, Any] | Ledger | str,
    device: torch.device,
    console: Console,
    save_every: int | None,
    without: Sequence[str] = (),
    exchange: Exchange | None = None,
) -> Task:
    """Make the rig and put it under the plan; raises HotlapError where the job or the plan will not do."""
    start_s = time.perf_counter()
    end = session_end()
    total = job.steps if job.steps is not None else len(dataset.order.epoch(0)) * (job.epochs or 0)
    modes = Modes([job.model])
    rig = Rig(
        job.model,
        job.optimizer,
        job.loss,
        forward=job.forward,
        prepare=job.prepare,
        augment=job.augment,
        schedule=job.schedule,
        schedule_per=job.schedule_per,
        updates=job.epochs if job.schedule_per == "epoch" else total,
        clip=job.clip,
        skip_nonfinite=job.skip_nonfinite,
        device=device,
    )
    if isinstance(rig.schedule.scheduler, ReduceLROnPlateau):
        wrong = plateau_problems(rig.schedule.scheduler, job)
        if wrong:
            raise JobError(wrong)
    rig.attach(dataset)
    if exchange is not None:
        rig.share(exchange)
    if isinstance(job.augment, Augment) and job.augment.mixes and job.prepare is None:
        check_targets(job.augment, dataset.source)
    if without:
        rig.use(rig.plan.but(without=without), why="left out, as asked")
    own_plan = rig.plan
    if plan == EVERYTHING:
        _use_everything(rig)
    elif not isinstance(plan, (str, Ledger, Found)):
        chosen = plan if isinstance(plan, Plan) else rig.plan.but(**plan)
        rig.use(chosen.but(without=(*chosen.execution.without, *without)), why="given")
    ranks = rig.plan.execution.ranks
    if exchange is not None and not isinstance(plan, (Ledger, Found)) and plan != TUNED:
        ranks = exchange.size
        rig.use(shared(rig.plan, ranks) if isinstance(plan, str) else rig.plan.but(ranks=ranks), why="asked for")
    return Task(
        job=job,
        dataset=dataset,
        rig=rig,
        voice=Voice(console),
        save_every=save_every,
        total=total,
        identity=identity(job, dataset, rig.optimizer),
        versions=machine.environment()["versions"],
        modes=modes,
        start_s=start_s,
        memory=TaskMemory(rig, job),
        own_plan=own_plan,
        tuned=plan == TUNED or isinstance(plan, Found),
        found=plan.plan if isinstance(plan, Found) else None,
        replayed=plan if isinstance(plan, Ledger) else None,
        ranks=ranks,
        session_end=end,
    )


def trained_tensors(rig: Rig) -> dict[str, Tensor]:
    """Every weight and buffer that training may change, the loss's own included."""
    return {
        f"{number}.{name}": tensor
        for number, module in enumerate(rig.modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
