"""One kind of a script's evaluation calls, recorded as a CUDA graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.data.batches import map_tensors
from hotlap.data.sources import tensors_in
from hotlap.engine.capture.captured_step import BatchError, shape_of
from hotlap.engine.capture.recording import NotRecordedError, Watch
from hotlap.script.calls.graphs import Graph, Recording
from hotlap.script.calls.passage import Compute
from hotlap.script.calls.trees import kind_of, leaves, marks, stranger_to_trees, with_leaves

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""By how much of an output's largest number a replay may differ from the eager call, where a library takes another
kernel in a recording. As a rule they are equal to the bit."""


class EvaluationGraph:
    """Calls of one kind, and the memory that their replays read and write.

    Its outputs lie in the memory of its recorder, which the next replay of another graph overwrites. To be recorded
    inside `Untouched`, in the autocast of the calls.
    """

    def __init__(self, given: tuple[Any, Any], device: torch.device) -> None:
        """Made in the inference mode of the calls. Raises BatchError where arguments cannot be copied as they lie."""
        self._device = device
        made: dict[int, Tensor] = {}
        self._given = map_tensors(given, lambda tensor: made.setdefault(id(tensor), _static(tensor)))
        if shape_of(self._given) != shape_of(given):
            raise BatchError("an argument is a container that cannot be copied")
        self._static = tensors_in(self._given)
        self._infers = torch.is_inference_mode_enabled()
        self._shown: Any = None
        self._compute: Compute | None = None
        self._graph: Graph | None = None
        self._tree: Any = None
        self.outputs: list[Tensor] = []
        """The tensors in what it gives back, in memory that every replay overwrites."""
        self._bases: list[tuple[Tensor, list[int]]] = []

    @property
    def is_recorded(self) -> bool:
        """Whether it can be replayed."""
        return self._graph is not None

    def why_unfit_for(self, given: tuple[Any, Any] | None, outputs: Any) -> str | None:
        """Why an eager call with its arguments (None: with others) that gave these outputs is none to be replayed."""
        if given is not None and not all(map(_are_equal, tensors_in(given), self._static)):
            return "it changes its arguments in place"
        kind = stranger_to_trees(outputs)
        if kind is not None:
            return f"its outputs hold a {kind}"
        shown = _shown(outputs)
        if self._shown not in (None, shown):
            return "its outputs hold values that change from call to call"
        self._shown = shown
        return _why_not_given(outputs, self._device)

    def record(self, compute: Compute, module: nn.Module, recorder: Recording) -> None:
        """Raises NotRecordedError."""
        self._compute = compute
        with recorder.aside():
            self._make()
        before, arguments = self.outputs, marks(self._static)
        with recorder.aside(), Watch([module], self._device) as watch:
            self._make()
        reason = watch.reason
        if arguments != marks(self._static):
            reason = reason or "it changes its arguments in place"
        if {*map(_storage_of, before)} & {*map(_storage_of, self.outputs)}:
            reason = reason or "an output is something that was there before the call"
        if any(output.dtype is not base.dtype for base, numbers in self._bases for output in self._those(numbers)):
            reason = reason or "its outputs are views of each other in another dtype"
        if reason is not None:
            raise NotRecordedError(reason)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # What torch keeps for the randomness of all graphs is made with the first one, and is written to by others.
        with torch.inference_mode(False), torch.no_grad():
            self._graph = recorder.record(self._make)

    def replay(self, tensors: list[Tensor]) -> Any:
        """What a call with these tensors in its arguments gives back, in memory of its own."""
        assert self._graph is not None
        if len(tensors) == 1:
            self._static[0].copy_(tensors[0], non_blocking=True)
        elif tensors:
            torch._foreach_copy_(self._static, tensors, non_blocking=True)
        self._graph.replay()
        if isinstance(self._tree, Tensor) and not self._bases:
            return self._tree.clone()
        return with_leaves(self._tree, self.outputs, self._copies())

    def _make(self) -> None:
        assert self._compute is not None
        torch.clear_autocast_cache()  # what is in there was made elsewhere, and what is made here must not stay
        with torch.inference_mode(self._infers), torch.no_grad():
            self._tree = self._compute(*self._given)
            self.outputs = leaves(self._tree)
            self._bases = _bases(self.outputs)
        torch.clear_autocast_cache()

    def _copies(self) -> list[Tensor]:
        """The outputs in memory of their own: those that share it do so in the copy, and all lie as they did."""
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


# --- what a replay has to give -----------------------------------------------------------------------


def why_other(theirs: Any, mine: Any) -> str | None:
    """Why what a replay gave is not what the eager call did; None where it is."""
    if _shown(theirs) != _shown(mine):
        return "a replay gives back other containers or values"
    for right, made in zip(leaves(theirs), leaves(mine), strict=True):
        if _form_of(right) != _form_of(made):
            return "outputs of a replay lie in memory in another way"
        if not _are_equal(right, made, ROUNDING.get(right.dtype, 0.0)):
            return "a replay gives other numbers"
    return None


def _why_not_given(outputs: Any, device: torch.device) -> str | None:
    """Why outputs of an eager call cannot be what a replay on this device gives."""
    if any(_is_idle(part) for part in _within(outputs)):
        return "its outputs hold a container without tensors"  # the script might fill it
    found = leaves(outputs)
    if not found:
        return "it gives back no tensors"
    if any(type(output) is not Tensor or output.layout is not torch.strided for output in found):
        return "its outputs are more than plain tensors"
    if any(output.device != device for output in found):
        return f"not all of its outputs are on {device}"  # a copy to the host may still be under way
    if any(output.requires_grad or output.is_conj() or output.is_neg() for output in found):
        return "its outputs are more than numbers in memory"
    return None


def _are_equal(right: Tensor, made: Tensor, rounding: float = 0.0) -> bool:
    """Whether numbers are equal, one that is none to another that is none, but for so much of the largest."""
    if torch.equal(right, made):
        return True
    if not right.is_floating_point() and not right.is_complex():
        return False
    size = torch.where(right.isfinite(), right, 0).abs().max().item()
    return torch.allclose(made, right, rtol=0.0, atol=rounding * size, equal_nan=True)


def _form_of(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_inference()


# --- trees and memory --------------------------------------------------------------------------------


def _static(tensor: Tensor) -> Tensor:
    """A copy that lies as the tensor does, and that counts who writes to it."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise BatchError("an argument is expanded")
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor).requires_grad_(tensor.requires_grad)


def _bases(outputs: list[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """The memory of outputs that cannot be cloned one by one as they lie, whole, and the numbers of these."""
    found: dict[int, list[int]] = {}
    for number, output in enumerate(outputs):
        found.setdefault(_storage_of(output), []).append(number)
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


def _storage_of(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata  # where there are no numbers, there is no place


def _shown(tree: Any) -> Any:
    """What of outputs is no number in a tensor: containers, dtypes and plain values."""
    plain = [part for part in _within(tree) if not isinstance(part, Tensor) and not _is_container(part)]
    return kind_of(tree), plain, len(leaves(tree))


def _within(tree: Any) -> Iterator[Any]:
    """Everything in a tree, and the tree."""
    yield tree
    for part in _parts(tree):
        yield from _within(part)


def _parts(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, (tuple, list)) and not isinstance(tree, torch.Size):
        return list(tree)
    if _is_container(tree):
        return [getattr(tree, field.name, None) for field in dataclasses.fields(tree)]
    return []


def _is_container(tree: Any) -> bool:
    if isinstance(tree, (tuple, list, Mapping)):
        return not isinstance(tree, torch.Size)
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _is_idle(part: Any) -> bool:
    """Whether something can be written to and has no tensors in it, so that replays would share it."""
    return _is_container(part) and not isinstance(part, tuple) and not leaves(part)
