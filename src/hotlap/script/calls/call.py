"""Makes the calls of a module in a script as a plan requires: its precision, its layout, eager or captured.

A plan changes only calls in training mode that record gradients. Other calls keep the script's own precision and
kernels, because metrics must not change; a captured plan replays evaluations without gradients. Outputs always have
the dtype, layout and containers that the script's own call gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.errors import PlanError, first_line
from hotlap.core.plan import Execution, Numerics
from hotlap.core.torch_private import (
    dispatch_mode_count,
    is_stream_capturing,
    or_none,
    parametrize_cached,
    peek_interpreter_stack,
    top_saved_tensors_hooks,
)
from hotlap.data.batches import map_tensors
from hotlap.engine.capture.recording import Recorder
from hotlap.engine.differentiating import gradients
from hotlap.engine.layout import images_last, why_not_channels_last
from hotlap.engine.scaling import LossScale
from hotlap.script.calls.autograd_bridge import autocast_of
from hotlap.script.calls.capture import CapturedCall, MemorySlots
from hotlap.script.calls.eager import (
    EagerCall,
    Original,
    OutputForms,
    leave_broken_passes,
    own_switches,
    why_not_captured,
    why_not_changed,
    why_not_in_precision,
)
from hotlap.script.calls.loss_replay import LossReplay
from hotlap.script.calls.module_state import ModuleState
from hotlap.script.calls.trees import copied, leaves, sharing_memory, with_gradient_hooks, write_marks

_top_hooks = or_none(top_saved_tensors_hooks)  # older versions have none
NOTED = 8
"""Calls under the script's own plan whose output forms are noted."""

MOST_TRIED = 64
"""Kinds of calls that are undone if they fail before one has succeeded; noting the module's state takes time."""


class ModuleCall:
    """Makes the calls of one module as a plan requires.

    If that fails, the script's own call runs instead, from then on too, and `given_up` holds the reason.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        make_recorder: Callable[[torch.device], Recorder] | None = None,
        loss_replay: LossReplay | None = None,
    ) -> None:
        """`loss_replay` receives the outputs of replays."""
        if device == torch.device("cuda"):  # without an index
            device = torch.device("cuda", torch.cuda.current_device())
        self.module, self.device = module, device
        self._kind = device.type
        self._records = make_recorder is not None or device.type == "cuda"
        self._loss_replay = loss_replay
        self._slots = MemorySlots(functools.partial(make_recorder or Recorder, device))
        self._forms, self._unnoted = OutputForms(device), NOTED
        self._scale: LossScale | None = None
        self._ways: dict[Hashable, EagerCall | CapturedCall] = {}
        self._tried: set[Hashable] = set()
        """Kinds of calls that succeeded: their plan, and the shapes of their arguments."""
        self._failed: dict[Hashable, str] = {}
        self._plan = _key(Numerics(), Execution())
        self._way: EagerCall | CapturedCall | None = None
        self._inside = False
        self._autocasts = self._writes = self._rewrites = False
        self._shared: list[tuple[Tensor, int]] = []
        """Outputs of the last noted call that share memory, and the writes to them when the script got them."""
        self._remembers = False
        self._last_autocast = (False, torch.get_autocast_dtype(device.type))
        self.last_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Arguments and keyword arguments of the remembered call."""
        self.last_output_grads: list[Tensor | None] = []
        """Gradients of its floating outputs that require them, in order; None where none arrived."""

    # --- plans -----------------------------------------------------------------------------------

    def supports(self, numerics: Numerics, execution: Execution) -> str | None:
        """Why calls cannot be made under this plan; None if they can."""
        return next(filter(None, self._reasons(numerics, execution)), None)

    def _reasons(self, numerics: Numerics, execution: Execution) -> Iterator[str | None]:
        if self._is_own(numerics, execution):
            return
        module, device = self.module, self.device
        yield self._failed.get(_key(numerics, execution))
        yield "its forward pass changes its weights" if self._writes else why_not_changed(module)
        yield "the script changes outputs in place that share memory" if self._rewrites_shared() else None
        if numerics.precision != "fp32":
            yield why_not_in_precision(module, numerics.precision, device, autocasts=self._autocasts)
        if numerics.layout == "channels_last":
            yield why_not_channels_last([module])
        if execution.mode == "captured":
            yield "the script makes its steps one by one" if execution.replay_steps > 1 else None
            yield None if self._records else f"execution.mode='captured' needs a GPU, not a {device.type}"
            yield why_not_captured(module, device)

    def use(self, numerics: Numerics, execution: Execution) -> None:
        """Make calls under this plan from the next one on. Raises PlanError if that is not supported."""
        reason = self.supports(numerics, execution)
        if reason is not None:
            raise PlanError(reason)
        leave_broken_passes()
        self._plan = _key(numerics, execution)
        self._way = self._way_of(numerics, execution)

    @property
    def warmup_steps(self) -> int:
        """Calls so far that ran slower than the plan in force will."""
        return self._way.warmup_steps if self._way is not None else 0

    @property
    def given_up(self) -> str | None:
        """Why the plan in force is not fully applied; None if it is."""
        return self._failed.get(self._plan) or (self._way.given_up if self._way is not None else None)

    def tidy(self) -> None:
        """Release everything that belongs to plans other than the one in force."""
        self._ways = {key: way for key, way in self._ways.items() if way is self._way}

    def forget(self) -> None:
        """Release all recordings and remembered inputs; they come back when needed."""
        self.tidy()
        for way in self._ways.values():
            if isinstance(way, CapturedCall):
                way.forget()
        self.forget_inputs()

    def _is_own(self, numerics: Numerics, execution: Execution) -> bool:
        tuned = execution.autotune and self.device.type == "cuda" and not torch.backends.cudnn.benchmark
        # Depthwise kernels and tricks alone do not change what a call computes.
        own = Numerics(depthwise=numerics.depthwise), Execution(autotune=execution.autotune, without=execution.without)
        return _key(numerics, execution) == own and not tuned

    def _way_of(self, numerics: Numerics, execution: Execution) -> EagerCall | CapturedCall | None:
        if self._is_own(numerics, execution):
            return None
        key = _key(numerics, execution)
        if key not in self._ways:
            scale = None
            if numerics.precision == "fp16":
                scale = self._scale = self._scale or LossScale(self.device)
            # Only images change layout: weights and gradients stay as the script has them, which may view them flat.
            layout = images_last if numerics.layout == "channels_last" else None
            eager = EagerCall(
                self.module, numerics, execution, self.device, forms=self._forms, layout=layout, scale=scale
            )
            way: EagerCall | CapturedCall = eager
            if execution.mode == "captured":
                way = CapturedCall(
                    eager, self.module, self.device, self._slots, self._loss_replay, without=execution.without
                )
            self._ways[key] = way
        return self._ways[key]

    # --- calls -----------------------------------------------------------------------------------

    def __call__(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call for the script; `original` makes its own."""
        if self._inside or self._is_transformed():
            return original(*args, **kwargs)
        if is_checkpointed():
            with own_switches():
                return original(*args, **kwargs)
        if torch.is_autocast_enabled(self._kind):
            self._autocasts = True
        trains = self.module.training and torch.is_grad_enabled()
        if trains and self._remembers:
            return self._remembered(original, args, kwargs)
        if self._way is not None:
            return self._made(self._way, original, args, kwargs, trains)
        return self._noted(original, args, kwargs) if trains and self._unnoted else original(*args, **kwargs)

    def _made(
        self,
        way: EagerCall | CapturedCall,
        original: Original,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        trains: bool,
    ) -> Any:
        before = None
        self._inside = True
        try:
            given = *args, *kwargs.values()
            kind = self._plan, trains, *(argument.shape if type(argument) is Tensor else None for argument in given)
            if kind not in self._tried and len(self._tried) < MOST_TRIED:
                before = ModuleState(self.module, self.device)
            outputs = (way if trains else way.in_own_precision)(original, args, kwargs)
            if before is not None:  # a kind of call that fails stays unknown: its next one can be undone too
                self._tried.add(kind)
            return outputs
        except Exception as error:
            if before is not None:
                before.restore()
            return self._fall_back(error, original, args, kwargs)
        finally:
            self._inside = False

    def _noted(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call under the script's own plan, and note the form of its outputs."""
        before = write_marks(self.module.parameters())
        self._rewrites_shared()
        outputs = original(*args, **kwargs)
        self._unnoted = max(0, self._unnoted - 1)
        self._writes |= before != write_marks(self.module.parameters())
        with suppress(Exception):  # outputs may be anything
            self._forms.note(args, kwargs, outputs)
            if self._unnoted:
                shared = sharing_memory(leaves(outputs), (args, kwargs))
                self._shared = [(output.detach(), output._version) for output in shared]
        return outputs

    def _rewrites_shared(self) -> bool:
        """Whether the script was seen to write to outputs that share memory; releases those of the last call."""
        self._rewrites |= any(shared._version != writes for shared, writes in self._shared)
        self._shared.clear()
        return self._rewrites

    def _fall_back(self, error: Exception, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the script's own call, which fails again if the script is at fault."""
        outputs = original(*args, **kwargs)
        self._failed[self._plan] = first_line(error)
        self._way = None
        self._ways.pop(self._plan, None)
        return outputs

    # --- for gates ---------------------------------------------------------------------------

    def remember_next(self) -> None:
        """Keep the inputs of the next training call, and the gradients of its outputs."""
        self._remembers = True

    def forget_inputs(self) -> None:
        """Release what was kept."""
        self._remembers, self.last_inputs, self.last_output_grads = False, None, []

    def _remembered(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._remembers, self.last_inputs = False, None
        with suppress(Exception):  # arguments may be anything
            self.last_inputs = map_tensors((args, kwargs), copied)
        way = self._way
        make = self._noted if way is None else functools.partial(self._made, way, trains=True)
        outputs = make(original, args, kwargs)
        try:
            return self._with_kept_gradients(outputs, (args, kwargs))
        except Exception:
            self.forget_inputs()
            return outputs

    def _with_kept_gradients(self, outputs: Any, given: Any) -> Any:
        """The outputs of the remembered call, with hooks that keep their gradients."""
        self._last_autocast = autocast_of(self.device)
        wanting = [number for number, output in enumerate(leaves(outputs)) if output.requires_grad]
        grads: list[Tensor | None] = [None] * len(wanting)
        self.last_output_grads = grads

        def on_gradient(number: int, grad: Tensor) -> None:
            place = wanting.index(number)
            if grads[place] is None:
                grads[place] = grad.detach().clone()

        return with_gradient_hooks(outputs, on_gradient, given)

    def trial(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad_outputs: Sequence[Tensor | None],
        numerics: Numerics,
        execution: Execution,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Make the forward and backward pass of a call under a plan, with the current weights, without lasting effects.

        `grad_outputs` are the gradients of the outputs that require them, in order. Returns these outputs, and the
        gradients of the parameters by name. Trials at the same point begin with the same random state, but for what
        cuDNN's recurrent layers drop. Raises NotRecordedError, or what the module raises.
        """
        with self._isolated():
            way = self._way_of(numerics, execution)
            if way is not None:
                with ModuleState(self.module, self.device):
                    self._prepare(way, args, kwargs, grad_outputs)
            args, kwargs = map_tensors((args, kwargs), copied)
            made = self._own_call(*args, **kwargs) if way is None else way(self._own_call, args, kwargs)
            wanting = [output for output in leaves(made) if output.requires_grad]
            pairs = [(out, grad) for out, grad in zip(wanting, grad_outputs, strict=True) if grad is not None]
            parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
            found = gradients([out for out, _ in pairs], list(parameters.values()), [grad for _, grad in pairs])
        there = {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}
        dense = {name: g if g.layout is torch.strided else g.to_dense() for name, g in there.items()}
        return [out.detach() for out in wanting], dense

    def _prepare(
        self,
        way: EagerCall | CapturedCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad_outputs: Sequence[Tensor | None],
    ) -> None:
        """Prepare recordings and statistics, so that such a call runs at full speed."""
        given = map_tensors((args, kwargs), copied)
        outputs = leaves(self._own_call(*given[0], **given[1]))
        self._forms.note(args, kwargs, outputs)
        numbers = [number for number, output in enumerate(outputs) if output.requires_grad]
        used = [number for number, grad in zip(numbers, grad_outputs, strict=True) if grad is not None]
        args, kwargs = map_tensors((args, kwargs), copied)
        way.prepare(self._own_call, args, kwargs, used)

    def _own_call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own call, even if other code has replaced it by one that returns here."""
        before, self._inside = self._inside, True
        try:
            return self.module(*args, **kwargs)
        finally:
            self._inside = before

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Inside, calls run as the remembered one did, and nothing of them remains."""
        enabled, dtype = self._last_autocast
        untouched = ModuleState(self.module, self.device)
        try:
            with torch.enable_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
                yield
        finally:
            untouched.restore()

    def _is_transformed(self) -> bool:
        """Whether the computation is not what it seems: under a transform or mode of torch, or recorded into a graph.

        Or with weights that `parametrize.cached` keeps for a while.
        """
        return (
            parametrize_cached() > 0
            or peek_interpreter_stack() is not None
            or dispatch_mode_count() > 0
            or (self._kind == "cuda" and is_stream_capturing())
        )


def _key(numerics: Numerics, execution: Execution) -> tuple[Numerics, Execution]:
    """The choices of a plan that belong to calls."""
    return replace(numerics, optimizer="plain"), replace(execution, replay_steps=1, compile="no")


def is_checkpointed() -> bool:
    """Whether hooks keep what the call saves, as in checkpointing: then it runs again, and must be the same."""
    return _top_hooks is not None and _top_hooks(True) is not None
