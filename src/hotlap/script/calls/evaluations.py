"""Replays a script's evaluation calls, which have no gradients.

They stay the script's own calls, in its own precision and with its own kernels. Only their launch is faster: the host
launches all kernels at once.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.errors import first_line
from hotlap.core.torch_private import (
    KERNEL_SETTINGS,
    TF32_SETTINGS,
    DeviceContext,
    foreach_copy_,
    forward_ad_level,
    forward_hooks_of_all,
    forward_pre_hooks_of_all,
    function_mode_count,
    function_modes,
    get_cudnn_attention,
    get_fp32_precision,
    or_none,
    parametrize_cached,
)
from hotlap.data.batches import map_tensors
from hotlap.data.sources import tensors_in
from hotlap.engine.capture.captured_step import PATIENCE, BatchError, shape_of
from hotlap.engine.capture.fingerprint import QuickCheck, fingerprint
from hotlap.engine.capture.host_constants import HostConstants
from hotlap.engine.capture.recording import NotRecordedError, Watch, current_stream
from hotlap.engine.snapshot import generator_of
from hotlap.engine.step import is_out_of_memory
from hotlap.script.calls.autograd_bridge import Compute
from hotlap.script.calls.eager import EagerCall, Original, why_not_captured
from hotlap.script.calls.graphs import Graph, GraphRecorder
from hotlap.script.calls.module_state import ModuleState
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

SEEN = 8
"""Calls of a kind before it is recorded, so that rare kinds are not; a shorter last batch comes once an epoch."""
MOST_RECORDED = 4
"""Most kinds of calls recorded at a time; another one replaces one that has not been used for long."""
MOST_MOVED = 8
"""Most replacements: kinds that alternate would be recorded over and over."""
MOST_LOST = 3
"""Changes of the module that make recordings invalid, before hotlap stops recording."""
LEAST_FREE = 0.1
"""Share of GPU memory that must stay free beside a recording: evaluation must not cause an out-of-memory error."""

KeyOf = Callable[[Any, Any], tuple[Hashable, list[Tensor]]]
"""Returns a key of a call's arguments and autocast, and the tensors in them. Raises BatchError."""


@dataclasses.dataclass
class _Kind:
    """The state of one kind of call."""

    calls: int = 0
    graph: EvaluationGraph | None = None
    """Prepared or recorded."""
    last_used: int = 0
    """The number of the last call that was a replay."""
    refused: str | None = None
    """Why it stays eager for good."""

    @property
    def is_recorded(self) -> bool:
        return self.graph is not None and self.graph.is_recorded


class _Snapshot:
    """A module at one time: its layers and settings, and the layout of its tensors in memory."""

    def __init__(self, module: nn.Module) -> None:
        held = [*module.parameters(), *module.buffers()]
        self.made_for = fingerprint([module]), [tensor.shape for tensor in held], _forms_of(held)
        self._glance = QuickCheck([module])
        self._matrices = [tensor for tensor in held if tensor.ndim > 1]
        self._forms = _forms_of(self._matrices)

    def still_holds(self) -> bool:
        """Whether a quick look finds the module unchanged."""
        return self._glance.still_holds() and self._forms == _forms_of(self._matrices)


class Evaluations:
    """Makes calls without gradients of a module whose layers are all in evaluation mode.

    It records frequent kinds of calls, in memory that no training call uses, and makes all others eagerly. Recordings
    stay valid as long as the module is as it was, even if it trains in between: the next replay reads new values of the
    same weights.
    """

    def __init__(
        self,
        eager: EagerCall,
        module: nn.Module,
        device: torch.device,
        key_of: KeyOf,
        make_recorder: Callable[[], GraphRecorder],
    ) -> None:
        self._eager, self._module, self._device = eager, module, device
        self._key_of, self._make_recorder = key_of, make_recorder
        self._recorder: GraphRecorder | None = None
        self._kinds: dict[Hashable, _Kind] = {}
        self._snapshot: _Snapshot | None = None
        self._stream: torch.cuda.Stream | None = None
        self._calls = self._new_in_a_row = self._moved = self._lost = 0
        self.given_up: str | None = None
        """Why nothing is recorded any more."""

    @property
    def recorded(self) -> int:
        """Number of graphs held."""
        return sum(kind.is_recorded for kind in self._kinds.values())

    @property
    def refused(self) -> list[str]:
        """Why kinds of calls stay eager."""
        return [kind.refused for kind in self._kinds.values() if kind.refused is not None]

    def __call__(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call without gradients of a module in evaluation mode."""
        kind, tensors = self._fit(args, kwargs) if self.given_up is None else (None, [])
        if kind is None:
            return self._eager.in_own_precision(original, args, kwargs)
        if kind.is_recorded:
            return self._replayed(kind, tensors, original, args, kwargs)
        if kind.graph is not None:
            return self._record(kind, tensors, original, args, kwargs)
        return self._watched_call(kind, original, args, kwargs)

    def forget(self) -> None:
        """Drop all recordings and the recorder."""
        self._drop()
        self._recorder = None

    # --- kinds of calls ----------------------------------------------------------------------

    def _fit(self, args: Any, kwargs: Any) -> tuple[_Kind | None, list[Tensor]]:
        """The kind of a call that is recorded or may be, and its tensors; None if it has to be eager."""
        try:
            if _is_unusual():
                return None, []
            key, tensors = self._key(args, kwargs)
            kind = self._kind_of(key)
            if kind.calls < SEEN or kind.refused is not None or not self._is_unchanged():
                return None, []
            return (kind, tensors) if kind.is_recorded or self._may_record_more() else (None, [])
        except BatchError:
            return None, []
        except Exception as error:  # weights or arguments of unusual types may raise when inspected
            self._give_up(first_line(error))
            return None, []

    def _key(self, args: Any, kwargs: Any) -> tuple[Hashable, list[Tensor]]:
        """A key of this kind of call, and the tensors in it. Raises BatchError if it cannot be recorded."""
        key, tensors = self._key_of(args, kwargs)
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        # Attention, for example, takes another path if its arguments are the same tensor.
        same = tuple(places[id(tensor)] for tensor in tensors) if len(places) < len(tensors) else None
        stream = current_stream(self._device) if self._device.type == "cuda" else None
        if self._stream not in (None, stream):
            raise BatchError("replays on two streams would use the same memory at the same time")
        return (key, same, stream, torch.is_inference_mode_enabled(), *(get() for get in _SETTINGS)), tensors

    def _kind_of(self, key: Hashable) -> _Kind:
        self._new_in_a_row = 0 if key in self._kinds else self._new_in_a_row + 1
        if self._new_in_a_row > PATIENCE:
            self._give_up("the shapes of arguments keep changing")
        kind = self._kinds.setdefault(key, _Kind())
        kind.calls += 1
        self._calls += 1
        return kind

    def _is_unchanged(self) -> bool:
        """Whether all layers are in evaluation mode and unchanged; else drops the recordings."""
        if self._snapshot is not None and self._snapshot.still_holds():
            return True
        if any(layer.training for layer in self._module.modules()):
            return False
        before, self._snapshot = self._snapshot, _Snapshot(self._module)
        if before is None or before.made_for == self._snapshot.made_for:
            return True
        self._lost += self.recorded > 0
        self._drop()
        if self._lost > MOST_LOST:
            self._give_up("the module changes between evaluations")
        return False

    def _drop(self) -> None:
        for kind in self._kinds.values():
            kind.graph, kind.calls = None, 0
        self._stream = None

    def _give_up(self, reason: str) -> None:
        self.given_up = reason
        self._kinds.clear()
        self.forget()

    def _may_record_more(self) -> bool:
        """Whether one more may be recorded, if need be in place of one that has not been used for long."""
        if self.recorded < MOST_RECORDED:
            return True
        oldest = min((kind for kind in self._kinds.values() if kind.is_recorded), key=attrgetter("last_used"))
        if self._calls - oldest.last_used <= PATIENCE or self._moved == MOST_MOVED:
            return False
        self._moved += 1
        oldest.graph, oldest.calls = None, 0
        return True

    # --- one call --------------------------------------------------------------------------------

    def _replayed(self, kind: _Kind, tensors: list[Tensor], original: Original, args: Any, kwargs: Any) -> Any:
        assert kind.graph is not None
        kind.last_used = self._calls
        try:
            return kind.graph.replay(tensors)
        except Exception as error:  # such as no memory for its outputs
            self._give_up(first_line(error))
            return self._eager.in_own_precision(original, args, kwargs)

    def _watched_call(self, kind: _Kind, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call while watching it; if nothing speaks against it, the next one of its kind is recorded."""
        given = (args, kwargs)
        with self._refuse_on_error(kind):
            kind.refused = _why_not_recorded(self._module, self._device)
            if kind.refused is None:
                graph, before = EvaluationGraph(given, self._device), self._side_effects(given)
        if kind.refused is not None:
            return self._eager.in_own_precision(original, args, kwargs)
        with Watch([self._module], self._device) as watch, _detects_output() as said:
            outputs = self._eager.in_own_precision(original, args, kwargs)
        with self._refuse_on_error(kind):
            seen = None if watch.waits else watch.reason  # a recording tells whether it waits for more than constants
            kind.refused = seen or ("it prints" if said else None) or graph.why_unfit_for(given, outputs)
            if kind.refused is None and before != self._side_effects(given):
                kind.refused = "it draws random numbers, or writes to its arguments or its own tensors"
            if kind.refused is None:
                kind.graph = graph
        return outputs

    def _record(self, kind: _Kind, tensors: list[Tensor], original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call eagerly, record its kind, and compare the first replay with it."""
        graph, kind.graph = kind.graph, None
        assert graph is not None
        outputs = self._eager.in_own_precision(original, args, kwargs)
        with self._refuse_on_error(kind):
            kind.refused = graph.why_unfit_for(None, outputs)
            if kind.refused is None:
                self._check_memory()
                self._recorder = self._recorder or self._make_recorder()
                with ModuleState(self._module, self._device):
                    compute = functools.partial(self._eager.in_own_precision, original)
                    graph.record(compute, self._module, self._recorder)
                kind.refused = why_other(outputs, graph.replay(tensors))
                self._check_memory()
        if kind.refused is None and self.given_up is None:
            kind.graph, kind.last_used = graph, self._calls
            self._stream = current_stream(self._device) if self._device.type == "cuda" else None
        return outputs

    def _side_effects(self, given: Any) -> Any:
        """A value that changes if a call writes to something, except to tensors that do not count writes."""
        grads = [p.grad for p in self._module.parameters() if p.grad is not None]
        arguments = [tensor for tensor in tensors_in(given) if not tensor.is_inference()]
        drawn = generator_of(self._device).get_state().tolist()
        return shape_of(given), write_marks([*_tensors_of(self._module), *grads, *arguments]), drawn

    def _check_memory(self) -> None:
        """Raises OutOfMemoryError if too little GPU memory is free."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            if free < LEAST_FREE * total:
                raise torch.OutOfMemoryError("too little GPU memory is free")

    @contextmanager
    def _refuse_on_error(self, kind: _Kind) -> Iterator[None]:
        """Inside, a failure means that such calls are not recorded; running out of memory means that none are."""
        try:
            yield
        except Exception as error:
            kind.refused = first_line(error)
            if is_out_of_memory(error):
                self._give_up(kind.refused)


# --- refusals ----------------------------------------------------------------------------


def _why_not_recorded(module: nn.Module, device: torch.device) -> str | None:
    """Why a module's calls cannot be recorded, judged by the module itself."""
    held = _tensors_of(module)
    if any(tensor.device != device for tensor in held):
        return f"not all of its tensors are on {device}"  # a recording would freeze a number on the host
    if any(tensor.is_inference() for tensor in held):
        return "it holds tensors made in inference mode"  # torch does not count writes to them
    return why_not_captured(module, device)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, and other tensors that its layers hold."""
    beside = [value for layer in module.modules() for value in vars(layer).values() if isinstance(value, Tensor)]
    return [*module.parameters(), *module.buffers(), *beside]


def _forms_of(tensors: list[Tensor]) -> tuple[Any, ...]:
    """What an address does not show: the memory may now belong to another kind of weight."""
    return list(map(_dtype_of, tensors)), list(map(Tensor.stride, tensors))


def _is_unusual() -> bool:
    """Whether calls do more than usual: with hooks on every module, under modes, or in forward-mode autograd."""
    if forward_hooks_of_all or forward_pre_hooks_of_all or forward_ad_level() >= 0:
        return True
    if parametrize_cached():  # weights come from memory that exists only for a while
        return True
    if function_mode_count() == 0:
        return False
    modes = function_modes()
    return any(not isinstance(mode, DeviceContext) for mode in modes)


@contextmanager
def _detects_output() -> Iterator[list[bool]]:
    """Yields a list that becomes non-empty if something is printed or logged, which a replay would leave out."""
    seen: list[bool] = []
    printed, handled = builtins.print, logging.Logger.handle

    def prints(*args: Any, **kwargs: Any) -> None:
        seen.append(True)
        printed(*args, **kwargs)

    def handles(logger: logging.Logger, record: logging.LogRecord) -> None:
        seen.append(True)
        handled(logger, record)

    builtins.print, logging.Logger.handle = prints, handles  # type: ignore[assignment, method-assign]
    try:
        yield seen
    finally:
        builtins.print, logging.Logger.handle = printed, handled  # type: ignore[method-assign]


def _settings() -> tuple[Callable[[], Any], ...]:
    """Functions that read the process's settings for choosing kernels."""
    precision = or_none(get_fp32_precision)
    precisions = [functools.partial(precision, "cuda", work) for work in ("matmul", "conv", "rnn")] if precision else []
    return (
        *(precisions or TF32_SETTINGS),
        *KERNEL_SETTINGS,
        get_cudnn_attention,
        torch.backends.mha.get_fastpath_enabled,
    )


_SETTINGS = _settings()
_dtype_of = attrgetter("dtype")


# --- one recorded kind of call -----------------------------------------------------------


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
        self._graph: Graph | None = None
        self._tree: Any = None
        self.outputs: list[Tensor] = []
        """The tensors in its result, in memory that every replay overwrites."""
        self._bases: list[tuple[Tensor, list[int]]] = []
        self._constants: AbstractContextManager[object] = nullcontext()

    @property
    def is_recorded(self) -> bool:
        """Whether it can be replayed."""
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

    def record(self, compute: Compute, module: nn.Module, recorder: GraphRecorder) -> None:
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
