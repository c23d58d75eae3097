"""One kind of a script's evaluation calls, recorded as a CUDA graph, and what its replays must agree with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.torch_private import foreach_copy_
from hotlap.data.batches import map_tensors
from hotlap.data.sources import tensors_in
from hotlap.engine.capture.captured_step import BatchError, shape_of
from hotlap.engine.capture.host_constants import HostConstants
from hotlap.engine.capture.recording import NotRecordedError, Recorder, Watch
from hotlap.script.calls.autograd_bridge import Compute
from hotlap.script.calls.trees import (
    is_container,
    kind_of,
    leaves,
    memory_of,
    parts_of,
    unknown_type_in,
    with_leaves,
    write_marks,
)

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Greatest difference of a replay from the eager call, relative to the output's largest number. Usually both are
equal to the bit, but a library may choose another kernel while recording."""


class EvaluationGraph:
    """The graph of one kind of call, and the memory that its replays read and write.

    Its outputs are in its recorder's memory, which the next replay of another graph overwrites. Record it inside
    `ModuleState`, under the autocast of the calls.
    """

    def __init__(self, given: tuple[Any, Any], device: torch.device) -> None:
        """Create it in the inference mode of the calls. Raises BatchError if an argument cannot be copied."""
        self._device = device
        made: dict[int, Tensor] = {}
        self._given = map_tensors(given, lambda tensor: made.setdefault(id(tensor), _static(tensor)))
        if shape_of(self._given) != shape_of(given):
            raise BatchError("an argument is a container that cannot be copied")
        self._static = tensors_in(self._given)
        self._infers = torch.is_inference_mode_enabled()
        self._structure: Any = None
        self._compute: Compute | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tree: Any = None
        self.outputs: list[Tensor] = []
        """The tensors in its result, in memory that every replay overwrites."""
        self._bases: list[tuple[Tensor, list[int]]] = []
        self._constants: AbstractContextManager[object] = nullcontext()

    @property
    def is_recorded(self) -> bool:
        return self._graph is not None

    def why_unfit_for(self, given: tuple[Any, Any] | None, outputs: Any) -> str | None:
        """Why an eager call with these outputs cannot be replayed; `given` are its arguments, None for others."""
        if given is not None and not all(map(_are_equal, tensors_in(given), self._static)):
            return "it changes its arguments in place"
        kind = unknown_type_in(outputs)
        if kind is not None:
            return f"its outputs hold a {kind}"
        shown = _structure(outputs)
        if self._structure not in (None, shown):
            return "its outputs hold values that change from call to call"
        self._structure = shown
        return _why_not_given(outputs, self._device)

    def record(self, compute: Compute, module: nn.Module, recorder: Recorder) -> None:
        """Record the graph. Raises NotRecordedError."""
        self._compute = compute
        with recorder.aside():
            self._make()
        before, arguments = self.outputs, write_marks(self._static)
        for constants in (nullcontext(), HostConstants(self._device)):
            self._constants = constants
            with recorder.aside(), Watch([module], self._device) as watch:
                self._make()
            if not watch.waits:
                break
        reason = watch.reason
        if arguments != write_marks(self._static):
            reason = reason or "it changes its arguments in place"
        if {*map(memory_of, before)} & {*map(memory_of, self.outputs)}:
            reason = reason or "an output existed before the call"
        if any(output.dtype is not base.dtype for base, numbers in self._bases for output in self._those(numbers)):
            reason = reason or "its outputs are views of each other in another dtype"
        if reason is not None:
            raise NotRecordedError(reason)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # torch creates the random state that all graphs share with the first graph, and others write to it.
        with torch.inference_mode(False), torch.no_grad():
            self._graph = recorder.record(self._make)

    def replay(self, tensors: list[Tensor]) -> Any:
        """The result of a call with these tensors in its arguments, in new memory."""
        assert self._graph is not None
        if len(tensors) == 1:
            self._static[0].copy_(tensors[0], non_blocking=True)
        elif tensors:
            foreach_copy_(self._static, tensors, non_blocking=True)
        self._graph.replay()
        if isinstance(self._tree, Tensor) and not self._bases:
            return self._tree.clone()
        return with_leaves(self._tree, self.outputs, self._copies())

    def _make(self) -> None:
        assert self._compute is not None
        torch.clear_autocast_cache()  # its entries come from elsewhere, and those made here must not stay
        with torch.inference_mode(self._infers), torch.no_grad(), self._constants:
            self._tree = self._compute(*self._given)
            self.outputs = leaves(self._tree)
            self._bases = _bases(self.outputs)
        torch.clear_autocast_cache()

    def _copies(self) -> list[Tensor]:
        """The outputs in new memory; outputs that share memory still do, with the same layout."""
        if not self._bases:
            return [output.clone() for output in self.outputs]
        made: dict[int, Tensor] = {}
        for base, numbers in self._bases:
            copy = base.clone()
            for number, output in zip(numbers, self._those(numbers), strict=True):
                made[number] = copy.as_strided(output.shape, output.stride(), output.storage_offset())
        return [made[number] if number in made else output.clone() for number, output in enumerate(self.outputs)]

    def _those(self, numbers: Sequence[int]) -> list[Tensor]:
        return [self.outputs[number] for number in numbers]


# --- checking a replay -------------------------------------------------------------------


def why_other(theirs: Any, mine: Any) -> str | None:
    """How the result of a replay differs from that of the eager call; None if it does not."""
    if _structure(theirs) != _structure(mine):
        return "a replay returns other containers or values"
    for right, made in zip(leaves(theirs), leaves(mine), strict=True):
        if _form_of(right) != _form_of(made):
            return "outputs of a replay have another memory layout"
        if not _are_equal(right, made, ROUNDING.get(right.dtype, 0.0)):
            return "a replay gives other numbers"
    return None


def _why_not_given(outputs: Any, device: torch.device) -> str | None:
    """Why outputs of an eager call cannot come from a replay on this device; None if they can."""
    if any(_is_empty_container(part) for part in _within(outputs)):
        return "its outputs hold a container without tensors"  # the script might fill it
    found = leaves(outputs)
    if not found:
        return "it returns no tensors"
    if any(type(output) is not Tensor or output.layout is not torch.strided for output in found):
        return "its outputs are more than plain tensors"
    if any(output.device != device for output in found):
        return f"not all of its outputs are on {device}"  # a copy to the host may still be under way
    if any(output.requires_grad or output.is_conj() or output.is_neg() for output in found):
        return "its outputs are more than numbers in memory"
    return None


def _are_equal(right: Tensor, made: Tensor, rounding: float = 0.0) -> bool:
    """Whether values are equal, NaN to NaN, except for `rounding` relative to the largest."""
    if torch.equal(right, made):
        return True
    if not right.is_floating_point() and not right.is_complex():
        return False
    size = torch.where(right.isfinite(), right, 0).abs().max().item()
    return torch.allclose(made, right, rtol=0.0, atol=rounding * size, equal_nan=True)


def _form_of(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_inference()


# --- trees and memory --------------------------------------------------------------------


def _static(tensor: Tensor) -> Tensor:
    """A copy with the tensor's layout that counts writes."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise BatchError("an argument is expanded")
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor).requires_grad_(tensor.requires_grad)


def _bases(outputs: list[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """The whole memory behind outputs that cannot be cloned one by one, with the numbers of these outputs."""
    found: dict[int, list[int]] = {}
    for number, output in enumerate(outputs):
        found.setdefault(memory_of(output), []).append(number)
    made = []
    for numbers in found.values():
        first = outputs[numbers[0]]
        like = torch.empty_like(first, device="meta")
        if len(numbers) > 1 or like.stride() != first.stride():
            storage = first.untyped_storage()
            whole = torch.empty(0, dtype=first.dtype, device=first.device)
            count = storage.nbytes() // first.element_size()
            made.append((whole.set_(storage, 0, (count,), (1,)), numbers))
    return made


def _structure(tree: Any) -> Any:
    """The parts of outputs that are not values in a tensor: containers, dtypes and plain values."""
    plain = [part for part in _within(tree) if not isinstance(part, Tensor) and not is_container(part)]
    return kind_of(tree), plain, len(leaves(tree))


def _within(tree: Any) -> Iterator[Any]:
    """The tree, and everything in it."""
    yield tree
    for _, part in parts_of(tree):
        yield from _within(part)


def _is_empty_container(part: Any) -> bool:
    """Whether it is a mutable container without tensors, which replays would share."""
    return is_container(part) and not isinstance(part, tuple) and not leaves(part)
