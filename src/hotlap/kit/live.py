"""Counts the memory of tensors on a device as they come and go: what lives, what it is for, and who made it.

Every operation of torch is looked at, which takes time: it is for counting, never for timing. What an operation takes
for itself and gives back before it ends is seen on a GPU, by the peak that torch's allocator has had meanwhile.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 512
"""torch gives a GPU's memory out in multiples of so many bytes."""
BEFORE = "before"
"""The kind of what was there before, and is none that anybody has told of."""
KERNELS = "kernels"
"""The kind of what an operation takes for itself while it is at work."""
LIBRARIES = "libraries"
"""The kind of what cuBLAS keeps to work in, from its first use on."""
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_CALLERS = str(Path(__file__).with_name("memory.py"))
"""Who makes the updates of a job: beyond are those who asked for it, and have made nothing."""
_STANDARD = str(Path(sys.modules["collections"].__file__ or "").parents[1])


def is_users_file(file: str) -> bool:
    """Whether code of this file is neither torch's nor hotlap's nor python's own."""
    return not file.startswith((*_LIBRARIES, "<")) and (not file.startswith(_STANDARD) or "site-packages" in file)


@dataclass
class Piece:
    """The memory of one tensor, and of those that share it."""

    size: int
    kind: str
    """What it is for."""
    layer: str
    """The module that was at work when it was made."""
    turn: int
    """In which turn it was made."""
    line: str
    """The user's line that made it, where lines are looked at."""
    storage: Any


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with`, all tensors that are made on the device are counted, until they are gone."""

    def __init__(self, device: torch.device, *, lines: bool = False) -> None:
        """With `lines` it is noted which line of the user's own made each."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self._lines = device, lines
        self._rounds = BLOCK if device.type == "cuda" else 1
        self.pieces: dict[int, Piece] = {}
        self.kind, self.layer, self.turn = "batch", "", 0
        """What is made from now on is noted under these."""
        self.bytes = 0
        self.peak_bytes = 0
        self.kinds: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()
        """Of activations, by the module that has made them."""
        self.at_peak: dict[str, int] = {}
        self.layers_at_peak: dict[str, int] = {}
        self.course: list[tuple[str, int]] = []
        """What was being made, and the bytes that lived, after each operation that changed them."""

    def know(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Count tensors that are there already; those that are counted are of this kind from now on."""
        for tensor in tensors:
            if tensor is not None and self._is_here(tensor):
                self._note(tensor, kind)

    def know_libraries(self) -> None:
        """Count what cuBLAS keeps to work in: it is let go of, and taken anew when it is next needed."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.synchronize(self.device)  # while somebody is at work in it, it stays
        before = torch.cuda.memory_allocated(self.device)
        torch._C._cuda_clearCublasWorkspaces()
        self._add(LIBRARIES, "", before - torch.cuda.memory_allocated(self.device))

    def forget_peak(self) -> None:
        """From here on the peak is sought anew."""
        self.peak_bytes, self.at_peak, self.layers_at_peak = 0, {}, {}
        self.course.clear()
        self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it gives."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        made = func(*args, **(kwargs or {}))
        meanwhile = torch.cuda.max_memory_allocated(self.device) if on_gpu else 0
        for leaf in [made] if isinstance(made, Tensor) else tree_leaves(made):
            if isinstance(leaf, Tensor) and self._is_here(leaf):
                self._note(leaf, BEFORE if self._was_there(leaf, (args, kwargs)) else None)
        working = meanwhile - torch.cuda.memory_allocated(self.device) if on_gpu else 0
        if working > 0:
            self._look(working)
            self.course.append((self.kind, self.bytes))
        return made

    def _was_there(self, made: Tensor, given: Any) -> bool:
        """Whether it is a view of something that was there before anybody looked: a dataset in memory, for one."""
        key = made.untyped_storage()._cdata
        if key in self.pieces:
            return False
        inputs = (one for one in tree_leaves(given) if isinstance(one, Tensor) and self._is_here(one))
        return any(one.untyped_storage()._cdata == key for one in inputs)

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type and tensor.layout is torch.strided

    def _note(self, tensor: Tensor, kind: str | None) -> None:
        storage = tensor.untyped_storage()
        size = -(-storage.nbytes() // self._rounds) * self._rounds
        key = storage._cdata
        known = self.pieces.get(key)
        if known is not None:
            if (kind is None or kind == known.kind) and size == known.size:
                return
            self._gone(key)
        elif not size:
            return
        layer = known.layer if known is not None else self.layer
        line = known.line if known is not None else self._line()
        turn = known.turn if known is not None else self.turn
        kept = kind or (known.kind if known is not None else self.kind)
        pieces, gone = self.pieces, self._gone

        def let_go(which: Any) -> None:
            # The memory may have another owner by now, at the same address.
            if key in pieces and pieces[key].storage is which:
                gone(key)

        self.pieces[key] = Piece(size, kept, layer, turn, line, ref(storage, let_go))
        self._add(kept, layer, size)
        self._look()

    def _gone(self, key: int) -> None:
        piece = self.pieces.pop(key)
        self._add(piece.kind, piece.layer, -piece.size)
        self.course.append((self.kind, self.bytes))

    def _add(self, kind: str, layer: str, size: int) -> None:
        self.bytes += size
        self.kinds[kind] += size
        if kind == "activations":
            self.layers[layer] += size

    def _look(self, working: int = 0) -> None:
        """Note what lives, and what an operation has taken for itself beside it."""
        self.course.append((self.kind, self.bytes + working))
        if self.bytes + working > self.peak_bytes:
            self.peak_bytes = self.bytes + working
            self.at_peak, self.layers_at_peak = {**self.kinds, KERNELS: working}, dict(self.layers)

    def _line(self) -> str:
        """The innermost line at work that is neither torch's nor hotlap's nor python's own."""
        if not self._lines:
            return ""
        frame = sys._getframe(3)
        while frame is not None:
            file = frame.f_code.co_filename
            if is_users_file(file):
                return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            if frame.f_back is None or file == _CALLERS:
                break
            frame = frame.f_back
        return ""
