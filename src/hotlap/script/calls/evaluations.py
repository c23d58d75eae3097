"""A script's evaluation calls, without gradients, made by replaying what was recorded of them.

They are the script's own calls: in its own precision, with its own kernels. The host launches them at once, and that
is all that differs.
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
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

from hotlap.core.errors import first_line
from hotlap.data.sources import tensors_in
from hotlap.engine.capture.captured_step import PATIENCE, BatchError, shape_of
from hotlap.engine.capture.fingerprint import QuickCheck, fingerprint
from hotlap.engine.capture.recording import Watch
from hotlap.fitting.rescue import is_out_of_memory
from hotlap.script.calls.eager import EagerCall, Original
from hotlap.script.calls.evaluation_graphs import EvaluationGraph, why_other
from hotlap.script.calls.graphs import Recording
from hotlap.script.calls.refusals import why_not_captured
from hotlap.script.calls.traces import Untouched, generator_of
from hotlap.script.calls.trees import marks
from hotlap.script.streams import current_stream

SEEN = 8
"""Calls of a kind before it is recorded, so that a few that never come again are not; a last, shorter batch comes once
an epoch."""
MOST_RECORDED = 4
"""Kinds of calls that are recorded at a time; one more takes the place of one that was not used for long."""
MOST_MOVED = 8
"""Times that one takes the place of another: kinds that take turns would be recorded over and over."""
MOST_LOST = 3
"""Times that the module may change so that what was recorded is void, before nothing is recorded any more."""
LEAST_FREE = 0.1
"""Of the device's memory, what has to be free beside a recording: evaluation is not worth running out of it."""

KeyOf = Callable[[Any, Any], tuple[Hashable, list[Tensor]]]
"""What tells calls apart by their arguments and autocast, and the tensors in them. Raises BatchError."""


@dataclasses.dataclass
class _Kind:
    """What is known of one kind of call."""

    calls: int = 0
    graph: EvaluationGraph | None = None
    """Prepared, or recorded."""
    last_used: int = 0
    """The number of the last call that was a replay."""
    refused: str | None = None
    """Why it stays eager for good."""

    @property
    def is_recorded(self) -> bool:
        return self.graph is not None and self.graph.is_recorded


class _Standing:
    """What a module is at a time: its layers and settings, and where and how its tensors lie."""

    def __init__(self, module: nn.Module) -> None:
        held = [*module.parameters(), *module.buffers()]
        self.made_for = fingerprint([module]), [tensor.shape for tensor in held], _forms_of(held)
        self._glance = QuickCheck([module])
        self._matrices = [tensor for tensor in held if tensor.ndim > 1]
        self._forms = _forms_of(self._matrices)

    def still_holds(self) -> bool:
        """Whether it is so still, as far as a glance tells."""
        return self._glance.still_holds() and self._forms == _forms_of(self._matrices)


class Evaluations:
    """Makes the calls of a module that have no gradients, where all of its layers are in evaluation mode.

    What comes often is recorded, in memory that no training call uses; all else, and all that is odd, is made eagerly.
    What was recorded holds as long as the module is what it was then: whether it trains in between does not matter,
    and new numbers in the same weights are read by the next replay.
    """

    def __init__(
        self,
        eager: EagerCall,
        module: nn.Module,
        device: torch.device,
        key_of: KeyOf,
        make_recorder: Callable[[], Recording],
    ) -> None:
        self._eager, self._module, self._device = eager, module, device
        self._key_of, self._make_recorder = key_of, make_recorder
        self._recorder: Recording | None = None
        self._kinds: dict[Hashable, _Kind] = {}
        self._standing: _Standing | None = None
        self._stream: torch.cuda.Stream | None = None
        self._calls = self._in_vain = self._moved = self._lost = 0
        self.given_up: str | None = None
        """Why nothing is recorded any more."""

    @property
    def recorded(self) -> int:
        """How many graphs are held."""
        return sum(kind.is_recorded for kind in self._kinds.values())

    @property
    def refused(self) -> list[str]:
        """Why kinds of calls stay eager."""
        return [kind.refused for kind in self._kinds.values() if kind.refused is not None]

    def __call__(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call without gradients of a module that is in evaluation mode."""
        kind, tensors = self._fit(args, kwargs) if self.given_up is None else (None, [])
        if kind is None:
            return self._eager.plainly(original, args, kwargs)
        if kind.is_recorded:
            return self._replayed(kind, tensors, original, args, kwargs)
        if kind.graph is not None:
            return self._recorded(kind, tensors, original, args, kwargs)
        return self._looked_at(kind, original, args, kwargs)

    def forget(self) -> None:
        """Drop all that was recorded, and what records."""
        self._drop()
        self._recorder = None

    # --- what is known ---------------------------------------------------------------------------

    def _fit(self, args: Any, kwargs: Any) -> tuple[_Kind | None, list[Tensor]]:
        """The kind of a call that may be recorded, or was, and the tensors in it; None where it is to be eager."""
        try:
            if _is_odd():
                return None, []
            key, tensors = self._key(args, kwargs)
            kind = self._kind_of(key)
            if kind.calls < SEEN or kind.refused is not None or not self._holds():
                return None, []
            return (kind, tensors) if kind.is_recorded or self._has_place() else (None, [])
        except BatchError:
            return None, []
        except Exception as error:  # of weights or arguments that do not like to be looked at
            self._give_up(first_line(error))
            return None, []

    def _key(self, args: Any, kwargs: Any) -> tuple[Hashable, list[Tensor]]:
        """What tells calls apart, and the tensors in this one. Raises BatchError where it cannot be recorded."""
        key, tensors = self._key_of(args, kwargs)
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        # Attention, for one, takes another way where its arguments are one and the same.
        same = tuple(places[id(tensor)] for tensor in tensors) if len(places) < len(tensors) else None
        stream = current_stream(self._device) if self._device.type == "cuda" else None
        if self._stream not in (None, stream):
            raise BatchError("replays on two streams would use the same memory at a time")
        return (key, same, stream, torch.is_inference_mode_enabled(), *(get() for get in _SETTINGS)), tensors

    def _kind_of(self, key: Hashable) -> _Kind:
        self._in_vain = 0 if key in self._kinds else self._in_vain + 1
        if self._in_vain > PATIENCE:
            self._give_up("there is always something new: no shape of arguments comes again")
        kind = self._kinds.setdefault(key, _Kind())
        kind.calls += 1
        self._calls += 1
        return kind

    def _holds(self) -> bool:
        """Whether all layers are in evaluation mode, and all is as it was; else what was recorded is dropped."""
        if self._standing is not None and self._standing.still_holds():
            return True
        if any(layer.training for layer in self._module.modules()):
            return False
        before, self._standing = self._standing, _Standing(self._module)
        if before is None or before.made_for == self._standing.made_for:
            return True
        self._lost += self.recorded > 0
        self._drop()
        if self._lost > MOST_LOST:
            self._give_up("the module is never what it was at the last evaluation")
        return False

    def _drop(self) -> None:
        for kind in self._kinds.values():
            kind.graph, kind.calls = None, 0
        self._stream = None

    def _give_up(self, reason: str) -> None:
        self.given_up = reason
        self._kinds.clear()
        self.forget()

    def _has_place(self) -> bool:
        """Whether one more may be recorded, in the place of one that was not used for long if need be."""
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
        except Exception as error:  # no memory is left for its outputs, for one
            self._give_up(first_line(error))
            return self._eager.plainly(original, args, kwargs)

    def _looked_at(self, kind: _Kind, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call looking on: where nothing speaks against it, the next one of its kind is recorded."""
        given = (args, kwargs)
        with self._refusing(kind):
            kind.refused = _why_not_recorded(self._module, self._device)
            if kind.refused is None:
                graph, before = EvaluationGraph(given, self._device), self._traces(given)
        if kind.refused is not None:
            return self._eager.plainly(original, args, kwargs)
        with Watch([self._module], self._device) as watch, _sees_words() as said:
            outputs = self._eager.plainly(original, args, kwargs)
        with self._refusing(kind):
            kind.refused = watch.reason or ("it prints" if said else None) or graph.why_unfit_for(given, outputs)
            if kind.refused is None and before != self._traces(given):
                kind.refused = "it draws random numbers, or writes to its arguments or its own tensors"
            if kind.refused is None:
                kind.graph = graph
        return outputs

    def _recorded(self, kind: _Kind, tensors: list[Tensor], original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call eagerly, record its kind, and compare the first replay with it."""
        graph, kind.graph = kind.graph, None
        assert graph is not None
        outputs = self._eager.plainly(original, args, kwargs)
        with self._refusing(kind):
            kind.refused = graph.why_unfit_for(None, outputs)
            if kind.refused is None:
                self._check_memory()
                self._recorder = self._recorder or self._make_recorder()
                with Untouched(self._module, self._device):
                    compute = functools.partial(self._eager.plainly, original)
                    graph.record(compute, self._module, self._recorder)
                kind.refused = why_other(outputs, graph.replay(tensors))
                self._check_memory()
        if kind.refused is None and self.given_up is None:
            kind.graph, kind.last_used = graph, self._calls
            self._stream = current_stream(self._device) if self._device.type == "cuda" else None
        return outputs

    def _traces(self, given: Any) -> Any:
        """What tells whether a call wrote to something, but for the numbers in tensors that do not count writes."""
        grads = [p.grad for p in self._module.parameters() if p.grad is not None]
        arguments = [tensor for tensor in tensors_in(given) if not tensor.is_inference()]
        drawn = generator_of(self._device).get_state().tolist()
        return shape_of(given), marks([*_tensors_of(self._module), *grads, *arguments]), drawn

    def _check_memory(self) -> None:
        """Raises where too little of the device's memory is free."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            if free < LEAST_FREE * total:
                raise torch.OutOfMemoryError("too little of the device's memory is free")

    @contextmanager
    def _refusing(self, kind: _Kind) -> Iterator[None]:
        """Inside, whatever goes wrong is a reason not to record such calls; and none at all where memory ran out."""
        try:
            yield
        except Exception as error:
            kind.refused = first_line(error)
            if is_out_of_memory(error):
                self._give_up(kind.refused)


# --- what is refused ---------------------------------------------------------------------------------


def _why_not_recorded(module: nn.Module, device: torch.device) -> str | None:
    """Why calls of a module cannot be recorded, as far as the module itself tells."""
    held = _tensors_of(module)
    if any(tensor.device != device for tensor in held):
        return f"not all of its tensors are on {device}"  # a number on the host would be frozen
    if any(tensor.is_inference() for tensor in held):
        return "it holds tensors made in inference mode"  # of which nobody knows who writes to them
    return why_not_captured(module, device)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Its parameters and buffers, and tensors that its layers have beside."""
    beside = [value for layer in module.modules() for value in vars(layer).values() if isinstance(value, Tensor)]
    return [*module.parameters(), *module.buffers(), *beside]


def _forms_of(tensors: list[Tensor]) -> tuple[Any, ...]:
    """What a place in memory does not tell: it may have been given to a weight of another kind."""
    return list(map(_dtype_of, tensors)), list(map(Tensor.stride, tensors))


def _is_odd() -> bool:
    """Whether calls are more than they seem: with hooks on every module, under modes, or with derivatives beside."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks or forward_ad._current_level >= 0:
        return True
    if parametrize._cache_enabled:  # weights are read from memory that is there for a while
        return True
    if torch._C._len_torch_function_stack() == 0:
        return False
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


@contextmanager
def _sees_words() -> Iterator[list[bool]]:
    """Gives a list that is not empty once something was printed or logged, which a replay would leave out."""
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
    """What reads the switches of the process that decide which kernels run."""
    own = torch._C
    precision = getattr(own, "_get_fp32_precision_getter", None)
    if precision is None:
        precisions = [own._get_cublas_allow_tf32, own._get_cudnn_allow_tf32]
    else:
        precisions = [functools.partial(precision, "cuda", work) for work in ("matmul", "conv", "rnn")]
    return (
        *precisions,
        own._get_cudnn_enabled,
        own._get_cudnn_benchmark,
        own._get_cudnn_deterministic,
        own._get_deterministic_algorithms,
        own._get_flash_sdp_enabled,
        own._get_mem_efficient_sdp_enabled,
        own._get_math_sdp_enabled,
        own._get_cudnn_sdp_enabled,
        torch.backends.mha.get_fastpath_enabled,
        torch.get_default_dtype,
    )


_SETTINGS = _settings()
_dtype_of = attrgetter("dtype")
