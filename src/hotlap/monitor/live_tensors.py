"""Counts the memory of tensors on a device as they come and go: how much lives, its purpose, and the code that made it.

`LiveTensors` sees every operation of torch, which takes time: it counts and never times. On a GPU it also sees what an
operation takes for itself, by the peak of torch's allocator.
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

from hotlap.core.torch_private import TorchDispatchMode, tree_leaves
from hotlap.engine.capture.recording import release_cublas_workspaces

BLOCK = 512
"""torch allocates GPU memory in multiples of so many bytes."""
BEFORE = "before"
"""The kind of tensors that existed before, and have no other kind."""
KERNELS = "kernels"
"""The kind of memory that an operation takes for itself while it runs."""
LIBRARIES = "libraries"
"""The kind of cuBLAS's workspace, which it keeps from its first use on."""
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_CALLERS = tuple(str(Path(__file__).parents[1] / file) for file in ("kit/bench.py", "fitting/training.py"))
"""The files that make the updates of a job: their callers make no tensors."""
_STANDARD = str(Path(sys.modules["collections"].__file__ or "").parents[1])


def is_users_file(file: str) -> bool:
    """Whether a file belongs to neither torch nor hotlap nor Python."""
    return not file.startswith((*_LIBRARIES, "<")) and (not file.startswith(_STANDARD) or "site-packages" in file)


@dataclass
class Piece:
    """The memory of one tensor, and of the tensors that share it."""

    size: int
    kind: str
    """Its purpose."""
    layer: str
    """The module that made it."""
    turn: int
    """The update that made it."""
    line: str
    """The user's line that made it, if lines are recorded."""
    storage: Any


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with`, counts all tensors on the device from their creation to their end."""

    def __init__(self, device: torch.device, *, lines: bool = False) -> None:
        """With `lines`, records which line of the user made each."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self._lines = device, lines
        self._rounds = BLOCK if device.type == "cuda" else 1
        self.pieces: dict[int, Piece] = {}
        self.kind, self.layer, self.turn = "batch", "", 0
        """The kind, layer and update of tensors from now on."""
        self.bytes = 0
        self.peak_bytes = 0
        self.kinds: Counter[str] = Counter()
        self.layers: Counter[str] = Counter()
        """Activations, by the module that made them."""
        self.at_peak: dict[str, int] = {}
        self.layers_at_peak: dict[str, int] = {}
        self.course: list[tuple[str, int]] = []
        """The kind of work, and the bytes that lived, after each operation that changed them."""

    def know(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Count tensors that exist already; counted ones have this kind from now on."""
        for tensor in tensors:
            if tensor is not None and self._is_here(tensor):
                self._note(tensor, kind)

    def know_libraries(self) -> None:
        """Count cuBLAS's workspace: it is freed here, and taken again at its next use."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.synchronize(self.device)  # a workspace in use stays
        before = torch.cuda.memory_allocated(self.device)
        release_cublas_workspaces()
        self._add(LIBRARIES, "", before - torch.cuda.memory_allocated(self.device))

    def forget_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes, self.at_peak, self.layers_at_peak = 0, {}, {}
        self.course.clear()
        self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count its outputs."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        made = func(*args, **(kwargs or {}))
        meanwhile = torch.cuda.max_memory_allocated(self.device) if on_gpu else 0
        self.count(made, (args, kwargs))
        working = meanwhile - torch.cuda.memory_allocated(self.device) if on_gpu else 0
        if working > 0:
            self._look(working)
            self.course.append((self.kind, self.bytes))
        return made

    def count(self, made: Any, given: Any) -> None:
        """Count what an operation made of what it was given."""
        for leaf in [made] if isinstance(made, Tensor) else tree_leaves(made):
            if isinstance(leaf, Tensor) and self._is_here(leaf):
                self._note(leaf, BEFORE if self._was_there(leaf, given) else None)

    def _was_there(self, made: Tensor, given: Any) -> bool:
        """Whether it is a view of an uncounted tensor, such as a dataset in memory."""
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
            # Another tensor may have this address by now.
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
        """Note the living bytes, and those that an operation takes for itself."""
        self.course.append((self.kind, self.bytes + working))
        if self.bytes + working > self.peak_bytes:
            self.peak_bytes = self.bytes + working
            self.at_peak, self.layers_at_peak = {**self.kinds, KERNELS: working}, dict(self.layers)

    def _line(self) -> str:
        """The innermost running line of the user."""
        if not self._lines:
            return ""
        frame = sys._getframe(3)
        while frame is not None:
            file = frame.f_code.co_filename
            if is_users_file(file):
                return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            if frame.f_back is None or file in _CALLERS:
                break
            frame = frame.f_back
        return ""
