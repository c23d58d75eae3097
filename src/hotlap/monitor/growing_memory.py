"""Memory of tensors that grows from update to update: the line that makes it, and what holds it."""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, pairwise
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from hotlap.core.units import show_bytes
from hotlap.monitor.live_tensors import LiveTensors, Piece, is_users_file

TURNS = 8
"""Watched updates."""
FIRST = 2
"""The first that counts: earlier ones may fill caches and masks, which stay."""
MOST_LISTED = 5
MOST_SOUGHT = 4
"""Most tensors whose holder to look for: each look goes through all objects."""
MOST_COMPARED = 100
"""Most tensors whose histories to compare."""
MOST_NODES = 200_000
"""Most nodes of graphs to walk."""
_NOT_HELD = ("parameters", "optimizer", "gradients")


@dataclass(frozen=True, kw_only=True)
class GrowingMemory:
    """Memory that grows with updates, and the code that makes it."""

    line: str = ""
    """The user's line that makes it; empty if unknown."""
    bytes_an_update: int
    tensors_an_update: float = 0.0
    """0 if a tensor itself grows."""
    holder: str = ""
    """What holds it; empty if unknown."""
    what: str = ""
    """What grows, if it is not the number of tensors."""

    def __str__(self) -> str:
        count = f"{self.tensors_an_update:.2g} tensor{'s'[: self.tensors_an_update != 1]}"
        what = self.what or f"{show_bytes(self.bytes_an_update)} an update ({count})"
        made = f" made at {self.line}" if self.line else ""
        return what + made + (f", held by {self.holder}" if self.holder else "")


class GrowthWatch:
    """The living tensors at the end of each watched update."""

    def __init__(self, live: LiveTensors, *, graphs_every: int = 1) -> None:
        """Looks for graphs of autograd after every so many updates: that goes through all objects of Python."""
        self.live, self._graphs_every = live, graphs_every
        live.turn = 1
        self._by_line: list[Counter[str]] = []
        self._nodes: list[int] = []
        """Kept nodes of autograd."""
        self._longest: list[int] = []
        """The most nodes behind one tensor."""
        self._unseen: list[int] = []
        self._taken: list[int] = []

    @property
    def are_done(self) -> bool:
        """Whether enough updates have passed."""
        return self.live.turn > TURNS

    def end(self) -> None:
        """Note the end of an update."""
        live = self.live
        by_line: Counter[str] = Counter()
        for piece in live.pieces.values():
            if piece.kind not in _NOT_HELD:
                by_line[piece.line] += piece.size
        self._by_line.append(by_line)
        if live.turn % self._graphs_every == 0:
            self._count_graphs()
        if live.device.type == "cuda":
            self._unseen.append(torch.cuda.memory_allocated(live.device) - live.bytes)
            self._taken.append(torch.cuda.memory_reserved(live.device))
        live.turn += 1

    def _count_graphs(self) -> None:
        tensors = list(_tensors_with_graphs())
        self._nodes.append(len(steps_behind(tensors)))
        self._longest.append(_most_steps(tensors)[0])

    def growth(self) -> list[GrowingMemory]:
        """What grows, the most first. Growth without a line comes only if no line explains it."""
        gc.collect()
        found = self._tensors()
        found += self._larger_ones({one.line for one in found})
        found.sort(key=lambda one: -one.bytes_an_update)
        found += self._graphs(by_one=bool(found))
        return (found or self._without_line())[:MOST_LISTED]

    @property
    def graph_steps(self) -> int:
        """Steps of autograd that each update leaves behind, in one tensor or in many."""
        return grown(self._nodes) // self._graphs_every

    def graph_holder(self) -> str:
        """What holds tensors with the longest histories, as `losses of main`; empty if unknown."""
        found = _tensors_with_graphs()[:MOST_COMPARED]
        longest = nlargest(
            3, found, key=lambda one: len(steps_behind([one]))
        )  # one may be the last loss, held by no list
        names = Counter(filter(None, map(_holder_of, longest)))
        return names.most_common(1)[0][0] if names else ""

    def _tensors(self) -> list[GrowingMemory]:
        """By line: tensors of at least every second update that still live, from the first updates on.

        Tensors of the last update do not count: an overwritten loss lives until the next one.
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
                GrowingMemory(
                    line=line or _at_work(pieces.values()),
                    bytes_an_update=sum(piece.size for piece in pieces.values()) // count,
                    tensors_an_update=len(pieces) / count,
                    holder=_holder(pieces),
                )
            )
        return found

    def _larger_ones(self, listed: set[str]) -> list[GrowingMemory]:
        """By line: tensors that each update makes anew and larger, for instance by concatenation."""
        found = []
        for line in self._by_line[-1]:
            size = grown([turn[line] for turn in self._by_line])
            if size and line and line not in listed:
                keys = [key for key, piece in self.live.pieces.items() if piece.line == line]
                what = f"{show_bytes(size)} an update, in a tensor that grows,"
                found.append(GrowingMemory(line=line, bytes_an_update=size, holder=_holder(keys), what=what))
        return found

    def _graphs(self, *, by_one: bool) -> list[GrowingMemory]:
        """Losses added up with their history: they hold no tensor, but every node of each update.

        `by_one`: only if a single tensor holds the nodes, since held tensors each have nodes behind them.
        """
        steps = grown(self._longest if by_one else self._nodes) // self._graphs_every
        if not steps:
            return []
        _, longest = _most_steps(_tensors_with_graphs())
        if longest is None:
            return []
        what = (
            f"{steps:,} steps of autograd an update: a tensor of shape {tuple(longest.shape)} keeps all its history "
            "(add up .item() or .detach() instead)"
        )
        return [GrowingMemory(bytes_an_update=0, holder=_name_of(longest) or _holder_of(longest), what=what)]

    def _without_line(self) -> list[GrowingMemory]:
        """Growth of torch's allocator without an operation that explains it."""
        size = grown(self._unseen)
        if size:
            what = f"{show_bytes(size)} an update outside of operations, for instance in a kernel or a library"
            return [GrowingMemory(bytes_an_update=size, what=what)]
        size = grown(self._taken)
        if size:
            what = (
                f"{show_bytes(size)} an update that torch takes from the GPU and no tensor holds: fragmented memory, "
                "for instance by batches of many lengths"
            )
            return [GrowingMemory(bytes_an_update=size, what=what)]
        return []


def _at_work(pieces: Iterable[Piece]) -> str:
    """What made them, if no line of the user did."""
    layers = sorted({piece.layer for piece in pieces} - {""})
    return f"no line of yours, while {layers[0]} or a hook of it ran" if layers else "a line of torch"


def grown(levels: Sequence[int]) -> int:
    """The rise of a level in an update, if it rose in every update that counts; otherwise 0."""
    counted = levels[FIRST - 1 :]
    if len(counted) < 3 or any(after <= before for before, after in pairwise(counted)):
        return 0
    return (counted[-1] - counted[0]) // (len(counted) - 1)


# --- graphs ----------------------------------------------------------------------------------------------


def _tensors_with_graphs() -> list[Tensor]:
    """All tensors in Python with a history."""
    return [one for one in gc.get_objects() if type(one) is Tensor and one.grad_fn is not None]


def _most_steps(tensors: Iterable[Tensor]) -> tuple[int, Tensor | None]:
    """The tensor with the most nodes of autograd behind it, among as many as a bounded walk comes to."""
    most, found, left = 0, None, MOST_NODES
    for tensor in tensors:
        steps = len(steps_behind([tensor]))
        if steps > most:
            most, found = steps, tensor
        left -= steps
        if left <= 0:
            break
    return most, found


def steps_behind(tensors: Iterable[Tensor]) -> set[Any]:
    """The nodes of autograd behind some tensors."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return seen


# --- what holds it ---------------------------------------------------------------------------------------


def _holder(keys: Iterable[int]) -> str:
    """The name that holds one of these tensors or its container; empty if unknown."""
    wanted, sought = set(keys), 0
    for one in gc.get_objects():
        if type(one) is Tensor and one.layout is torch.strided and one.untyped_storage()._cdata in wanted:
            name, sought = _holder_of(one), sought + 1
            if name or sought == MOST_SOUGHT:
                return name
    return ""


def _holder_of(tensor: Tensor) -> str:
    containers = _containers_of(tensor)
    outer = (list_of_lists for one in containers for list_of_lists in _containers_of(one))
    for container in chain(containers, outer):
        name = _name_of(container)
        if name:
            return name
    return _name_of(tensor)


def _containers_of(thing: Any) -> list[Any]:
    return [one for one in gc.get_referrers(thing) if isinstance(one, (list, dict, set, tuple, deque))]


def _name_of(thing: Any) -> str:
    """The name of a thing: an attribute of an object, a name in a module, a variable of a function."""
    for names in gc.get_referrers(thing):
        if isinstance(names, FrameType):
            continue
        if isinstance(names, dict):
            key = next((key for key, value in names.items() if value is thing and isinstance(key, str)), None)
            if key is None:
                continue
            if "__name__" in names and "__builtins__" in names:
                return f"{names['__name__']}.{key}"
            for owner in gc.get_referrers(names):
                if isinstance(owner, type) and vars(owner).get(key) is thing:
                    return f"{owner.__name__}.{key}"
                if getattr(owner, "__dict__", None) is names and not isinstance(owner, ModuleType):
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
    """The name of a cell in the function that closes over it."""
    for cells in gc.get_referrers(cell):
        for function in gc.get_referrers(cells) if isinstance(cells, tuple) else ():
            if isinstance(function, FunctionType) and function.__closure__:
                names = zip(function.__code__.co_freevars, function.__closure__, strict=True)
                if name := next((name for name, one in names if one is cell), ""):
                    return f"{name} of {function.__qualname__}"
    return ""


def _variable(thing: Any) -> str:
    """The variable of a running function of the user that holds it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            for name, value in frame.f_locals.items():
                if value is thing:
                    return f"{name} of {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
