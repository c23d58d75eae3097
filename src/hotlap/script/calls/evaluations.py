"""Replays a script's evaluation calls, which have no gradients.

They stay the script's own calls, in its own precision and with its own kernels. Only their launch is faster: the host
launches all kernels at once.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.errors import first_line
from hotlap.core.torch_private import (
    KERNEL_SETTINGS,
    TF32_SETTINGS,
    DeviceContext,
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
from hotlap.data.sources import tensors_in
from hotlap.engine.capture.captured_step import PATIENCE, BatchError, shape_of
from hotlap.engine.capture.fingerprint import QuickCheck, fingerprint
from hotlap.engine.capture.recording import Recorder, Watch, current_stream
from hotlap.engine.snapshot import generator_of
from hotlap.engine.step import is_out_of_memory
from hotlap.script.calls.eager import EagerCall, Original, why_not_captured
from hotlap.script.calls.evaluation_graph import EvaluationGraph, why_other
from hotlap.script.calls.module_state import ModuleState
from hotlap.script.calls.trees import write_marks
from hotlap.script.patches import calls_noted

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
        make_recorder: Callable[[], Recorder],
    ) -> None:
        self._eager, self._module, self._device = eager, module, device
        self._key_of, self._make_recorder = key_of, make_recorder
        self._recorder: Recorder | None = None
        self._kinds: dict[Hashable, _Kind] = {}
        self._snapshot: _Snapshot | None = None
        self._stream: torch.cuda.Stream | None = None
        self._calls = self._new_in_a_row = self._moved = self._lost = 0
        self.given_up: str | None = None
        """Why nothing is recorded any more."""

    @property
    def recorded(self) -> int:
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
        stream = current_stream(self._device)
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
        # A replay would leave out what is printed or logged.
        says = calls_noted((builtins, "print"), (logging.Logger, "handle"))
        with Watch([self._module], self._device) as watch, says as printed:
            outputs = self._eager.in_own_precision(original, args, kwargs)
        with self._refuse_on_error(kind):
            reason = None if watch.waits else watch.reason  # a recording tells whether it waits for more than constants
            kind.refused = reason or ("it prints" if printed else None) or graph.why_unfit_for(given, outputs)
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
            self._stream = current_stream(self._device)
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
