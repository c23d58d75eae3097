"""How many updates a script will make in all: nobody tells, so its loops, settings and schedulers are looked at."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from types import FrameType
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from hotlap.core.terminal import logger
from hotlap.script.advise import PYTHON, SCRIPT, home_of
from hotlap.script.find.loops import (
    MOST_EPOCHS,
    MOST_STEPS,
    Loops,
    fields_of,
    is_now_and_then,
    locals_of,
    outwards,
    own_of,
    passes_batches_on,
    statements_around,
    whole_number,
)

log = logger(__name__)

RECENT = 5
"""Epochs that say how long the next ones will be."""
DEEP = 3
"""Settings lie so many objects deep at the most, as in `self.config.train.epochs`."""
# As people name them, without underscores and in lower case.
_EPOCHS = {
    *("epochs", "nepochs", "numepochs", "nbepochs", "noepochs", "maxepochs", "totalepochs", "trainepochs"),
    *("nepoch", "numepoch", "nbepoch", "maxepoch", "totalepoch", "numtrainepochs", "numberofepochs", "trainingepochs"),
}
_STEPS = {
    *("maxsteps", "totalsteps", "numsteps", "nsteps", "trainsteps", "trainingsteps", "numtrainsteps", "maxtrainsteps"),
    *("numtrainingsteps", "totaltrainingsteps", "trainnumsteps", "trainiters", "maxiters", "numiters", "niters"),
    *("totaliters", "iterations", "numiterations", "niterations", "maxiterations", "totaliterations"),
}
_SETTINGS = {
    *("self", "arg", "args", "opt", "opts", "options", "config", "configs", "conf", "cfg", "settings", "flags"),
    *("hp", "hps", "hparams", "hyp", "hyperparams", "hyperparameters", "param", "params", "train", "training"),
    *("trainer", "trainargs", "traincfg", "trainconfig", "trainingargs", "trainingconfig"),
}


class Horizon:
    """Told when epochs begin and how many optimizer steps were made; guesses how many it will be.

    A trainer of a library that is known says it itself. Else the `range` loops around the loader say it; where there
    are none, settings with such names as `epochs`, and learning-rate schedulers. Settings such as `max_steps` may end
    a training before its loops do. Of several guesses, the smallest counts that has not been outrun. Early stopping
    cannot be known. Nothing of the script's is called, and nothing raises.
    """

    def __init__(self) -> None:
        self._sites: dict[Any, _Site] = {}
        self._now = _Site()
        self._steps = 0
        self._read: dict[str, int] = {}
        self._counters: set[str] = set()
        self._followed: dict[int, _Followed] = {}

    @property
    def known(self) -> bool:
        """Whether something in the script tells; else `updates` only knows that it has gone on so far."""
        return self._guess()[1]

    def updates(self) -> int | None:
        """How many optimizer steps it will be in all, as things stand; None where there is nothing to go by."""
        return self._guess()[0]

    def began_epoch(self, loader_length: int | None, frame: FrameType | None) -> None:
        """Told that a loader of the training begins an epoch, in which it has so many batches, for this frame."""
        try:
            self._now.ended_epoch(self._steps)
            frames = list(outwards(frame))
            places = tuple(
                (f.f_code.co_filename, f.f_lineno) for f in frames if home_of(f.f_code.co_filename) == SCRIPT
            )
            self._now = self._sites.setdefault(places, _Site())
            self._now.began, self._now.length, self._now.drawn = self._steps, loader_length, []
            self._look(frames, Loops(loader_length))
        except Exception as error:  # a script may hold anything
            log.debug("an epoch's frames are not understood: %r", error)

    def went_on(self) -> None:
        """Told that the loader begins another epoch where it began the last one, as far as anybody has looked."""
        self._now.ended_epoch(self._steps)
        self._now.began, self._now.drawn = self._steps, []

    def began_steps(self, frame: FrameType | None) -> None:
        """Told of an optimizer step, in this frame, of a training whose batches come from no loader."""
        try:
            frames = list(outwards(frame))
            own = [f for f in frames if home_of(f.f_code.co_filename) == SCRIPT]
            self._now = self._sites.setdefault("steps", _Site())
            loops = Loops(None)
            loops.count_batches = True
            loops.open = bool(own) and not is_now_and_then(
                statements_around(own[0].f_code.co_filename, own[0].f_lineno)
            )
            self._look(frames, loops)
        except Exception as error:  # a script may hold anything
            log.debug("the frames of a step are not understood: %r", error)

    def stepped(self, steps: int, batches: int | None = None) -> None:
        """Told how many optimizer steps were made so far, and how many batches of this epoch were drawn for them."""
        self._steps = steps
        if batches is not None:
            self._now.drawn[1:] = [(steps, batches)]

    def scheduler_seen(self, scheduler: Any) -> None:
        """Told of a learning-rate scheduler; it is not kept alive."""
        known = self._followed.get(id(scheduler))
        if issubclass(type(scheduler), LRScheduler) and (known is None or known.scheduler() is not scheduler):
            self._followed[id(scheduler)] = _Followed(
                weakref.ref(scheduler), self._steps, whole_number(own_of(scheduler).get("last_epoch"), least=0) or 0
            )

    # --- the guess -------------------------------------------------------------------------------

    def _guess(self) -> tuple[int | None, bool]:
        try:
            totals = [total for total in self._totals() if total is not None and total >= self._steps]
            if totals:
                return min(totals), True
        except Exception as error:
            log.debug("how long the script goes on is not understood: %r", error)
        return max(self._now.after(1, self._steps) or 0, 2 * self._steps) or None, False

    def _totals(self) -> Iterator[int | None]:
        site = self._now
        elsewhere = sum(other.still_to_come for other in self._sites.values() if other is not site)
        if site.trainer is not None:
            epochs, steps = site.trainer
            yield steps
            yield self._at_the_end_of(epochs)
            return
        if site.passes is None:
            for name, epochs in site.epochs.items():
                if name not in self._counters:
                    yield self._at_the_end_of(epochs)
            yield from self._scheduled()
        elif site.passes_are_batches:
            yield round(site.passes / site.batches_a_step)
        else:
            # Where it is run through again, this round will be finished.
            total = site.after(site.passes - len(site.whole) % site.passes, self._steps)
            yield total + elsewhere if total is not None else None
        for name, steps in site.steps.items():
            if name not in self._counters:
                yield steps

    def _at_the_end_of(self, epochs: int | None) -> int | None:
        """Steps after so many epochs of the loop that runs now; None where more have begun."""
        left = epochs - len(self._now.whole) if epochs is not None else 0
        return self._now.after(left, self._steps) if left > 0 else None

    def _scheduled(self) -> Iterator[int | None]:
        """What the schedulers say, by whether they move with steps or with epochs."""
        alive = [(row, one) for row in self._followed.values() if (one := row.scheduler()) is not None]
        parts = {id(part) for _, scheduler in alive for part in own_of(scheduler).get("_schedulers") or ()}
        for row, scheduler in alive:
            extent, last = _extent(scheduler), whole_number(own_of(scheduler).get("last_epoch"), least=0)
            steps = self._steps - row.steps
            if extent is None or last is None or last >= extent or id(scheduler) in parts or steps < 2:
                continue
            if 2 * (last - row.last) >= steps:
                yield row.steps + extent - row.last
            elif last - row.last <= len(self._now.whole) + 1:
                yield self._now.after(extent - last, self._steps)

    # --- what the frames show --------------------------------------------------------------------

    def _look(self, frames: Sequence[FrameType], loops: Loops) -> None:
        site = self._now
        site.trainer, site.epochs, site.steps = None, {}, {}
        modules = dict[str, dict[str, Any]]()
        for frame in frames:
            home, local = home_of(frame.f_code.co_filename), locals_of(frame)
            if home == SCRIPT:
                loops.frame(frame, local)
                modules[frame.f_code.co_filename] = frame.f_globals
                if local is not frame.f_globals:
                    self._scan(f"{frame.f_code.co_filename} {frame.f_code.co_name}", local, DEEP)
            elif home in ("transformers", "lightning", "pytorch_lightning"):
                site.trainer = site.trainer or _trainer(local.get("self"), self._steps)
            if home not in (SCRIPT, PYTHON, "torch", "hotlap") and not passes_batches_on(frame):
                loops.open = False  # a library's loop, of which nothing is known, lies between
        for filename, names in modules.items():
            self._scan(filename, names, DEEP)
        site.passes, site.passes_are_batches = loops.passes, bool(loops.count_batches)
        # What says how often a loop is passed says nothing else.
        site.steps = {path: steps for path, steps in site.steps.items() if path.rpartition(".")[2] not in loops.names}

    def _scan(self, where: str, names: Mapping[str, Any], depth: int) -> None:
        for name, value in list(names.items()):
            plain, path = name.replace("_", "").lower(), f"{where}.{name}"
            if issubclass(type(value), LRScheduler):
                self.scheduler_seen(value)
            elif plain in _EPOCHS:
                self._found(self._now.epochs, path, whole_number(value, most=MOST_EPOCHS))
            elif plain in _STEPS:
                steps = whole_number(value, most=MOST_STEPS)
                if steps != self._now.length and (steps or 0) > self._steps:
                    self._found(self._now.steps, path, steps)
            elif plain in _SETTINGS and depth:
                self._scan(path, fields_of(value), depth - 1)

    def _found(self, hints: dict[str, int], path: str, value: int | None) -> None:
        if value is None:
            return
        if self._read.setdefault(path, value) != value:
            self._counters.add(path)
        hints[path] = value


@dataclass
class _Site:
    """A line of the script that runs through a loader, with all that leads there."""

    length: int | None = None
    """Batches an epoch, as the loader says."""
    began: int = 0
    """Steps that were made when the epoch began."""
    whole: list[int] = field(default_factory=list)
    """Steps of each whole epoch that had any."""
    drawn: list[tuple[int, int]] = field(default_factory=list)
    """Steps made and batches drawn, when first told in this epoch and when last told."""
    passes: int | None = None
    """Of the loops around it."""
    passes_are_batches: bool = False
    epochs: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    trainer: tuple[int | None, int | None] | None = None
    """Epochs and steps in all, as a library's trainer has them."""

    def ended_epoch(self, steps: int) -> None:
        if steps > self.began:
            self.whole.append(steps - self.began)
            self.began = steps

    @property
    def batches_a_step(self) -> float:
        """As seen in this epoch: scripts accumulate gradients, or step several times with a batch."""
        if len(self.drawn) < 2:
            return 1.0
        (first, before), (last, now) = self.drawn
        return (now - before) / (last - first) if last > first and now > before else 1.0

    @property
    def steps_an_epoch(self) -> int | None:
        if self.whole:
            return median_high(self.whole[-RECENT:])
        return max(1, round(self.length / self.batches_a_step)) if self.length else None

    @property
    def still_to_come(self) -> int:
        """Steps that it will make beside those of the site that runs now."""
        if not self.whole or not self.passes or self.passes_are_batches:
            return 0
        return -len(self.whole) % self.passes * median_high(self.whole[-RECENT:])

    def after(self, epochs: int, steps: int) -> int | None:
        """Steps in all after so many epochs, the one under way included; None where it is not known how long one is."""
        an_epoch = self.steps_an_epoch
        return None if an_epoch is None else self.began + max(an_epoch, steps - self.began) + (epochs - 1) * an_epoch


@dataclass(frozen=True)
class _Followed:
    """A scheduler, and where it stood when it was first seen."""

    scheduler: weakref.ref[Any]
    steps: int
    last: int


def _extent(scheduler: Any) -> int | None:
    """How many moves a scheduler is made for; None where it goes on for ever, or does not say."""
    kind, own = type(scheduler), own_of(scheduler)
    if issubclass(kind, lr_scheduler.SequentialLR):
        last = _extent(own["_schedulers"][-1])
        return own["_milestones"][-1] + last if last is not None else None
    if issubclass(kind, lr_scheduler.OneCycleLR):
        return whole_number(own.get("total_steps"))
    if issubclass(kind, lr_scheduler.CosineAnnealingLR):
        return whole_number(own.get("T_max"))
    if issubclass(kind, lr_scheduler.PolynomialLR):
        return whole_number(own.get("total_iters"))
    if issubclass(kind, lr_scheduler.LambdaLR):  # those of transformers are such
        rule = own["lr_lambdas"][0]
        return whole_number(rule.keywords.get("num_training_steps")) if type(rule) is functools.partial else None
    return None


def _trainer(thing: Any, steps: int) -> tuple[int | None, int | None] | None:
    """Epochs and steps in all, as the trainer of transformers or Lightning has them."""
    own = own_of(thing)
    state = own_of(own.get("state"))
    if "max_steps" in state and "global_step" in state:
        most = whole_number(state["max_steps"], least=1)
        return None, (steps + most - state["global_step"] if most is not None else None)
    fit = own_of(own.get("fit_loop") or own_of(own.get("trainer")).get("fit_loop"))
    if "max_epochs" in fit:
        return whole_number(fit["max_epochs"], least=1), whole_number(
            own_of(fit.get("epoch_loop")).get("max_steps"), least=1
        )
    return None
