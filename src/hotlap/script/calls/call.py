"""The calls of a module that a script trains, made in the precision, the layout and the way of a plan.

Only calls in training mode that record gradients are changed. In evaluation and without gradients a call stays in the
script's own precision, and runs its own kernels: metrics must not change. Under a capture, evaluation without gradients
is replayed, too. What a script gets back has the dtype, the layout and the containers that its own call gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hotlap.core.errors import PlanError, first_line
from hotlap.core.plan import Execution, Numerics
from hotlap.data.batches import map_tensors
from hotlap.engine.capture.recording import Recorder
from hotlap.engine.differentiating import gradients
from hotlap.engine.layout import images_last, why_not_channels_last
from hotlap.engine.scaling import LossScale
from hotlap.script.calls.capture import CapturedCall, Lanes
from hotlap.script.calls.eager import EagerCall, Forms, Original, leave_broken_passes, own_switches
from hotlap.script.calls.endings import Endings
from hotlap.script.calls.graphs import Recording
from hotlap.script.calls.refusals import (
    why_not_captured,
    why_not_changed,
    why_not_in_precision,
)
from hotlap.script.calls.traces import Untouched
from hotlap.script.calls.trees import leaves, looked_at, marks

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # older torch has none
NOTED = 8
"""Calls under the script's own plan of which it is noted in which form they give back."""


class Call:
    """Makes the calls of one module as a plan has them.

    Where that fails, the script's own call is made, from then on too, and `given_up` says why.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device,
        make_recorder: Callable[[torch.device], Recording] | None = None,
        endings: Endings | None = None,
    ) -> None:
        """`endings` is told of what replays give to the script."""
        if device == torch.device("cuda"):  # some one of them
            device = torch.device("cuda", torch.cuda.current_device())
        self.module, self.device = module, device
        self._kind = device.type
        self._records = make_recorder is not None or device.type == "cuda"
        self._endings = endings
        self._lanes = Lanes(functools.partial(make_recorder or Recorder, device))
        self._forms, self._unnoted = Forms(device), NOTED
        self._scale: LossScale | None = None
        self._ways: dict[Hashable, EagerCall | CapturedCall] = {}
        self._tried: set[Hashable] = set()
        self._failed: dict[Hashable, str] = {}
        self._plan = _key(Numerics(), Execution())
        self._way: EagerCall | CapturedCall | None = None
        self._inside = False
        self._autocasts = self._writes = False
        self._remembers = False
        self._last_autocast = (False, torch.get_autocast_dtype(device.type))
        self.last_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Arguments and keyword arguments of the call that was remembered."""
        self.last_output_grads: list[Tensor | None] = []
        """What came to its floating outputs that require gradients, in their order; None where nothing did."""

    # --- plans -----------------------------------------------------------------------------------

    def supports(self, numerics: Numerics, execution: Execution) -> str | None:
        """Why calls cannot be made so, or None where they can."""
        return next(filter(None, self._reasons(numerics, execution)), None)

    def _reasons(self, numerics: Numerics, execution: Execution) -> Iterator[str | None]:
        if self._is_own(numerics, execution):
            return
        module, device = self.module, self.device
        yield self._failed.get(_key(numerics, execution))
        yield "its forward pass changes its weights" if self._writes else why_not_changed(module)
        if numerics.precision != "fp32":
            yield why_not_in_precision(module, numerics.precision, device, autocasts=self._autocasts)
        if numerics.layout == "channels_last":
            yield why_not_channels_last([module])
        if execution.mode == "captured":
            yield "the script makes its steps one by one" if execution.replay_steps > 1 else None
            yield None if self._records else f"execution.mode='captured' needs a GPU, not a {device.type}"
            yield why_not_captured(module, device)

    def use(self, numerics: Numerics, execution: Execution) -> None:
        """Make calls so, from the next one on. Raises PlanError where that cannot be."""
        reason = self.supports(numerics, execution)
        if reason is not None:
            raise PlanError(reason)
        leave_broken_passes()
        self._plan = _key(numerics, execution)
        self._way = self._way_of(numerics, execution)

    @property
    def warmup_steps(self) -> int:
        """Calls so far under the plan in force that were not at its pace."""
        return self._way.warmup_steps if self._way is not None else 0

    @property
    def given_up(self) -> str | None:
        """Why the plan in force is not obeyed as it stands; None where it is."""
        return self._failed.get(self._plan) or (self._way.given_up if self._way is not None else None)

    def tidy(self) -> None:
        """Let go of all that belongs to other plans than the one in force."""
        self._ways = {key: way for key, way in self._ways.items() if way is self._way}

    def forget(self) -> None:
        """Let go of all that was recorded or kept; it comes back when it is needed."""
        self.tidy()
        for way in self._ways.values():
            if isinstance(way, CapturedCall):
                way.forget()
        self.forget_inputs()

    def _is_own(self, numerics: Numerics, execution: Execution) -> bool:
        tuned = execution.autotune and self.device.type == "cuda" and not torch.backends.cudnn.benchmark
        return _key(numerics, execution)[:3] == ("fp32", "as given", "eager") and not tuned

    def _way_of(self, numerics: Numerics, execution: Execution) -> EagerCall | CapturedCall | None:
        if self._is_own(numerics, execution):
            return None
        key = _key(numerics, execution)
        if key not in self._ways:
            scale = None
            if numerics.precision == "fp16":
                scale = self._scale = self._scale or LossScale(self.device)
            # Images alone are turned: weights and gradients stay as the script has them, which may view them flat.
            layout = images_last if numerics.layout == "channels_last" else None
            eager = EagerCall(
                self.module, numerics, execution, self.device, forms=self._forms, layout=layout, scale=scale
            )
            way: EagerCall | CapturedCall = eager
            if execution.mode == "captured":
                way = CapturedCall(
                    eager, self.module, self.device, self._lanes, self._endings, without=execution.without
                )
            self._ways[key] = way
        return self._ways[key]

    # --- calls -----------------------------------------------------------------------------------

    def __call__(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the script's; `original` makes its own."""
        if self._inside or self._is_transformed():
            return original(*args, **kwargs)
        if _is_checkpointed():
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
            if self._plan not in self._tried:
                before = Untouched(self.module, self.device)
                self._tried.add(self._plan)
            return (way if trains else way.plainly)(original, args, kwargs)
        except Exception as error:
            if before is not None:
                before.restore()
            return self._fallen_back(error, original, args, kwargs)
        finally:
            self._inside = False

    def _noted(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call under the script's own plan, and see what it is like."""
        before = marks(self.module.parameters())
        outputs = original(*args, **kwargs)
        self._unnoted = max(0, self._unnoted - 1)
        self._writes |= before != marks(self.module.parameters())
        with suppress(Exception):  # outputs may be whatever the script likes
            self._forms.note(args, kwargs, outputs)
        return outputs

    def _fallen_back(self, error: Exception, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the script's own call, which fails again where it is the script that is wrong."""
        outputs = original(*args, **kwargs)
        self._failed[self._plan] = first_line(error)
        self._way = None
        self._ways.pop(self._plan, None)
        return outputs

    # --- gates -----------------------------------------------------------------------------------

    def remember_next(self) -> None:
        """Keep the inputs of the next call that trains, and the gradients that come to its outputs."""
        self._remembers = True

    def forget_inputs(self) -> None:
        """Let go of what was kept."""
        self._remembers, self.last_inputs, self.last_output_grads = False, None, []

    def _remembered(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._remembers, self.last_inputs = False, None
        with suppress(Exception):  # arguments may be whatever the script likes
            self.last_inputs = map_tensors((args, kwargs), _copied)
        way = self._way
        make = self._noted if way is None else functools.partial(self._made, way, trains=True)
        outputs = make(original, args, kwargs)
        try:
            return self._kept(outputs)
        except Exception:
            self.forget_inputs()
            return outputs

    def _kept(self, outputs: Any) -> Any:
        """The outputs of a call that is remembered, with the gradients that come to them kept."""
        self._last_autocast = self._autocast
        wanting = [number for number, output in enumerate(leaves(outputs)) if output.requires_grad]
        grads: list[Tensor | None] = [None] * len(wanting)
        self.last_output_grads = grads

        def came(number: int, grad: Tensor) -> None:
            place = wanting.index(number)
            if grads[place] is None:
                grads[place] = grad.detach().clone()

        return looked_at(outputs, came)

    def trial(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad_outputs: Sequence[Tensor | None],
        numerics: Numerics,
        execution: Execution,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Make forward and backward of a call under a plan, from the present weights, and leave no trace.

        `grad_outputs` come to the outputs that require gradients, in their order. Given are these outputs, and the
        gradients of the parameters by name. Trials at one moment begin with the same randomness, but for the device's
        once recurrent layers that drop out have been recorded. Raises NotRecordedError, or what the module raises.
        """
        with self._aside():
            way = self._way_of(numerics, execution)
            if way is not None:
                with Untouched(self.module, self.device):
                    self._prepare(way, args, kwargs, grad_outputs)
            args, kwargs = map_tensors((args, kwargs), _copied)
            made = self._directly(*args, **kwargs) if way is None else way(self._directly, args, kwargs)
            wanting = _wanting(made)
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
        """Have the way ready for such a call at its own pace."""
        given = map_tensors((args, kwargs), _copied)
        outputs = leaves(self._directly(*given[0], **given[1]))
        self._forms.note(args, kwargs, outputs)
        numbers = [number for number, output in enumerate(outputs) if output.requires_grad]
        used = [number for number, grad in zip(numbers, grad_outputs, strict=True) if grad is not None]
        args, kwargs = map_tensors((args, kwargs), _copied)
        way.prepare(self._directly, args, kwargs, used)

    def _directly(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own call, also where somebody has put another in its place that comes back here."""
        before, self._inside = self._inside, True
        try:
            return self.module(*args, **kwargs)
        finally:
            self._inside = before

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Inside, calls are as the one that was remembered, and leave no trace."""
        enabled, dtype = self._last_autocast
        untouched = Untouched(self.module, self.device)
        try:
            with torch.enable_grad(), torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
                yield
        finally:
            untouched.restore()

    def _is_transformed(self) -> bool:
        """Whether what is computed is not what it seems: under a transform or a mode of torch's, or recorded.

        Or from weights that `parametrize.cached` keeps for a while.
        """
        return (
            parametrize._cache_enabled > 0
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._len_torch_dispatch_stack() > 0
            or (self._kind == "cuda" and torch._C._cuda_isCurrentStreamCapturing())
        )

    @property
    def _autocast(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind)


def _key(numerics: Numerics, execution: Execution) -> tuple[str, str, str, bool, tuple[str, ...], str]:
    """What of a plan belongs to calls."""
    return (
        numerics.precision, numerics.layout, execution.mode, execution.autotune, execution.without, numerics.depthwise,
    )  # fmt: skip


def _wanting(outputs: Any) -> list[Tensor]:
    """The outputs that require gradients."""
    return [output for output in leaves(outputs) if output.requires_grad]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _is_checkpointed() -> bool:
    """Whether what the call saves is kept by hooks, as checkpointing does: it is made again and has to be the same."""
    return _top_hooks is not None and _top_hooks(True) is not None
