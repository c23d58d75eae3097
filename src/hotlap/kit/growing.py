"""Memory that grows from update to update: the line that makes it and who holds it, as far as they can be seen."""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from hotlap.core.units import show_bytes
from hotlap.kit.live import LiveTensors, Piece, is_users_file

TURNS = 8
"""Updates that are watched."""
FIRST = 2
"""The first that counts: an update before it may fill what is kept for good, as caches and masks."""
MOST_TOLD = 5
MOST_NODES = 200_000
"""Of graphs, so many steps are walked."""
_NOT_HELD = ("parameters", "optimizer", "gradients")


@dataclass(frozen=True, kw_only=True)
class Held:
    """Memory that grows with updates, and who made it."""

    line: str = ""
    """The user's line that makes it; empty where none was seen."""
    bytes_an_update: int
    tensors_an_update: float = 0.0
    """0 where it is no further tensor that grows."""
    holder: str = ""
    """What holds it, as far as it can be seen."""
    what: str = ""
    """What grows, where it is not the number of tensors."""

    def __str__(self) -> str:
        count = f"{self.tensors_an_update:.2g} tensor{'s'[: self.tensors_an_update != 1]}"
        what = self.what or f"{show_bytes(self.bytes_an_update)} an update ({count})"
        made = f" made at {self.line}" if self.line else ""
        return what + made + (f", held by {self.holder}" if self.holder else "")


class Turns:
    """What lives at the end of each update that is watched."""

    def __init__(self, live: LiveTensors) -> None:
        self.live = live
        live.turn = 1
        self._by_line: list[Counter[str]] = []
        self._nodes: list[int] = []
        """Steps of autograd that are kept."""
        self._longest: list[int] = []
        """Those behind one tensor, the most of any."""
        self._unseen: list[int] = []
        self._taken: list[int] = []

    @property
    def are_done(self) -> bool:
        """Whether enough were seen."""
        return len(self._nodes) >= TURNS

    def end(self) -> None:
        """Told that an update was made; the next one begins."""
        live = self.live
        by_line: Counter[str] = Counter()
        for piece in live.pieces.values():
            if piece.kind not in _NOT_HELD:
                by_line[piece.line] += piece.size
        self._by_line.append(by_line)
        tensors = list(_tensors_with_graphs())
        self._nodes.append(len(steps_behind(tensors)))
        self._longest.append(max((len(steps_behind([one])) for one in tensors), default=0))
        if live.device.type == "cuda":
            self._unseen.append(torch.cuda.memory_allocated(live.device) - live.bytes)
            self._taken.append(torch.cuda.memory_reserved(live.device))
        live.turn += 1

    def growth(self) -> list[Held]:
        """What grows, the most first. What no line was seen to make is told only where no line explains it."""
        gc.collect()
        found = self._tensors()
        found += self._larger_ones({one.line for one in found})
        found.sort(key=lambda one: -one.bytes_an_update)
        found += self._graphs(by_one=bool(found))
        return (found or self._without_line())[:MOST_TOLD]

    def _tensors(self) -> list[Held]:
        """By line: tensors of at least every second update that still live, from the first ones on.

        The last update's are not looked at: a loss that is overwritten lives until the next one.
        """
        by_line: dict[str, dict[int, Piece]] = defaultdict(dict)
        for key, piece in self.live.pieces.items():
            if FIRST <= piece.turn < TURNS and piece.kind not in _NOT_HELD:
                by_line[piece.line][key] = piece
        found, count = [], TURNS - FIRST
        for line, pieces in by_line.items():
            turns = {piece.turn for piece in pieces.values()}
            if 2 * len(turns) < count or min(turns) > FIRST + 1:
                continue
            found.append(
                Held(
                    line=line or _at_work(pieces.values()),
                    bytes_an_update=sum(piece.size for piece in pieces.values()) // count,
                    tensors_an_update=len(pieces) / count,
                    holder=_holder(pieces),
                )
            )
        return found

    def _larger_ones(self, told: set[str]) -> list[Held]:
        """By line: tensors that are made anew and larger in each update, as where others are joined to them."""
        found = []
        for line in self._by_line[-1]:
            size = grown([turn[line] for turn in self._by_line])
            if size and line and line not in told:
                keys = [key for key, piece in self.live.pieces.items() if piece.line == line]
                what = f"{show_bytes(size)} an update, in a tensor that grows,"
                found.append(Held(line=line, bytes_an_update=size, holder=_holder(keys), what=what))
        return found

    def _graphs(self, *, by_one: bool) -> list[Held]:
        """Losses that are added up with all that led to them: no tensor is held, but every step of each update.

        `by_one`: only where one tensor keeps them. Tensors that are held each have steps of their own behind them.
        """
        steps = grown(self._longest if by_one else self._nodes)
        if not steps:
            return []
        longest = max(_tensors_with_graphs(), key=lambda one: len(steps_behind([one])))
        what = (
            f"{steps:,} steps of autograd an update: a tensor of shape {tuple(longest.shape)} keeps all that led to it "
            "(add up .item() or .detach() in its place)"
        )
        return [Held(bytes_an_update=0, holder=_name_of(longest) or _holder_of(longest), what=what)]

    def _without_line(self) -> list[Held]:
        """What torch's allocator has given out or taken, where no operation was seen to make it."""
        size = grown(self._unseen)
        if size:
            what = f"{show_bytes(size)} an update that no operation was seen to make, as within a kernel or a library"
            return [Held(bytes_an_update=size, what=what)]
        size = grown(self._taken)
        if size:
            what = (
                f"{show_bytes(size)} an update that torch takes from the GPU and no tensor holds: its memory is in "
                "pieces, as by batches of many lengths"
            )
            return [Held(bytes_an_update=size, what=what)]
        return []


def _at_work(pieces: Iterable[Piece]) -> str:
    """Where no line of the user's made them: what did."""
    layers = sorted({piece.layer for piece in pieces} - {""})
    return f"no line of yours, while {layers[0]} or a hook of it was at work" if layers else "a line of torch's own"


def grown(levels: Sequence[int]) -> int:
    """By how much a level has risen in an update, where it rose in every one that counts; else 0."""
    counted = levels[FIRST - 1 :]
    if len(counted) < 3 or any(after <= before for before, after in pairwise(counted)):
        return 0
    return (counted[-1] - counted[0]) // (len(counted) - 1)


# --- graphs ----------------------------------------------------------------------------------------------


def _tensors_with_graphs() -> list[Tensor]:
    """All tensors that Python knows and that came out of others, with their history."""
    return [one for one in gc.get_objects() if type(one) is Tensor and one.grad_fn is not None]


def steps_behind(tensors: Iterable[Tensor]) -> set[Any]:
    """The steps of autograd that lie behind some tensors."""
    seen: set[Any] = set()
    waiting = [one.grad_fn for one in tensors]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return seen


# --- who holds it ----------------------------------------------------------------------------------------


def _holder(keys: Iterable[int]) -> str:
    """The name under which one of these tensors, or a container of it, is kept; empty where it cannot be seen."""
    wanted = set(keys)
    for one in gc.get_objects():
        if type(one) is Tensor and one.layout is torch.strided and one.untyped_storage()._cdata in wanted:
            name = _holder_of(one)
            if name:
                return name
    return ""


def _holder_of(tensor: Tensor) -> str:
    for container in gc.get_referrers(tensor):
        name = _name_of(container) if isinstance(container, (list, dict, set, tuple)) else ""
        if name:
            return name
    return _name_of(tensor)


def _name_of(thing: Any) -> str:
    """How a thing is called: an attribute of an object, a name of a module, a variable of a function."""
    for names in gc.get_referrers(thing):
        if isinstance(names, FrameType):
            continue
        if isinstance(names, dict):
            key = next((key for key, value in names.items() if value is thing and isinstance(key, str)), None)
            if key is None:
                continue
            if "__name__" in names and "__builtins__" in names:
                return f"{names['__name__']}.{key}"
            owner = next((o for o in gc.get_referrers(names) if getattr(o, "__dict__", None) is names), None)
            if owner is not None and not isinstance(owner, ModuleType):
                return f"{type(owner).__name__}.{key}"
        elif isinstance(names, CellType):
            if name := _closed_over(names):
                return name
        elif hasattr(names, "__dict__") and not isinstance(names, type):
            # From Python 3.11 on, attributes may lie in the object itself.
            key = next((key for key, value in vars(names).items() if value is thing), None)
            if key is not None:
                return f"{type(names).__name__}.{key}"
    return _variable(thing)


def _closed_over(cell: CellType) -> str:
    """How a function calls what it has from the one that it is written in."""
    for cells in gc.get_referrers(cell):
        for function in gc.get_referrers(cells) if isinstance(cells, tuple) else ():
            if isinstance(function, FunctionType) and function.__closure__:
                names = zip(function.__code__.co_freevars, function.__closure__, strict=True)
                if name := next((name for name, one in names if one is cell), ""):
                    return f"{name} of {function.__qualname__}"
    return ""


def _variable(thing: Any) -> str:
    """The variable of a function at work that has it; functions of torch's and hotlap's own are not looked at."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            for name, value in frame.f_locals.items():
                if value is thing:
                    return f"{name} of {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
