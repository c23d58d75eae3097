"""The state that the code of a dataset reads, and whether it changed since."""

from __future__ import annotations

import datetime
import enum
import operator
import pathlib
import re
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.units import MIB
from hotlap.data.pure.known_calls import LEAVES, is_library, is_plain_tensor

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""Stands for a name that has no value."""
LOOKED_AT = 4096
"""Each check pays for so many bytes of content; once all bytes are paid for, hotlap reads them all again."""
ENTRY_BYTES = 32
"""Bytes that an entry of a list counts."""
FEW = 32
"""hotlap reads the version counters of up to so many tensors in every check; of more, together with the contents."""
PIECE = 8 * MIB
HASHERS = 8
MOST_ENTRIES = 5_000_000
"""With more entries in lists and dicts there is no proof: checking them would take too long."""

_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
_LISTS = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict, defaultdict, types.MappingProxyType)
_FIXED = (*LEAVES, enum.Enum, re.Pattern, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta)


class UnreadableError(Exception):
    """A value that hotlap cannot watch; the text says why."""


def is_fixed(value: Any) -> bool:
    """Whether a value is immutable and of a known class; a user's class may do anything."""
    kind = type(value)
    return isinstance(value, _FIXED) and (kind in LEAVES or isinstance(value, enum.Enum) or is_library(kind.__module__))


def is_content(value: Any) -> bool:
    """Whether a value is data that can change in place."""
    kind = type(value)
    return is_plain_tensor(value) or kind in (np.ndarray, np.memmap) or kind in _LISTS or kind in _DICTS


class ReadState:
    """Names, tensors, arrays, lists and dicts as they were when read.

    Each check compares names and the version counters of up to 32 tensors. It compares the contents of arrays, lists
    and dicts if `thorough`, and whenever enough checks have paid for that.
    """

    def __init__(self) -> None:
        self._names: list[tuple[Any, Any, Any]] = []
        self._answers: list[tuple[Callable[[], Any], Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._tensors: list[tuple[Tensor, int, int, bool]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._seen: dict[int, Any] = {}
        self._known: set[tuple[int, Any]] = set()
        self._entries = 0
        self._bytes = 0
        self._paid = 0

    # --- what was read ---------------------------------------------------------------------------

    def name(self, space: Any, name: Any, value: Any) -> None:
        """Note that a name in a namespace was read; MISSING if it had no value."""
        if (id(space), name) not in self._known:
            self._known.add((id(space), name))
            self._names.append((space, name, value))

    def forget(self, space: Any, name: Any) -> None:
        """What a name in a namespace holds does not matter after all."""
        self._names = [row for row in self._names if row[0] is not space or row[1] != name]

    def slot(self, owner: Any, name: str, value: Any) -> None:
        """Note that an attribute outside of namespaces was read."""
        if (id(owner), name) not in self._known:
            self._known.add((id(owner), name))
            self._slots.append((owner, name, value))

    def answer(self, ask: Callable[[], Any]) -> Any:
        """The plain value that a call gives, which only looks it up; noted as read."""
        found = ask()
        self._answers.append((ask, found))
        return found

    def shown(self, value: Any) -> None:
        """Note that a value was read of which `repr` shows all."""
        if (id(value), repr) not in self._known:
            self._known.add((id(value), repr))
            self.answer(partial(repr, value))

    def cell(self, cell: types.CellType, value: Any) -> None:
        """Note that a variable of an enclosing function was read."""
        if (id(cell), "") not in self._known:
            self._known.add((id(cell), ""))
            self._cells.append((cell, value))

    def content(self, value: Any) -> None:
        """Note that the content of a tensor, array, list or dict was read, with everything in it.

        Raises UnreadableError if hotlap cannot watch it.
        """
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if id(one) in self._seen or not is_content(one):
                continue
            self._seen[id(one)] = one
            if type(one) in (np.ndarray, np.memmap):
                self._add_array(one)
            elif isinstance(one, Tensor):
                self._add_tensor(one)
            else:
                entries = _entries(one)
                self._entries += len(entries)
                if self._entries > MOST_ENTRIES:
                    raise UnreadableError(f"holds more than {MOST_ENTRIES:,} entries in lists")
                if type(one) not in (tuple, frozenset):  # only their entries can change
                    self._lists.append((one, entries))
                    self._bytes += ENTRY_BYTES * len(entries)
                waiting += [entry for entry in entries if type(entry) not in _SCALARS]

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise UnreadableError(f"holds a tensor of layout {tensor.layout}")
        if tensor.is_inference():  # torch counts no writes to these
            self._add_array(tensor)
            return
        self._tensors.append((tensor, tensor._version, tensor.data_ptr(), tensor.requires_grad))
        # The memory of an array: torch does not count writes to the array.
        if tensor.device.type == "cpu" and tensor.numel() and not tensor.untyped_storage().resizable():
            self._add_array(tensor)

    def _add_array(self, array: Any) -> None:
        if isinstance(array, np.ndarray) and array.dtype.hasobject:
            raise UnreadableError("holds an array of Python objects")
        self._arrays.append((array, _digest(array)))
        self._bytes += array.nbytes

    # --- whether it changed ----------------------------------------------------------------------

    @property
    def needs_gradients(self) -> bool:
        """Whether a tensor that was read requires gradients, so that samples are part of a graph."""
        return any(needs for _, _, _, needs in self._tensors)

    def why_changed(self, *, thorough: bool = False, live: bool = False) -> str | None:
        """What changed since it was read; None if hotlap sees no change.

        `live` if batches read tensors and arrays in place, so that writes to them are no change.
        """
        for space, name, value in self._names:
            now = space.get(name, MISSING)
            if now is not value and not _is_equal(now, value):
                return f"{name!r} has changed"
        for cell, value in self._cells:
            now = _contents(cell)
            if now is not value and not _is_equal(now, value):
                return "a variable of an enclosing function has changed"
        for owner, name, value in self._slots:
            now = getattr(owner, name, MISSING)
            if now is not value and not _is_equal(now, value):
                return f"{name!r} has changed"
        if any((now := ask()) is not was and not _is_equal(now, was) for ask, was in self._answers):
            return "a value that it looks up has changed"
        if len(self._tensors) <= FEW and self._is_tensor_other(live):
            return "a tensor was written to"
        if not self._lists and not self._arrays and len(self._tensors) <= FEW:
            return None
        self._paid += LOOKED_AT
        return self._why_content_changed(live) if thorough or self._paid >= self._bytes else None

    def _is_tensor_other(self, live: bool) -> bool:
        for tensor, version, place, needs in self._tensors:
            if tensor.data_ptr() != place or tensor.requires_grad is not needs:
                return True
            if not live and tensor._version != version:
                return True
        return False

    def _why_content_changed(self, live: bool) -> str | None:
        self._paid = 0
        if len(self._tensors) > FEW and self._is_tensor_other(live):
            return "a tensor was written to"
        for one, entries in self._lists:
            if not _are_same(_entries(one), entries):
                return f"a {type(one).__name__} has other entries"
        if not live and any(_digest(array) != digest for array, digest in self._arrays):
            return "an array was written to"
        return None


def _entries(value: Any) -> list[Any]:
    return [part for row in value.items() for part in row] if isinstance(value, Mapping) else list(value)


def _are_same(now: list[Any], was: list[Any]) -> bool:
    if len(now) != len(was):
        return False
    return all(map(operator.is_, now, was)) or all(a is b or _is_equal(a, b) for a, b in zip(now, was, strict=True))


def _is_equal(now: Any, was: Any) -> bool:
    """Whether two objects are equal immutable values."""
    return type(now) is type(was) and isinstance(now, (int, float, complex, str, bytes)) and repr(now) == repr(was)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# --- contents of arrays ------------------------------------------------------------------------------


def _digest(array: Any) -> Any:
    """A checksum of the content of an array, over every byte in order."""
    kind = (array.shape, array.dtype)
    if type(array) is np.ndarray and array.nbytes <= PIECE and array.flags.c_contiguous and array.dtype.kind in "biufc":
        return kind, zlib.crc32(array.data)
    pieces = list(_pieces(array))
    if len(pieces) < 4:
        return kind, [zlib.crc32(piece) for piece in pieces]
    with ThreadPoolExecutor(min(HASHERS, torch.get_num_threads(), len(pieces))) as threads:
        return kind, list(threads.map(zlib.crc32, pieces))  # crc32 releases the GIL


def _pieces(array: Any) -> Iterator[Any]:
    """The bytes of an array, some megabytes at a time."""
    if isinstance(array, Tensor):
        found = array.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = found.reshape(-1).view(torch.uint8).numpy() if found.numel() else np.empty(0, np.uint8)
    elif not array.size:
        flat = np.empty(0, np.uint8)
    else:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]
