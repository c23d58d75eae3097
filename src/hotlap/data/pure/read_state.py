"""The state that the code of a dataset reads, and whether it has changed since."""

from __future__ import annotations

import datetime
import enum
import operator
import pathlib
import re
import types
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.units import MIB
from hotlap.data.pure.known_calls import LEAVES, is_library, is_plain_tensor

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
"""Stands for a name that has no value."""
LOOKED_AT = 4096
"""Bytes of content that each look pays for: once all are paid for, all of it is read again."""
ENTRY_BYTES = 32
"""What an entry of a list counts as."""
FEW = 32
"""Tensors whose version counters are read at every look; of more, with the contents."""
PIECE = 8 * MIB
HASHERS = 8
MOST_ENTRIES = 5_000_000
"""Entries of lists and dicts beyond which nothing is proven: to look at them again would take too long."""

_SCALARS = frozenset({int, float, bool, str, bytes, type(None)})
_LISTS = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict, defaultdict, types.MappingProxyType)
_FIXED = (*LEAVES, enum.Enum, re.Pattern, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta)


class UnreadableError(Exception):
    """Something that cannot be watched; its text says why."""


def is_fixed(value: Any) -> bool:
    """Whether nobody can change a value, and it computes as Python does: a class of the user's own may do anything."""
    kind = type(value)
    return isinstance(value, _FIXED) and (kind in LEAVES or isinstance(value, enum.Enum) or is_library(kind.__module__))


def is_content(value: Any) -> bool:
    """Whether a value is data that may be written to in place."""
    kind = type(value)
    return is_plain_tensor(value) or kind in (np.ndarray, np.memmap) or kind in _LISTS or kind in _DICTS


class ReadState:
    """Names, tensors, arrays, lists and dicts that were read, as they were then.

    Names, and the version counters of up to 32 tensors, are looked at each time. The contents of arrays, lists and
    dicts are looked at when `thorough` is asked for, and each time enough looks have paid for it.
    """

    def __init__(self) -> None:
        self._names: list[tuple[Any, Any, Any]] = []
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
        """A name in a namespace was read; MISSING where it had no value."""
        if (id(space), name) not in self._known:
            self._known.add((id(space), name))
            self._names.append((space, name, value))

    def slot(self, owner: Any, name: str, value: Any) -> None:
        """An attribute that is in no namespace was read."""
        if (id(owner), name) not in self._known:
            self._known.add((id(owner), name))
            self._slots.append((owner, name, value))

    def cell(self, cell: types.CellType, value: Any) -> None:
        """A variable of an enclosing function was read."""
        if (id(cell), "") not in self._known:
            self._known.add((id(cell), ""))
            self._cells.append((cell, value))

    def content(self, value: Any) -> None:
        """The content of a tensor, array, list or dict was read, and of all that is in it.

        Raises UnreadableError where it cannot be watched.
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
                if type(one) not in (tuple, frozenset):  # of which only what is in them can change
                    self._lists.append((one, entries))
                    self._bytes += ENTRY_BYTES * len(entries)
                waiting += [entry for entry in entries if type(entry) not in _SCALARS]

    def _add_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise UnreadableError(f"holds a tensor of layout {tensor.layout}")
        if tensor.is_inference():  # of which torch counts no writes
            self._add_array(tensor)
            return
        self._tensors.append((tensor, tensor._version, tensor.data_ptr(), tensor.requires_grad))
        # Memory of an array's: who writes to the array is not counted.
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
        """What is no longer as it was read, or None where nothing is seen to be.

        `live` where tensors and arrays are read anew where they lie, so that what is written to them is no change.
        """
        for space, name, value in self._names:
            now = space.get(name, MISSING)
            if now is not value and not _is_equal(now, value):
                return f"{name!r} is another one by now"
        for cell, value in self._cells:
            now = _contents(cell)
            if now is not value and not _is_equal(now, value):
                return "a variable of an enclosing function is another one by now"
        for owner, name, value in self._slots:
            now = getattr(owner, name, MISSING)
            if now is not value and not _is_equal(now, value):
                return f"{name!r} is another one by now"
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
    """Whether two different objects are one value that nobody can change."""
    return type(now) is type(was) and isinstance(now, (int, float, complex, str, bytes)) and repr(now) == repr(was)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# --- contents of arrays ------------------------------------------------------------------------------


def _digest(array: Any) -> Any:
    """What tells the content of an array from other contents: a checksum of every byte, in their order."""
    kind = (array.shape, array.dtype)
    if type(array) is np.ndarray and array.nbytes <= PIECE and array.flags.c_contiguous and array.dtype.kind in "biufc":
        return kind, zlib.crc32(array.data)
    pieces = list(_pieces(array))
    if len(pieces) < 4:
        return kind, [zlib.crc32(piece) for piece in pieces]
    with ThreadPoolExecutor(min(HASHERS, torch.get_num_threads(), len(pieces))) as threads:
        return kind, list(threads.map(zlib.crc32, pieces))  # which lets other threads work meanwhile


def _pieces(array: Any) -> Iterator[Any]:
    """Its bytes, some megabytes at a time."""
    if isinstance(array, Tensor):
        found = array.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = found.reshape(-1).view(torch.uint8).numpy() if found.numel() else np.empty(0, np.uint8)
    elif not array.size:
        flat = np.empty(0, np.uint8)
    else:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]
