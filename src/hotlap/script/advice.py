"""Advice that only the script's author can follow: lines that wait for the GPU, and a poor attention kernel."""

from __future__ import annotations

import os
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from operator import attrgetter
from pathlib import Path
from statistics import median, median_low
from sys import _getframe
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from hotlap.core.terminal import logger
from hotlap.core.torch_private import DisableTorchFunction
from hotlap.core.units import show_seconds
from hotlap.data.sources import tensors_in
from hotlap.engine.assists import attention
from hotlap.engine.assists.attention import POOR_MASKS, Call, masks_of
from hotlap.script.patches import Patches, untraced
from hotlap.script.running import HOTLAP

log = logger(__name__)

FEW = 3
"""An event in no more steps than this comes from logging, a checkpoint or an evaluation, not from a usual step."""
LEAST = 0.02
"""Share of a step; smaller costs are not worth a line."""
INSTEAD = "add up on the device (`total += loss.detach()`), read once an epoch, and synchronise only to take times"

SCRIPT, PYTHON = "", "python"
"""The results of `home_of` for files of the script and of the standard library."""
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")
_PYTHON_FOLDERS = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


@cache
def home_of(filename: str) -> str:
    """The package of a source file; SCRIPT or PYTHON if it belongs to none."""
    parts = Path(filename).parts
    for number, part in enumerate(parts[:-1]):
        if part in _LIBRARY_FOLDERS:
            return parts[number + 1].removesuffix(".py")
    if filename.startswith(HOTLAP):
        return "hotlap"
    if filename.startswith("<") and not filename.startswith("<ipython"):  # generated, by `exec` or a dataclass
        return PYTHON
    return PYTHON if filename.startswith(_PYTHON_FOLDERS) else SCRIPT


@dataclass(frozen=True)
class _Place:
    """A line of the script, or of a library if no line of the script is on the stack."""

    file: str
    line: int
    package: str | None
    """The package whose code waits, if it is not the script's own."""


@dataclass(frozen=True)
class _Call:
    """A call that waits for the GPU, by its name in torch and as people write it."""

    owner: Any
    name: str
    shown: str
    waited: Callable[[Callable[[Tensor], bool], Sequence[Any], Mapping[str, Any], Any], bool] = lambda *_: True
    """Whether it waited, given a test for tensors on a GPU, the arguments and the result."""


def _left_the_gpu(on_gpu: Callable[[Tensor], bool], _: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    return not on_gpu(result) and not kwargs.get("non_blocking")


_OF_TENSORS = (
    _Call(Tensor, "item", ".item()"),
    _Call(Tensor, "tolist", ".tolist()"),
    _Call(Tensor, "cpu", ".cpu()"),
    _Call(Tensor, "numpy", ".numpy()"),
    _Call(Tensor, "to", '.to("cpu")', _left_the_gpu),
    _Call(Tensor, "__bool__", "bool(…)"),
    _Call(Tensor, "__float__", "float(…)"),
    _Call(Tensor, "__int__", "int(…)"),
    _Call(Tensor, "__index__", "int(…)"),
    _Call(Tensor, "__format__", 'f"{…}"'),
    _Call(Tensor, "__repr__", "print(…)"),
    _Call(Tensor, "nonzero", ".nonzero()"),
    _Call(Tensor, "masked_select", ".masked_select(…)"),
)
_OF_DEVICES = (
    _Call(torch.cuda, "synchronize", "torch.cuda.synchronize()"),
    _Call(torch.cuda.Stream, "synchronize", "stream.synchronize()"),
    _Call(torch.cuda.Event, "synchronize", "event.synchronize()"),
)


class Waits:
    """Notes each wait for the GPU of one thread while installed, and estimates what the waits cost.

    A wait inside another counts as the outer one; hotlap's own waits do not count. A call without a tensor on a GPU
    costs some tenths of a microsecond more, a wait some microseconds. No method raises, and the script's calls return
    and raise what they do without it. It does not see waits in torch's C++ code, such as those of `torch.unique(…)` or
    of a copy from memory that is not pinned. Nor does it see `x[mask]`: with a `__getitem__` in Python, C code treats a
    class as a sequence, and `torch.tensor([loss])` would fail.
    """

    def __init__(self, on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda")) -> None:
        self._on_gpu = on_gpu
        self._patches = Patches()
        self._thread = 0
        """The script's thread; 0 while nothing is watched."""
        self._waiting = False
        self._steps = 0
        self._seen: dict[tuple[_Place, str], dict[int, list[float]]] = defaultdict(dict)
        """By place and call, then by step: the number of waits, and seconds blocked."""

    def install(self) -> None:
        """Begin to watch this thread."""
        if self._thread:
            return
        self._thread = threading.get_ident()
        for call in (*_OF_TENSORS, *_OF_DEVICES):
            watch = self._of_tensor if call in _OF_TENSORS else self._of_device
            self._patches.put(call.owner, call.name, partial(watch, call))

    def remove(self) -> None:
        """Restore torch; the notes stay."""
        self._thread = 0  # if other code has patched on top, ours only passes on
        self._patches.take_out_all()

    def stepped(self) -> None:
        """The script has made an optimizer step."""
        self._steps += 1

    def lines(self, step_s: float) -> list[str]:
        """Lines for the user, the most expensive first, then what to do instead; `step_s` is the time of a step.

        The blocked time is not the cost: meanwhile the GPU does work that it must do anyway. If the host works for H of
        a step and is blocked for W, the step takes H + W. Without waits it takes at least H, and at least as long as
        the GPU needs, which worked during W. So at most the lesser of H and W can be saved.
        """
        dear = [row for row in self._groups(step_s) if row[0] > LEAST * step_s]
        lines = [_line(group, cost_s, step_s) for cost_s, group in dear]
        if len(dear) > 1:
            all_s = min(self._busy_s(step_s), sum(wait.blocked_s for _, group in dear for wait in group))
            lines.append(f"together they cost up to {show_seconds(all_s)}; instead, {INSTEAD}")
        elif dear:
            lines.append(f"instead, {INSTEAD}")
        return lines

    def costs(self, step_s: float) -> list[tuple[str, int, str, float, float]]:
        """The most expensive first: file, line, call, times a step, and seconds of a step at most, as in `lines`."""
        return [
            (group[0].place.file, group[0].place.line, group[0].shown, sum(wait.times for wait in group), cost_s)
            for cost_s, group in self._groups(step_s)
        ]

    def _busy_s(self, step_s: float) -> float:
        return step_s - sum(wait.blocked_s for wait in self._usual())

    def _groups(self, step_s: float) -> list[tuple[float, list[_Usual]]]:
        """The usual waits by file, library and call, with what they cost at most, the most expensive first."""
        busy_s = self._busy_s(step_s)
        groups: dict[tuple[str, str | None, str], list[_Usual]] = defaultdict(list)
        for wait in self._usual():
            groups[wait.place.file, wait.place.package, wait.shown].append(wait)
        costs = [(min(busy_s, sum(wait.blocked_s for wait in group)), group) for group in groups.values()]
        return sorted(costs, key=lambda row: row[0], reverse=True)

    def _usual(self) -> list[_Usual]:
        """The waits of a usual step, by medians, since a step with an evaluation has many more."""
        return [
            _Usual(
                place=place,
                shown=shown,
                times=median_low(times for times, _ in steps.values()) * len(steps) / max(self._steps, len(steps)),
                blocked_s=median(took_s for _, took_s in steps.values()) * len(steps) / max(self._steps, len(steps)),
            )
            for (place, shown), steps in self._seen.items()
            if len(steps) > FEW
        ]

    def _of_tensor(self, call: _Call, original: Callable[..., Any]) -> Callable[..., Any]:
        on_gpu = self._on_gpu

        @wraps(original)
        def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            run = original
            if has_torch_function_unary(tensor):
                # Subclasses and modes recognise a call by its function, which must be torch's own.
                run = partial(handle_torch_function, original, (tensor,))
                waits = self._is_on_gpu(tensor)
            else:
                waits = on_gpu(tensor)
            return self._timed(call, partial(run, tensor), args, kwargs) if waits else run(tensor, *args, **kwargs)

        return untraced(watched)

    def _of_device(self, call: _Call, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._timed(call, original, args, kwargs)

        return untraced(watched)

    def _is_on_gpu(self, tensor: Tensor) -> bool:
        with DisableTorchFunction():
            return self._on_gpu(tensor)

    def _timed(self, call: _Call, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._waiting or threading.get_ident() != self._thread:
            return run(*args, **kwargs)
        self._waiting = True
        started = time.perf_counter()
        try:
            result = run(*args, **kwargs)
        finally:
            took_s = time.perf_counter() - started
            self._waiting = False
        try:
            if call.waited(self._is_on_gpu, args, kwargs, result):
                self._note(call.shown, took_s, _place_of(_getframe(2)))
        except Exception as error:  # an unknown kind of tensor must not stop a training
            log.debug("%s is not noted: %r", call.shown, error)
        return result

    def _note(self, shown: str, took_s: float, place: _Place | None) -> None:
        if place is not None:
            tally = self._seen[place, shown].setdefault(self._steps, [0, 0.0])
            tally[0] += 1
            tally[1] += took_s


@dataclass(frozen=True)
class _Usual:
    """A wait in a usual step."""

    place: _Place
    shown: str
    times: float
    blocked_s: float


def _place_of(frame: FrameType | None) -> _Place | None:
    """The innermost line of the script, else of a library other than torch; None if hotlap itself waits."""
    caller, nearest = None, None
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        home = home_of(file)
        if home != PYTHON:
            caller = home if caller is None else caller
            if caller == "hotlap":
                return None
            if home == SCRIPT:
                return _Place(file, line, caller or None)
            if nearest is None and home not in ("torch", "hotlap"):
                nearest = _Place(file, line, home)
        frame = frame.f_back
    return nearest


def _line(group: Sequence[_Usual], cost_s: float, step_s: float) -> str:
    place, times = group[0].place, sum(wait.times for wait in group)
    number = max(1, round(times))
    often = f"every {_in_words(round(1 / times))} steps" if round(1 / times) > 1 else "a step"
    whose = f" in {place.package}" if place.package else ""
    *lines, last = (f":{line}" for line in sorted({wait.place.line for wait in group}))
    where = f"{', '.join(lines)} and {last}" if lines else last
    return (
        f"{_in_words(number)} `{group[0].shown}` {often}{whose} at {_name_of(place.file)}{where}"
        f" cost{'s' if number == 1 else ''} up to {show_seconds(cost_s)} of {show_seconds(step_s)}"
    )


def _name_of(file: str) -> str:
    """A file's short name; cells of a notebook have none."""
    return "cell" if "ipykernel_" in file or file.startswith("<ipython") else Path(file).name


def _in_words(number: int) -> str:
    return _WORDS[number] if number < len(_WORDS) else str(number)


# --- attention kernels with poor dropout masks -------------------------------------------
#
# A script may call an attention kernel whose dropout masks are poor. Only its author can change that.


NODE = "ScaledDotProductCudnnAttentionBackward"
"""The name of that kernel's node in an autograd graph."""
MOST_NODES = 20_000


class AttentionAdvice:
    """Inspects the autograd graph of a model's outputs once; needs no patch of torch."""

    def __init__(self) -> None:
        self._has_looked = False
        self._call: Call | None = None
        """A call of that kernel, with shapes but without values."""

    def see(self, outputs: Any) -> None:
        """Inspect the outputs of a model in training. Never raises."""
        if self._has_looked:
            return
        try:
            tensors = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
            if tensors:
                self._has_looked = True
                self._call = dropping_call([tensor.grad_fn for tensor in tensors])
        except Exception:  # outputs may be anything
            self._has_looked = True

    def advice(self) -> list[str]:
        """A line for the script's author if the masks are poor. Has no lasting effects."""
        call = self._call
        if call is None:
            return []
        try:
            with attention.without_a_trace(call.query.device):
                found = masks_of(call, POOR_MASKS)
        except RuntimeError:  # out of memory
            return []
        if found.are_good:
            return []
        return [
            f"attention uses cuDNN's dropout, whose masks are not independent for each position here ({found}): "
            "training ends worse than with other kernels; torch.backends.cuda.enable_cudnn_sdp(False) turns it off"
        ]


def dropping_call(nodes: list[Any]) -> Call | None:
    """A call of that kernel with dropout, among those behind these nodes of a graph; None if there is none."""
    seen, ahead = set(nodes), list(nodes)
    while ahead and len(seen) < MOST_NODES:
        node = ahead.pop()
        if node.name().startswith(NODE) and node._saved_dropout_p > 0:
            return _call_of(node)
        before = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= before
        ahead += before
    return None


def _call_of(node: Any) -> Call:
    """The call behind a node, by the shapes on its edges: reading saved tensors would run the user's hooks."""
    answer = node._input_metadata[0]
    shapes = [one._input_metadata[number].shape if one is not None else None for one, number in node.next_functions]
    query = shapes[0] or answer.shape
    key = shapes[1] or query
    # Each is one number expanded to its shape, without memory of its own.
    number = torch.zeros((), dtype=answer.dtype, device=answer.device)
    q, k, v = (number.expand(tuple(shape)) for shape in (query, key, (*key[:-1], answer.shape[-1])))
    return Call(q, k, v, None, node._saved_dropout_p, False, None, False)
