"""How many updates a script will make in all: nobody tells, so its loops, settings and schedulers are looked at."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import logging
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

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hotlap.script.waits import PYTHON, SCRIPT, home_of

log = logging.getLogger(__name__)

MOST_EPOCHS, MOST_STEPS = 100_000, 10**9
"""What is more says that somebody stops the script otherwise."""
RECENT = 5
"""Epochs that say how long the next ones will be."""
DEEP = 3
"""Settings lie so many objects deep at the most, as in `self.config.train.epochs`."""
MOST_FIELDS = 1000
"""A dict that holds more holds data."""
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
_AROUND_RANGES = {"tqdm", "tqdm_notebook", "enumerate", "list", "iter", "reversed", "track", "master_bar"}
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
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
            frames = list(_outwards(frame))
            places = tuple(
                (f.f_code.co_filename, f.f_lineno) for f in frames if home_of(f.f_code.co_filename) == SCRIPT
            )
            self._now = self._sites.setdefault(places, _Site())
            self._now.began, self._now.length, self._now.drawn = self._steps, loader_length, []
            self._look(frames, _Loops(loader_length))
        except Exception as error:  # a script may hold anything
            log.debug("an epoch's frames are not understood: %r", error)

    def began_steps(self, frame: FrameType | None) -> None:
        """Told of an optimizer step, in this frame, of a training whose batches come from no loader."""
        try:
            frames = list(_outwards(frame))
            own = [f for f in frames if home_of(f.f_code.co_filename) == SCRIPT]
            self._now = self._sites.setdefault("steps", _Site())
            loops = _Loops(None)
            loops.count_batches = True
            loops.open = bool(own) and not _is_now_and_then(_around(own[0].f_code.co_filename, own[0].f_lineno))
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
                weakref.ref(scheduler), self._steps, _whole(_own(scheduler).get("last_epoch"), least=0) or 0
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
        parts = {id(part) for _, scheduler in alive for part in _own(scheduler).get("_schedulers") or ()}
        for row, scheduler in alive:
            extent, last = _extent(scheduler), _whole(_own(scheduler).get("last_epoch"), least=0)
            steps = self._steps - row.steps
            if extent is None or last is None or last >= extent or id(scheduler) in parts or steps < 2:
                continue
            if 2 * (last - row.last) >= steps:
                yield row.steps + extent - row.last
            elif last - row.last <= len(self._now.whole) + 1:
                yield self._now.after(extent - last, self._steps)

    # --- what the frames show --------------------------------------------------------------------

    def _look(self, frames: Sequence[FrameType], loops: _Loops) -> None:
        site = self._now
        site.trainer, site.epochs, site.steps = None, {}, {}
        modules = dict[str, dict[str, Any]]()
        for frame in frames:
            home, local = home_of(frame.f_code.co_filename), _locals_of(frame)
            if home == SCRIPT:
                loops.frame(frame, local)
                modules[frame.f_code.co_filename] = frame.f_globals
                if local is not frame.f_globals:
                    self._scan(f"{frame.f_code.co_filename} {frame.f_code.co_name}", local, DEEP)
            elif home in ("transformers", "lightning", "pytorch_lightning"):
                site.trainer = site.trainer or _trainer(local.get("self"), self._steps)
            if home not in (SCRIPT, PYTHON, "torch", "hotlap") and not _passes_batches_on(frame):
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
                self._found(self._now.epochs, path, _whole(value, most=MOST_EPOCHS))
            elif plain in _STEPS:
                steps = _whole(value, most=MOST_STEPS)
                if steps != self._now.length and (steps or 0) > self._steps:
                    self._found(self._now.steps, path, steps)
            elif plain in _SETTINGS and depth:
                self._scan(path, _fields(value), depth - 1)

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


class _Loops:
    """The loops around a loader, followed from the innermost frame outwards."""

    def __init__(self, loader_length: int | None) -> None:
        self._length = loader_length
        self.passes: int | None = None
        self.count_batches: bool | None = None
        """Whether each pass draws a batch, rather than run through the loader; None while that is open."""
        self.names: set[str] = set()
        """Those that said how often the loops are passed."""
        self.open = True
        """Whether loops further out count: none beyond one of which it is not known how often it is passed."""

    def frame(self, frame: FrameType, local: Mapping[str, Any]) -> None:
        """Count the loops of one frame of the script."""
        code = frame.f_code
        if not self.open or (code.co_name.startswith("<") and code.co_name != "<module>"):
            return  # a comprehension: the frame around it stands at the same line
        around, generates = _around(code.co_filename, frame.f_lineno), bool(code.co_flags & inspect.CO_GENERATOR)
        if self.count_batches is None:
            self.count_batches = _draws_batches(around, generates=generates)
        if generates and self.count_batches is not False:
            return  # it goes on for as long as somebody draws from it
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
                bounds = [_whole(self._value(bound, names), least=-MOST_STEPS) for bound in loop.args]
                whole = [bound for bound in bounds if bound is not None]
                return len(range(*whole)) if whole and len(whole) == len(bounds) else None
            return self._passes(loop.args[0], names) if called in _AROUND_RANGES and loop.args else None
        value = self._value(loop, names)
        value = _own(value).get("iterable", value)  # as a progress bar has it
        return len(value) if type(value) is range else None

    def _value(self, said: ast.expr, names: Mapping[str, Any]) -> Any:
        """What an expression of names, fields and whole numbers stands for; None where it is any other."""
        match said:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                self.names.add(name)
                return names.get(name)
            case ast.Attribute(of, name) | ast.Subscript(of, ast.Constant(str(name))):
                self.names.add(name)
                return _fields(self._value(of, names)).get(name)
            case ast.BinOp(left, sign, right) if type(sign) in _ARITHMETIC:
                a, b = (_whole(self._value(side, names), least=-MOST_STEPS) for side in (left, right))
                return _ARITHMETIC[type(sign)](a, b) if a is not None and b is not None else None
            case ast.Call(ast.Name("int"), [number]):
                return self._value(number, names)
            case ast.Call(ast.Name("len"), [of]) if issubclass(type(self._value(of, names)), DataLoader):
                return self._length
        return None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _passes_batches_on(frame: FrameType) -> bool:
    """Whether a library's frame only stands between a loader and its loop, as a progress bar's does."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR) or frame.f_code.co_name in ("__iter__", "__next__")


def _locals_of(frame: FrameType) -> Mapping[str, Any]:
    """Its local variables. Until Python 3.13 asking leaves a copy in the frame, which would keep a batch alive."""
    held = frame.f_locals
    if held is frame.f_globals or type(held) is not dict or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return held
    found = dict(held)
    if sys.getrefcount(held) <= 3:  # else the script itself holds on to it
        code = frame.f_code
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            held.pop(name, None)
    return found


@functools.lru_cache(maxsize=64)
def _around(filename: str, line: int) -> list[ast.AST]:
    """The statements that a line lies in, from outside to inside, within the function it belongs to."""
    try:
        found = _path_to(line, ast.parse("".join(linecache.getlines(filename))).body)
    except (SyntaxError, ValueError):
        return []
    # Whatever is around a function is passed when it is made, not when it is called.
    functions = [n for n, statement in enumerate(found[:-1]) if isinstance(statement, ast.FunctionDef | ast.ClassDef)]
    return found[functions[-1] + 1 :] if functions else found


def _is_now_and_then(around: Sequence[ast.AST]) -> bool:
    """Whether a line is not reached in every pass of the innermost loop around it, as where gradients add up."""
    loops = [number for number, one in enumerate(around) if isinstance(one, ast.For | ast.While)]
    return any(isinstance(one, ast.If) for one in around[(loops[-1] + 1 if loops else 0) :])


def _path_to(line: int, nodes: Iterable[ast.AST]) -> list[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.stmt | ast.ExceptHandler) and node.lineno <= line <= (node.end_lineno or 0):
            return [node, *_path_to(line, ast.iter_child_nodes(node))]
    return []


def _draws_batches(around: Sequence[ast.AST], *, generates: bool) -> bool | None:
    """Whether a line draws one batch of many in each pass of the loops around it; None where whoever draws decides.

    A `for` over the loader runs through it; so does an iterator that each pass makes anew. One that is made anew only
    when it has run out is drawn from batch by batch, and so is a generator that never ends.
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


def _own(thing: Any) -> Mapping[str, Any]:
    """The attributes that an object itself holds; none of its code runs."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _fields(thing: Any) -> Mapping[str, Any]:
    """What settings hold by name, be they a dict, a class or an object; none of their code runs."""
    if issubclass(type(thing), dict):
        few = dict.__len__(thing) < MOST_FIELDS
        return {name: value for name, value in dict.items(thing) if type(name) is str} if few else {}
    kind = thing if issubclass(type(thing), type) else type(thing)
    return ChainMap(*(dict(_own(one)) for one in (thing, *type.mro(kind)) if one is not object))


def _whole(value: Any, *, least: int = 2, most: int = MOST_STEPS) -> int | None:
    """A number that counts something; `3.0` does, True does not."""
    if type(value) is float and math.isfinite(value) and value == int(value):
        value = int(value)
    return value if type(value) is int and least <= value <= most else None


def _extent(scheduler: Any) -> int | None:
    """How many moves a scheduler is made for; None where it goes on for ever, or does not say."""
    kind, own = type(scheduler), _own(scheduler)
    if issubclass(kind, lr_scheduler.SequentialLR):
        last = _extent(own["_schedulers"][-1])
        return own["_milestones"][-1] + last if last is not None else None
    if issubclass(kind, lr_scheduler.OneCycleLR):
        return _whole(own.get("total_steps"))
    if issubclass(kind, lr_scheduler.CosineAnnealingLR):
        return _whole(own.get("T_max"))
    if issubclass(kind, lr_scheduler.PolynomialLR):
        return _whole(own.get("total_iters"))
    if issubclass(kind, lr_scheduler.LambdaLR):  # those of transformers are such
        rule = own["lr_lambdas"][0]
        return _whole(rule.keywords.get("num_training_steps")) if type(rule) is functools.partial else None
    return None


def _trainer(thing: Any, steps: int) -> tuple[int | None, int | None] | None:
    """Epochs and steps in all, as the trainer of transformers or Lightning has them."""
    own = _own(thing)
    state = _own(own.get("state"))
    if "max_steps" in state and "global_step" in state:
        most = _whole(state["max_steps"], least=1)
        return None, (steps + most - state["global_step"] if most is not None else None)
    fit = _own(own.get("fit_loop") or _own(own.get("trainer")).get("fit_loop"))
    if "max_epochs" in fit:
        return _whole(fit["max_epochs"], least=1), _whole(_own(fit.get("epoch_loop")).get("max_steps"), least=1)
    return None
