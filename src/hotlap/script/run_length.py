"""How many updates a script will make in all, estimated from its loops, settings and schedulers."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import operator
import sys
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hotlap.core.terminal import logger
from hotlap.script.advice import PYTHON, SCRIPT, home_of

log = logger(__name__)

RECENT = 5
"""Recent epochs whose length predicts that of the next ones."""
DEEP = 3
"""Most levels of objects to search for settings, as in `self.config.train.epochs`."""
# Names that people use, in lower case without underscores.
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


class RunLength:
    """Follows epochs and optimizer steps, and estimates how many steps there will be.

    The trainer of a known library gives the number. Else hotlap uses the `range` loops around the loader; without such
    loops, settings with names like `epochs`, and learning-rate schedulers. Settings like `max_steps` may end a training
    before its loops do. The smallest estimate that is not exceeded yet counts. Early stopping cannot be predicted.
    No code of the script runs, and no method raises.
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
        """Whether the script shows its length; else `updates` only extrapolates from the steps so far."""
        return self._guess()[1]

    def updates(self) -> int | None:
        """Estimated optimizer steps in all; None without any evidence."""
        return self._guess()[0]

    @property
    def first_epoch_ends(self) -> int | None:
        """The step with which the first epoch ends, about; None if that is unknown."""
        return self._now.steps_an_epoch

    def began_epoch(self, loader_length: int | None, frame: FrameType | None) -> None:
        """A loader of the training begins an epoch of `loader_length` batches, called from `frame`."""
        try:
            self._now.ended_epoch(self._steps)
            frames = list(outwards(frame))
            places = tuple(
                (f.f_code.co_filename, f.f_lineno) for f in frames if home_of(f.f_code.co_filename) == SCRIPT
            )
            self._now = self._sites.setdefault(places, _Site())
            self._now.began, self._now.length, self._now.drawn = self._steps, loader_length, []
            self._look(frames, EnclosingLoops(loader_length))
        except Exception as error:  # a script may hold anything
            log.debug("cannot read the frames of an epoch: %r", error)

    def repeated_epoch(self) -> None:
        """The loader begins another epoch, assumed to be at the same place as the last one."""
        self._now.ended_epoch(self._steps)
        self._now.began, self._now.drawn = self._steps, []

    def began_steps(self, frame: FrameType | None) -> None:
        """An optimizer made a step in a training without a loader, called from `frame`."""
        try:
            frames = list(outwards(frame))
            own = [f for f in frames if home_of(f.f_code.co_filename) == SCRIPT]
            self._now = self._sites.setdefault("steps", _Site())
            loops = EnclosingLoops(None)
            loops.count_batches = True
            loops.open = bool(own) and not is_now_and_then(
                statements_around(own[0].f_code.co_filename, own[0].f_lineno)
            )
            self._look(frames, loops)
        except Exception as error:  # a script may hold anything
            log.debug("cannot read the frames of a step: %r", error)

    def stepped(self, steps: int, batches: int | None = None) -> None:
        """Optimizer steps made so far, and batches of this epoch drawn for them."""
        self._steps = steps
        if batches is not None:
            self._now.drawn[1:] = [(steps, batches)]

    def scheduler_seen(self, scheduler: Any) -> None:
        """Follow a learning-rate scheduler, without keeping it alive."""
        known = self._followed.get(id(scheduler))
        if issubclass(type(scheduler), LRScheduler) and (known is None or known.scheduler() is not scheduler):
            self._followed[id(scheduler)] = _Followed(
                weakref.ref(scheduler), self._steps, whole_number(own_of(scheduler).get("last_epoch"), least=0) or 0
            )

    # --- the estimate ------------------------------------------------------------------------

    def _guess(self) -> tuple[int | None, bool]:
        try:
            totals = [total for total in self._totals() if total is not None and total >= self._steps]
            if totals:
                return min(totals), True
        except Exception as error:
            log.debug("cannot estimate the length of the run: %r", error)
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
            # If the script runs through it again, it will finish this round.
            total = site.after(site.passes - len(site.whole) % site.passes, self._steps)
            yield total + elsewhere if total is not None else None
        for name, steps in site.steps.items():
            if name not in self._counters:
                yield steps

    def _at_the_end_of(self, epochs: int | None) -> int | None:
        """Steps after so many epochs of the current loop; None if more have begun."""
        left = epochs - len(self._now.whole) if epochs is not None else 0
        return self._now.after(left, self._steps) if left > 0 else None

    def _scheduled(self) -> Iterator[int | None]:
        """Estimates from schedulers, each by whether it moves with steps or with epochs."""
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

    # --- reading frames ----------------------------------------------------------------------

    def _look(self, frames: Sequence[FrameType], loops: EnclosingLoops) -> None:
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
                loops.open = False  # an unknown library's loop lies between
        for filename, names in modules.items():
            self._scan(filename, names, DEEP)
        site.passes, site.passes_are_batches = loops.passes, bool(loops.count_batches)
        # A setting that bounds a loop counts only as the bound of that loop.
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
    """A line of the script that iterates over a loader, with the lines that call it."""

    length: int | None = None
    """Batches an epoch, from the loader."""
    began: int = 0
    """Steps made before the epoch began."""
    whole: list[int] = field(default_factory=list)
    """Steps of each whole epoch with any steps."""
    drawn: list[tuple[int, int]] = field(default_factory=list)
    """Steps and batches so far, at the first and the latest report in this epoch."""
    passes: int | None = None
    """Passes of the enclosing loops."""
    passes_are_batches: bool = False
    epochs: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    trainer: tuple[int | None, int | None] | None = None
    """Epochs and steps in all, from a library's trainer."""

    def ended_epoch(self, steps: int) -> None:
        if steps > self.began:
            self.whole.append(steps - self.began)
            self.began = steps

    @property
    def batches_a_step(self) -> float:
        """Batches for each step in this epoch: scripts accumulate gradients, or step several times with a batch."""
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
        """Steps it will still make while another site runs now."""
        if not self.whole or not self.passes or self.passes_are_batches:
            return 0
        return -len(self.whole) % self.passes * median_high(self.whole[-RECENT:])

    def after(self, epochs: int, steps: int) -> int | None:
        """Steps in all after so many epochs, including the current one; None if an epoch's length is unknown."""
        an_epoch = self.steps_an_epoch
        return None if an_epoch is None else self.began + max(an_epoch, steps - self.began) + (epochs - 1) * an_epoch


@dataclass(frozen=True)
class _Followed:
    """A scheduler, and its state when hotlap first saw it."""

    scheduler: weakref.ref[Any]
    steps: int
    last: int


def _extent(scheduler: Any) -> int | None:
    """How many moves a scheduler is made for; None if it has no end or does not show it."""
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
    if issubclass(kind, lr_scheduler.LambdaLR):  # transformers uses these
        rule = own["lr_lambdas"][0]
        return whole_number(rule.keywords.get("num_training_steps")) if type(rule) is functools.partial else None
    return None


def _trainer(thing: Any, steps: int) -> tuple[int | None, int | None] | None:
    """Epochs and steps in all, from the trainer of transformers or Lightning."""
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


# --- enclosing loops, from source and frames ---------------------------------------------


_AROUND_RANGES = {"tqdm", "tqdm_notebook", "enumerate", "list", "iter", "reversed", "track", "master_bar"}
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class EnclosingLoops:
    """The loops around a loader, from the innermost frame outwards."""

    def __init__(self, loader_length: int | None) -> None:
        self._length = loader_length
        self.passes: int | None = None
        self.count_batches: bool | None = None
        """Whether each pass draws one batch instead of iterating over the loader; None while unknown."""
        self.names: set[str] = set()
        """Names that bound the loops."""
        self.open = True
        """Whether outer loops count: none outside a loop with an unknown number of passes."""

    def frame(self, frame: FrameType, local: Mapping[str, Any]) -> None:
        """Count the loops of one frame of the script."""
        code = frame.f_code
        if not self.open or (code.co_name.startswith("<") and code.co_name != "<module>"):
            return  # a comprehension: the frame around it is at the same line
        around, generates = (
            statements_around(code.co_filename, frame.f_lineno),
            bool(code.co_flags & inspect.CO_GENERATOR),
        )
        if self.count_batches is None:
            self.count_batches = _draws_batches(around, generates=generates)
        if generates and self.count_batches is not False:
            return  # a generator runs as long as its caller draws from it
        names = ChainMap(dict(local), frame.f_globals)
        for loop in reversed(around[:-1]):
            if isinstance(loop, ast.While):
                self.open = False
            elif isinstance(loop, ast.For) and not isinstance(loop.iter, ast.List | ast.Tuple):
                passes = self._passes(loop.iter, names)
                self.open = passes is not None and passes <= MOST_EPOCHS * (10_000 if self.count_batches else 1)
                if passes and self.open:
                    self.passes = (self.passes or 1) * passes
            if not self.open:
                return

    def _passes(self, loop: ast.expr, names: Mapping[str, Any]) -> int | None:
        if isinstance(loop, ast.Call):
            called = loop.func.attr if isinstance(loop.func, ast.Attribute) else getattr(loop.func, "id", "")
            if called in ("range", "trange"):
                bounds = [whole_number(self._value(bound, names), least=-MOST_STEPS) for bound in loop.args]
                whole = [bound for bound in bounds if bound is not None]
                return len(range(*whole)) if whole and len(whole) == len(bounds) else None
            return self._passes(loop.args[0], names) if called in _AROUND_RANGES and loop.args else None
        value = self._value(loop, names)
        value = own_of(value).get("iterable", value)  # a progress bar holds its range there
        is_counted = type(value) is range or (self.count_batches and type(value) in (list, tuple))  # of batches
        return len(value) if is_counted else None

    def _value(self, expression: ast.expr, names: Mapping[str, Any]) -> Any:
        """The value of an expression of names, fields, lengths and integers; None for other expressions."""
        match expression:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                self.names.add(name)
                return names.get(name)
            case ast.Attribute(of, name) | ast.Subscript(of, ast.Constant(str(name))):
                self.names.add(name)
                return fields_of(self._value(of, names)).get(name)
            case ast.BinOp(left, sign, right) if type(sign) in _ARITHMETIC:
                a, b = (whole_number(self._value(side, names), least=-MOST_STEPS) for side in (left, right))
                return _ARITHMETIC[type(sign)](a, b) if a is not None and b is not None else None
            case ast.Call(ast.Name("int"), [number]):
                return self._value(number, names)
            case ast.Call(ast.Name("len"), [of]):
                held = self._value(of, names)
                return self._length if issubclass(type(held), DataLoader) else self._side(held, 0)
            case ast.Call(ast.Attribute(of, "size"), [side]) | ast.Subscript(ast.Attribute(of, "shape"), side):
                return self._side(self._value(of, names), self._value(side, names))
        return None

    @staticmethod
    def _side(held: Any, number: Any) -> int | None:
        """The length of one dimension of the data that batches are cut from; None for other objects."""
        if type(held) in (Tensor, np.ndarray, np.memmap):
            sides = tuple(held.shape)
        else:
            sides = (len(held),) if type(held) in (list, tuple, range) else ()
        return sides[number] if type(number) is int and -len(sides) <= number < len(sides) else None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def passes_batches_on(frame: FrameType) -> bool:
    """Whether a library's frame only stands between loader and loop, as that of a progress bar."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR) or frame.f_code.co_name in ("__iter__", "__next__")


def locals_of(frame: FrameType) -> Mapping[str, Any]:
    """The local variables of a frame. Before Python 3.13, reading them leaves a copy in it that keeps batches alive."""
    held = frame.f_locals
    if held is frame.f_globals or type(held) is not dict or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return held
    found = dict(held)
    if sys.getrefcount(held) <= 3:  # else the script itself uses the copy
        code = frame.f_code
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            held.pop(name, None)
    return found


@functools.lru_cache(maxsize=64)
def statements_around(filename: str, line: int) -> list[ast.AST]:
    """The statements around a line, from outside to inside, within its function."""
    try:
        found = _path_to(line, ast.parse("".join(linecache.getlines(filename))).body)
    except (SyntaxError, ValueError):
        return []
    # Statements around a function run when it is defined, not when it is called.
    functions = [n for n, statement in enumerate(found[:-1]) if isinstance(statement, ast.FunctionDef | ast.ClassDef)]
    return found[functions[-1] + 1 :] if functions else found


def is_now_and_then(around: Sequence[ast.AST]) -> bool:
    """Whether not every pass of the innermost loop reaches a line, as when gradients accumulate."""
    loops = [number for number, one in enumerate(around) if isinstance(one, ast.For | ast.While)]
    return any(isinstance(one, ast.If) for one in around[(loops[-1] + 1 if loops else 0) :])


def _path_to(line: int, nodes: Iterable[ast.AST]) -> list[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.stmt | ast.ExceptHandler) and node.lineno <= line <= (node.end_lineno or 0):
            return [node, *_path_to(line, ast.iter_child_nodes(node))]
    return []


def _draws_batches(around: Sequence[ast.AST], *, generates: bool) -> bool | None:
    """Whether a line draws one batch in each pass of the loops around it; None if that depends on the caller.

    A `for` over the loader runs through it, and so does an iterator that each pass creates. An iterator that is created
    again only when exhausted gives one batch at a time, and so does an endless generator.
    """
    *outer, last = around or [ast.Pass()]
    loops = [statement for statement in outer if isinstance(statement, ast.For | ast.While)]
    if generates and any(isinstance(loop, ast.While) for loop in loops):
        return True
    if not isinstance(last, ast.For):
        called = {getattr(node.func, "id", "") for node in ast.walk(last) if isinstance(node, ast.Call)}
        since = outer[outer.index(loops[-1]) :] if loops else outer
        if "next" in called or ("iter" in called and any(isinstance(one, ast.If | ast.ExceptHandler) for one in since)):
            return True
    return None if generates and not loops else False


# --- reading objects without running their code ------------------------------------------


MOST_EPOCHS, MOST_STEPS = 100_000, 10**9
"""Larger numbers mean that the script stops by other means."""
MOST_FIELDS = 1000
"""A larger dict holds data, not settings."""


def own_of(thing: Any) -> Mapping[str, Any]:
    """The attributes in an object's own `__dict__`; runs none of its code."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, Mapping) else {}


def fields_of(thing: Any) -> Mapping[str, Any]:
    """Settings by name, from a dict, a class or an object; runs none of their code."""
    if issubclass(type(thing), dict):
        few = dict.__len__(thing) < MOST_FIELDS
        return {name: value for name, value in dict.items(thing) if type(name) is str} if few else {}
    kind = thing if issubclass(type(thing), type) else type(thing)
    return ChainMap(*(dict(own_of(one)) for one in (thing, *type.mro(kind)) if one is not object))


def whole_number(value: Any, *, least: int = 2, most: int = MOST_STEPS) -> int | None:
    """A count as an int, also from `3.0`; None for True and for values out of range."""
    if type(value) is float and math.isfinite(value) and value == int(value):
        value = int(value)
    return value if type(value) is int and least <= value <= most else None
