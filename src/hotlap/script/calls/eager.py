"""Calls made operation by operation in the precision and layout of a plan, and why some calls cannot change."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from hotlap import machine
from hotlap.core.code_reads import attributes_taken, is_users_function
from hotlap.core.object_memory import TRAINERS
from hotlap.core.plan import Execution, Numerics
from hotlap.core.torch_private import HOOKS_OF_ALL, current_graph_task_id, queue_callback
from hotlap.engine.capture.captured_step import BatchError, shape_of
from hotlap.engine.capture.fingerprint import memory, what_changed
from hotlap.engine.precision import Switches, precision_context, why_not_precision
from hotlap.engine.scaling import LossScale
from hotlap.script.calls.autograd_bridge import ScaledCall, autocast_dtype, bridged_outputs
from hotlap.script.calls.trees import Form, form_of, in_form, kind_of, leaves, unknown_type_in

Original = Callable[..., Any]
"""Makes the script's own call."""

LOOKED_AT = 2
"""Calls before the first in fp16, to see that all gradients arrive through the outputs."""


class OutputForms:
    """The forms of a module's outputs under the script's own plan, by kind of call.

    A script may train inside its own autocast and evaluate without.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, Form] = {}

    def of(self, args: Any, kwargs: Any) -> Form | None:
        """The form for such a call; None if none is known."""
        return self._known.get(self._key(args, kwargs))

    def note(self, args: Any, kwargs: Any, outputs: Any, *, laid_out: bool = False) -> Form:
        """Note a call in the script's own precision; in another layout, all outputs count as contiguous."""
        form = tuple((dtype, contiguous or laid_out) for dtype, contiguous in form_of(outputs))
        return self._known.setdefault(self._key(args, kwargs), form)

    def _key(self, args: Any, kwargs: Any) -> Hashable:
        return autocast_dtype(self._device), kind_of((args, kwargs))


class EagerCall:
    """Makes calls in the precision and layout and under the switches of a plan."""

    def __init__(
        self,
        module: nn.Module,
        numerics: Numerics,
        execution: Execution,
        device: torch.device,
        *,
        forms: OutputForms,
        layout: Callable[[Any], Any] | None,
        scale: LossScale | None,
    ) -> None:
        self._module, self._device, self._forms = module, device, forms
        self._casts = numerics.precision in ("bf16", "fp16")
        self._context = precision_context(numerics, device, [module])
        self._laid_out = precision_context(dataclasses.replace(numerics, precision="fp32"), device, [module])
        self.switches = Switches(numerics, execution, device)
        self._layout = layout
        self.scale = scale
        """The loss scale for fp16."""
        self._looked = 0
        self.warmup_steps = 0
        """Calls in the script's own precision, made to see the form of their outputs."""
        self.given_up: str | None = None
        """Why all calls stay in the script's own precision."""

    def __call__(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call that will be differentiated."""
        if not self._is_known(args, kwargs):
            return self._seen(original, args, kwargs)
        if self.scale is not None and not self.chosen_by_script:
            compute = functools.partial(self.computed, original)
            scaled = ScaledCall(compute, self._module, self._device, self.switches, (args, kwargs), self.scale)
            return bridged_outputs(scaled)
        if not self.switches:
            return self.computed(original, args, kwargs)
        leave_broken_passes()
        with self.switches:
            outputs = self.computed(original, args, kwargs)
        switch_in_backward(leaves(outputs), self.switches)
        return outputs

    def prepare(self, original: Original, args: Any, kwargs: Any, used: Sequence[int]) -> None:
        """Make enough calls to know their form."""
        while not self._is_known(args, kwargs):
            self._seen(original, args, kwargs)

    def computed(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Outputs under the plan, in the script's own form; does not set the switches."""
        if not self._casts or self.chosen_by_script:
            return self.in_own_precision(original, args, kwargs)
        form = self._forms.of(args, kwargs)
        if self._layout is not None:
            args, kwargs = self._layout((args, kwargs))
        with self._context():
            outputs = original(*args, **kwargs)
        return outputs if form is None else in_form(outputs, form)

    def in_own_precision(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Outputs in the script's own precision and form."""
        if self._layout is None:
            return original(*args, **kwargs)
        inner_args, inner_kwargs = self._layout((args, kwargs))
        with self._laid_out():
            outputs = original(*inner_args, **inner_kwargs)
        form = self._forms.of(args, kwargs) or self._forms.note(args, kwargs, outputs, laid_out=True)
        return in_form(outputs, form)

    @property
    def chosen_by_script(self) -> bool:
        """Whether the script, not the plan, determines this call's precision, for example by its own autocast."""
        return self._casts and (self.given_up is not None or torch.is_autocast_enabled(self._device.type))

    def _is_known(self, args: Any, kwargs: Any) -> bool:
        if not self._casts or self.chosen_by_script:
            return True
        return self._forms.of(args, kwargs) is not None and (self.scale is None or self._looked >= LOOKED_AT)

    def _seen(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call in the script's own precision, and note its form."""
        self.warmup_steps += 1
        before = memory([self._module]) if self.scale is not None else {}
        outputs = self.in_own_precision(original, args, kwargs)
        self._forms.note(args, kwargs, outputs, laid_out=self._layout is not None)
        if self.scale is not None:
            self._looked += 1
            self.given_up = what_changed(before, memory([self._module])) or _why_hidden(args, kwargs, outputs)
        return outputs


def _why_hidden(args: Any, kwargs: Any, outputs: Any) -> str | None:
    """Why gradients may enter or leave a call in a way that hotlap cannot see; None if they cannot."""
    kind = unknown_type_in(outputs)
    if kind is not None:
        return f"its outputs hold a {kind}"
    try:
        shape_of((args, kwargs))
    except BatchError:
        return "its arguments are more than tensors and plain values"
    return None


# --- switches in the backward pass -------------------------------------------------------


_entered: dict[int, list[Switches]] = {}
"""By backward pass: the switches turned on in it, in order."""


def switch_in_backward(outputs: Iterable[Tensor], switches: Switches) -> None:
    """Turn switches on when gradients reach these outputs, until the backward pass is over.

    So they also cover what comes before the module in the script's graph, but not the loss.
    """
    for output in outputs:
        if output.grad_fn is not None:
            output.register_hook(partial(_enter, switches))  # type: ignore[no-untyped-call]


@contextmanager
def own_switches() -> Iterator[None]:
    """Inside, a backward pass runs under the script's own switches, as the call did that it repeats."""
    entered = list(_entered.get(current_graph_task_id(), ()))
    for switches in reversed(entered):
        switches.__exit__()
    try:
        yield
    finally:
        for switches in entered:
            switches.__enter__()


def leave_broken_passes() -> None:
    """Turn off what a failed backward pass left on; torch reports such failures to no callback."""
    if _entered and current_graph_task_id() == -1:
        for number in reversed(list(_entered)):
            _leave(number)


def _enter(switches: Switches, _: Tensor) -> None:
    number = current_graph_task_id()
    if number not in _entered:
        _entered[number] = []
        queue_callback(partial(_leave, number))
    if not any(one is switches for one in _entered[number]):
        switches.__enter__()
        _entered[number].append(switches)


def _leave(number: int) -> None:
    # Each restores what it found, so the last one goes first.
    for switches in reversed(_entered.pop(number, [])):
        switches.__exit__()


# --- why calls cannot change -------------------------------------------------------------


_TRANSLATED = {"ScriptModule": "is scripted", "OptimizedModule": "is compiled"}
_SPREAD = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


TOGETHER = "several processes train together, and hotlap would try plans in each by itself"
"""Why such a training keeps its calls and updates: the processes would wait for each other, or drift apart."""


def trains_with_others() -> bool:
    """Whether other processes take part in this training by `torch.distributed`."""
    is_part = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_part and torch.distributed.get_world_size() > 1


def why_not_changed(module: nn.Module) -> str | None:
    """Why a module's calls must stay as they are: something else controls its code; None if nothing does."""
    if trains_with_others():
        return TOGETHER
    for layer in module.modules():
        if layer._compiled_call_impl is not None:
            return f"{type(layer).__name__} is compiled"
        for name, how in _TRANSLATED.items():
            if name in _kinds(layer):
                return f"{type(layer).__name__} {how}"
        asked = _asked_of_trainer(type(layer))
        if asked is not None:
            return f"{type(layer).__name__} uses self.{asked} in its forward pass, which leads to its trainer"
    return None


_NO_TRAINERS = {*dir(nn.Module), "device", "dtype", "hparams"}
"""Attributes of a module of Lightning that do not lead to its trainer."""


def _asked_of_trainer(kind: type[nn.Module]) -> str | None:
    """What the user's forward pass takes from a trainer, such as `log`; None if nothing.

    Trials would log twice, replays not at all, and a recording keeps the epoch that it was made in.
    """
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in TRAINERS]
    theirs = {name for base in kind.__mro__ if base not in own for name in vars(base)} - _NO_TRAINERS
    ahead, seen = ["forward"] if theirs else [], set[str]()
    while ahead:
        name = ahead.pop()
        seen.add(name)
        found = [vars(base)[name] for base in own if name in vars(base)]
        if not found and name in theirs:
            return name
        methods = [inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one))) for one in found]
        codes = [one.__code__ for one in methods if isinstance(one, types.FunctionType) and is_users_function(one)]
        asked = {more for code in codes for more in attributes_taken(code, next(iter(code.co_varnames), ""))}
        ahead += asked - seen
    return None


def why_not_in_precision(module: nn.Module, precision: str, device: torch.device, *, autocasts: bool) -> str | None:
    """Why its calls cannot use this precision; `autocasts` if the script uses autocast itself."""
    if autocasts and precision in ("bf16", "fp16"):
        return "the script uses autocast itself"
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if dtypes - {torch.float32}:
        return f"the weights are {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"
    if precision == "fp16":
        if machine.dtype_fact(device, "bf16").support is machine.Support.HARDWARE:
            return "the GPU supports bf16, which needs no loss scale"
        if any(_hooks_of(layer, _BACKWARD_HOOKS) for layer in module.modules()):
            return "the script's own backward hooks would see scaled gradients"
        if _odd_parameter(module) is not None:
            return _odd_parameter(module)
    return why_not_precision(precision, device)


def why_not_captured(module: nn.Module, device: torch.device) -> str | None:
    """Why its calls cannot be recorded, judged by the module itself."""
    for name in _spread_by(module):
        return f"a recording cannot capture what {name} does"
    if any(held.device != device for held in (*module.parameters(), *module.buffers())):
        return f"not all of its weights and buffers are on {device}"
    if _odd_parameter(module) is not None:
        return _odd_parameter(module)
    return why_hooked(module)


def why_hooked(module: nn.Module) -> str | None:
    """Which hooks of the script run with a module's calls; None if there are none."""
    for layer in module.modules():
        if _hooks_of(layer, (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)):
            return f"{type(layer).__name__} has hooks of the script"
    return "the script has hooks on every module" if any(HOOKS_OF_ALL) else None


def _odd_parameter(module: nn.Module) -> str | None:
    """Why an alias cannot replace one of its parameters; None if it can."""
    kinds = (type(p) for p in module.parameters())
    return next((f"it has a parameter that is a {kind.__name__}" for kind in kinds if kind is not nn.Parameter), None)


def _spread_by(module: nn.Module) -> Iterator[str]:
    """The wrappers in it that spread a model over devices or processes."""
    return (name for layer in module.modules() for name in _SPREAD if name in _kinds(layer))


def _kinds(layer: nn.Module) -> set[str]:
    """Class names; importing some of these classes would take longer than everything else here."""
    return {kind.__name__ for kind in type(layer).__mro__}


def _hooks_of(layer: nn.Module, kinds: tuple[str, ...]) -> bool:
    return any(getattr(layer, kind, None) for kind in kinds)
