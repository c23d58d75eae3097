"""The calls of torch in some updates: the time of each line, needless copies of data, graphs that are kept."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotlap.kit.line_sampler import users_line
from hotlap.kit.observed import LineCost, place

LEAST_BYTES = 64 * 1024
"""Smaller copies cost next to nothing."""
COPIES = {"clone", "to", "cuda", "cpu", "tensor", "as_tensor", "__deepcopy__", "float", "double", "half", "type"}
_WORDS = {"tensor": "torch.tensor(tensor)", "as_tensor": "torch.as_tensor(tensor)", "__deepcopy__": "deepcopy(tensor)"}


@dataclass
class _Copy:
    """A copy of this update, with the versions of both tensors right after it."""

    line: tuple[str, int]
    name: str
    seconds: float
    source: Tensor
    made: Tensor
    versions: tuple[int, int]

    @property
    def has_changed(self) -> bool:
        """Whether code has written to either since."""
        return (self.source._version, self.made._version) != self.versions


class CallWatch(TorchFunctionMode):
    """Inside `with`, sees every call of torch in this thread. A call costs some microseconds more.

    A copy on the same device is needless if neither tensor changes until the update is over. A copy to another device
    is needless if that device has the same data from an earlier copy of this update.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pauses = False
        """Whether to leave out calls for now, such as those of a loader or an evaluation."""
        self.updates = 0
        self.backwards = 0
        self._seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._bare: defaultdict[tuple[str, int], float] = defaultdict(float)
        """The part in calls that record no graph and give a tensor."""
        self._copies: list[_Copy] = []
        self._needless: dict[tuple[tuple[str, int], str], list[float]] = {}
        self._sizes: dict[tuple[tuple[str, int], str], int] = {}
        self._retained: Counter[tuple[str, int]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and note it."""
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        took_s = time.perf_counter() - began
        line = None if self.pauses else users_line(sys._getframe(1))
        if line is not None:
            self._seconds[line] += took_s
            name = getattr(func, "__name__", "")
            if isinstance(result, Tensor) and not result.requires_grad and name not in COPIES:
                self._bare[line] += took_s
            if name in COPIES:
                self._note_copy(line, name, took_s, args, result)
            elif name == "backward":
                self.backwards += 1
                self._retained[line] += bool((kwargs or {}).get("retain_graph"))
        return result

    def update_ends(self) -> None:
        """An update is over: judge its copies."""
        self.updates += 1
        sent = set()
        for one in self._copies:
            if one.source.device != one.made.device:
                key = (one.source.data_ptr(), one.source.shape, one.made.device)
                is_needless = key in sent
                sent.add(key)
            else:
                is_needless = True
            if is_needless and not one.has_changed:
                self._needless.setdefault((one.line, one.name), []).append(one.seconds)
                self._sizes[one.line, one.name] = one.made.nbytes
        self._copies.clear()

    def seconds_at(self, file: str, line: int) -> float:
        """Seconds an update in calls of torch from this line."""
        return self._seconds[file, line] / max(1, self.updates)

    def readings_at(self, file: str, line: int) -> float:
        """Seconds an update in calls from this line that make tensors without a graph, as `p.grad.norm()` does.

        At a line that reads values back they serve the reading alone.
        """
        return self._bare[file, line] / max(1, self.updates)

    def copies(self) -> list[LineCost]:
        """Needless copies, the costliest first."""
        count = max(1, self.updates)
        found = [
            LineCost(
                where=place(*line),
                what=_WORDS.get(name, f".{name}(…)" if name != "clone" else ".clone()"),
                update_s=sum(spent) / count,
                times=len(spent) / count,
                size=self._sizes[line, name],
            )
            for (line, name), spent in self._needless.items()
            if 2 * len(spent) >= count
        ]
        return sorted(found, key=lambda one: -one.update_s)

    def retained(self) -> list[LineCost]:
        """Backward passes that keep their graph though no other follows in the update."""
        if self.backwards > self.updates:
            return []
        count = max(1, self.updates)
        return [
            LineCost(where=place(*line), what="retain_graph=True", update_s=0.0, times=times / count)
            for line, times in self._retained.items()
            if 2 * times >= count
        ]

    def _note_copy(self, line: tuple[str, int], name: str, took_s: float, args: Any, made: Any) -> None:
        source = next((one for one in args if isinstance(one, Tensor)), None)
        if source is None or not isinstance(made, Tensor) or source.requires_grad or made.requires_grad:
            return
        is_same = source.dtype == made.dtype and source.shape == made.shape
        if is_same and made.nbytes >= LEAST_BYTES and made.data_ptr() != source.data_ptr():
            self._copies.append(_Copy(line, name, took_s, source, made, (source._version, made._version)))
