"""The loops of a script around its loader: read from its source, and from the frames that stand in them."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import operator
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

_AROUND_RANGES = {"tqdm", "tqdm_notebook", "enumerate", "list", "iter", "reversed", "track", "master_bar"}
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class Loops:
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
        around, generates = (
            statements_around(code.co_filename, frame.f_lineno),
            bool(code.co_flags & inspect.CO_GENERATOR),
        )
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
                bounds = [whole_number(self._value(bound, names), least=-MOST_STEPS) for bound in loop.args]
                whole = [bound for bound in bounds if bound is not None]
                return len(range(*whole)) if whole and len(whole) == len(bounds) else None
            return self._passes(loop.args[0], names) if called in _AROUND_RANGES and loop.args else None
        value = self._value(loop, names)
        value = own_of(value).get("iterable", value)  # as a progress bar has it
        return len(value) if type(value) is range else None

    def _value(self, said: ast.expr, names: Mapping[str, Any]) -> Any:
        """What an expression of names, fields, lengths and whole numbers stands for; None where it is any other."""
        match said:
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
        """How long one side of the data is that a script cuts its batches from; None where it is any other thing."""
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
    """Whether a library's frame only stands between a loader and its loop, as a progress bar's does."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR) or frame.f_code.co_name in ("__iter__", "__next__")


def locals_of(frame: FrameType) -> Mapping[str, Any]:
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
def statements_around(filename: str, line: int) -> list[ast.AST]:
    """The statements that a line lies in, from outside to inside, within the function it belongs to."""
    try:
        found = _path_to(line, ast.parse("".join(linecache.getlines(filename))).body)
    except (SyntaxError, ValueError):
        return []
    # Whatever is around a function is passed when it is made, not when it is called.
    functions = [n for n, statement in enumerate(found[:-1]) if isinstance(statement, ast.FunctionDef | ast.ClassDef)]
    return found[functions[-1] + 1 :] if functions else found


def is_now_and_then(around: Sequence[ast.AST]) -> bool:
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


# --- what a script's objects hold, read without running any of its code ----------------------------------


MOST_EPOCHS, MOST_STEPS = 100_000, 10**9
"""What is more says that somebody stops the script otherwise."""
MOST_FIELDS = 1000
"""A dict that holds more holds data."""


def own_of(thing: Any) -> Mapping[str, Any]:
    """The attributes that an object itself holds; none of its code runs."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, Mapping) else {}


def fields_of(thing: Any) -> Mapping[str, Any]:
    """What settings hold by name, be they a dict, a class or an object; none of their code runs."""
    if issubclass(type(thing), dict):
        few = dict.__len__(thing) < MOST_FIELDS
        return {name: value for name, value in dict.items(thing) if type(name) is str} if few else {}
    kind = thing if issubclass(type(thing), type) else type(thing)
    return ChainMap(*(dict(own_of(one)) for one in (thing, *type.mro(kind)) if one is not object))


def whole_number(value: Any, *, least: int = 2, most: int = MOST_STEPS) -> int | None:
    """A number that counts something; `3.0` does, True does not."""
    if type(value) is float and math.isfinite(value) and value == int(value):
        value = int(value)
    return value if type(value) is int and least <= value <= most else None
