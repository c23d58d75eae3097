"""Counts the memory of tensors on a device as they come and go: how much lives, its purpose, and the code that made it.

`LiveTensors` sees every operation of torch, which takes time: it counts and never times. On a GPU it also sees what an
operation takes for itself, by the peak of torch's allocator. `UpdateWatch` marks each operation with its part of an
update, and `GrowthWatch` finds memory that grows from update to update.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotlap.core.torch_private import TorchDispatchMode, tree_leaves
from hotlap.core.units import show_bytes
from hotlap.engine.capture.recording import release_cublas_workspaces
from hotlap.script.patches import Patches

BLOCK = 512
"""torch allocates GPU memory in multiples of so many bytes."""
BEFORE = "before"
"""The kind of tensors that existed before, and have no other kind."""
KERNELS = "kernels"
"""The kind of memory that an operation takes for itself while it runs."""
LIBRARIES = "libraries"
"""The kind of cuBLAS's workspace, which it keeps from its first use on."""
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_CALLERS = str(Path(__file__).with_name("bench.py"))
"""The file that makes the updates of a job: its callers make no tensors."""
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
        for leaf in [made] if isinstance(made, Tensor) else tree_leaves(made):
            if isinstance(leaf, Tensor) and self._is_here(leaf):
                self._note(leaf, BEFORE if self._was_there(leaf, (args, kwargs)) else None)
        working = meanwhile - torch.cuda.memory_allocated(self.device) if on_gpu else 0
        if working > 0:
            self._look(working)
            self.course.append((self.kind, self.bytes))
        return made

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
            if frame.f_back is None or file == _CALLERS:
                break
            frame = frame.f_back
        return ""


# --- updates, watched while they run -------------------------------------------------------------------------


KINDS = (
    *("parameters", "gradients", "optimizer", "activations", "backward", "update", "batch"),
    *(BEFORE, KERNELS, LIBRARIES),
)
"""Purposes of memory: `backward` are gradients of activations, `update` is what the optimizer step needs, `before` is
earlier data that the update reads, `kernels` what an operation takes for itself, `libraries` cuBLAS's workspace."""


class UpdateWatch:
    """Inside `with`, marks each operation with its part of the update: batch, forward, backward or optimizer step."""

    def __init__(
        self,
        live: LiveTensors,
        parameters: Iterable[Tensor],
        modules: Iterable[nn.Module],
        *,
        sees_updates: bool = True,
    ) -> None:
        """Without `sees_updates`, the caller says when an update begins and ends."""
        self.live, self._sees_updates = live, sees_updates
        self._parameters = [p for p in parameters if p.requires_grad]
        self._names = {id(part): name for module in modules for name, part in module.named_modules()}
        self._patches = Patches()
        self._inside: list[str] = []
        self.evaluated = False
        """Whether a module ran without gradients, as in an evaluation."""
        self.outputs: dict[str, int] = {}
        """Bytes of each called module's output."""

    def __enter__(self) -> UpdateWatch:
        hooked, live = self._patches.hooked, self.live
        live.kind = "batch"
        hooked("before", register_module_forward_pre_hook(self._enters))
        hooked("after", register_module_forward_hook(self._leaves, always_call=True))
        if self._sees_updates:
            hooked("update begins", register_optimizer_step_pre_hook(self.update_begins))
            hooked("update ends", register_optimizer_step_post_hook(self.update_ends))
        self._patches.put(torch.autograd, "backward", self._backward)
        for number, parameter in enumerate(self._parameters):
            handle = parameter.register_post_accumulate_grad_hook(self._has_gradient)  # type: ignore[no-untyped-call]
            hooked(f"gradient {number}", handle)
        live.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *how: Any) -> None:
        self.live.__exit__(*how)  # type: ignore[no-untyped-call]
        self._patches.take_out_all()

    @property
    def account(self) -> dict[str, Any]:
        """The memory of the counted update in plain values, for a file."""
        live = self.live
        return {
            "peak_bytes": live.peak_bytes,
            "kinds": live.at_peak,
            "layers": live.layers_at_peak,
            "outputs": self.outputs,
            "course": live.course,
            "held": [],
        }

    def _enters(self, module: nn.Module, inputs: Any) -> None:
        if module.__class__.__module__.startswith("torch.optim"):
            return
        # A checkpointed block runs its parts without gradients, but not itself.
        self.evaluated = self.evaluated or not (self._inside or torch.is_grad_enabled())
        self._inside.append(self._names.get(id(module)) or type(module).__name__)
        self.live.layer = self._inside[-1]
        if self.live.kind != "backward":  # recomputation belongs to the backward pass
            self.live.kind = "activations"

    def _leaves(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._inside:
            name = self._inside.pop()
            if isinstance(output, Tensor):
                self.outputs[name] = output.numel() * output.element_size()
        self.live.layer = self._inside[-1] if self._inside else "loss"

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.live.kind = "backward"
            try:
                return original(*args, **kwargs)
            finally:
                self.live.kind, self.live.layer = "batch", ""
                self._inside.clear()

        return backward

    def _has_gradient(self, parameter: Tensor) -> None:
        self.live.know([parameter.grad], "gradients")

    def update_begins(self, *_: Any) -> None:
        """Note that the optimizer step begins."""
        self.live.kind = "update"

    def update_ends(self, *_: Any) -> None:
        """Note that the optimizer step is over."""
        self.live.kind = "batch"


# --- memory that grows from update to update -----------------------------------------------------------------


TURNS = 8
"""Watched updates."""
FIRST = 2
"""The first that counts: earlier ones may fill caches and masks, which stay."""
MOST_LISTED = 5
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

    def __init__(self, live: LiveTensors) -> None:
        self.live = live
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
        return len(self._nodes) >= TURNS

    def end(self) -> None:
        """Note the end of an update."""
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

    def growth(self) -> list[GrowingMemory]:
        """What grows, the most first. Growth without a line comes only if no line explains it."""
        gc.collect()
        found = self._tensors()
        found += self._larger_ones({one.line for one in found})
        found.sort(key=lambda one: -one.bytes_an_update)
        found += self._graphs(by_one=bool(found))
        return (found or self._without_line())[:MOST_LISTED]

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
        steps = grown(self._longest if by_one else self._nodes)
        if not steps:
            return []
        longest = max(_tensors_with_graphs(), key=lambda one: len(steps_behind([one])))
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


def steps_behind(tensors: Iterable[Tensor]) -> set[Any]:
    """The nodes of autograd behind some tensors."""
    seen: set[Any] = set()
    waiting = [one.grad_fn for one in tensors]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return seen


# --- what holds it ---------------------------------------------------------------------------------------


def _holder(keys: Iterable[int]) -> str:
    """The name that holds one of these tensors or its container; empty if unknown."""
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
