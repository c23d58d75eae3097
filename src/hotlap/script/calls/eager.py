"""Calls made operation by operation, in the numbers and the layout of a plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.plan import Execution, Numerics
from hotlap.engine.capture.captured_step import BatchError, shape_of
from hotlap.engine.capture.fingerprint import memory, what_changed
from hotlap.engine.precision import Switches, precision_context
from hotlap.engine.scaling import LossScale
from hotlap.script.calls.passage import ScaledTurn, passed
from hotlap.script.calls.trees import Form, form_of, in_form, kind_of, leaves, stranger_to_trees

Original = Callable[..., Any]
"""Makes the script's own call."""

LOOKED_AT = 2
"""Calls before the first in fp16, in which it is seen that all gradients come through the outputs."""


class Forms:
    """The forms in which a module gives outputs back under the script's own plan, by the kind of call.

    A script may train inside of an autocast of its own and evaluate without.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._known: dict[Hashable, Form] = {}

    def of(self, args: Any, kwargs: Any) -> Form | None:
        """The form of such a call; None where none was seen."""
        return self._known.get(self._key(args, kwargs))

    def note(self, args: Any, kwargs: Any, outputs: Any, *, laid_out: bool = False) -> Form:
        """Know a call in the script's own precision; where its layout is another, all is taken to be contiguous."""
        form = tuple((dtype, contiguous or laid_out) for dtype, contiguous in form_of(outputs))
        return self._known.setdefault(self._key(args, kwargs), form)

    def _key(self, args: Any, kwargs: Any) -> Hashable:
        cast = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
        return cast, kind_of((args, kwargs))


class EagerCall:
    """Makes calls in the precision, the layout and under the switches of a plan."""

    def __init__(
        self,
        module: nn.Module,
        numerics: Numerics,
        execution: Execution,
        device: torch.device,
        *,
        forms: Forms,
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
        """Of fp16."""
        self._looked = 0
        self.warmup_steps = 0
        """Calls in the script's own precision, to see what they are like."""
        self.given_up: str | None = None
        """Why all of them are."""

    def __call__(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call that is to be differentiated."""
        if not self._is_known(args, kwargs):
            return self._seen(original, args, kwargs)
        if self.scale is not None and not self.chosen_by_script:
            compute = functools.partial(self.computed, original)
            turn = ScaledTurn(compute, self._module, self._device, self.switches, (args, kwargs), self.scale)
            return passed(turn)
        if not self.switches:
            return self.computed(original, args, kwargs)
        leave_broken_passes()
        with self.switches:
            outputs = self.computed(original, args, kwargs)
        switch_in_backward(leaves(outputs), self.switches)
        return outputs

    def prepare(self, original: Original, args: Any, kwargs: Any, used: Sequence[int]) -> None:
        """Have seen what such calls are like."""
        while not self._is_known(args, kwargs):
            self._seen(original, args, kwargs)

    def computed(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Outputs under the plan, in the script's own form; its switches are not set here."""
        if not self._casts or self.chosen_by_script:
            return self.plainly(original, args, kwargs)
        form = self._forms.of(args, kwargs)
        if self._layout is not None:
            args, kwargs = self._layout((args, kwargs))
        with self._context():
            outputs = original(*args, **kwargs)
        return outputs if form is None else in_form(outputs, form)

    def plainly(self, original: Original, args: Any, kwargs: Any) -> Any:
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
        """Whether the precision of this call is not the plan's: in an autocast of the script's own, for one."""
        return self._casts and (self.given_up is not None or torch.is_autocast_enabled(self._device.type))

    def _is_known(self, args: Any, kwargs: Any) -> bool:
        if not self._casts or self.chosen_by_script:
            return True
        return self._forms.of(args, kwargs) is not None and (self.scale is None or self._looked >= LOOKED_AT)

    def _seen(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call in the script's own precision, and see what it is like."""
        self.warmup_steps += 1
        before = memory([self._module]) if self.scale is not None else {}
        outputs = self.plainly(original, args, kwargs)
        self._forms.note(args, kwargs, outputs, laid_out=self._layout is not None)
        if self.scale is not None:
            self._looked += 1
            self.given_up = what_changed(before, memory([self._module])) or _why_hidden(args, kwargs, outputs)
        return outputs


def _why_hidden(args: Any, kwargs: Any, outputs: Any) -> str | None:
    """Why gradients may come to a call, or leave it, in a way that nobody can see."""
    kind = stranger_to_trees(outputs)
    if kind is not None:
        return f"its outputs hold a {kind}"
    try:
        shape_of((args, kwargs))
    except BatchError:
        return "its arguments are more than tensors and plain values"
    return None


# --- switches that a backward pass runs under, from where it enters a call on -----------------------------


_entered: dict[int, list[Switches]] = {}
"""By backward pass: what was switched on in it, in that order."""


def switch_in_backward(outputs: Iterable[Tensor], switches: Switches) -> None:
    """Have switches on from when gradients come to these outputs of a call until the backward pass is over.

    So what a script has before the module in its graph runs under them too, but not its loss.
    """
    for output in outputs:
        if output.grad_fn is not None:
            output.register_hook(partial(_enter, switches))  # type: ignore[no-untyped-call]


@contextmanager
def own_switches() -> Iterator[None]:
    """Inside, a backward pass runs under the script's own switches, as a call did that it makes once more."""
    entered = list(_entered.get(torch._C._current_graph_task_id(), ()))
    for switches in reversed(entered):
        switches.__exit__()
    try:
        yield
    finally:
        for switches in entered:
            switches.__enter__()


def leave_broken_passes() -> None:
    """Switch off what a backward pass left on that ended in an error, of which torch tells nobody."""
    if _entered and torch._C._current_graph_task_id() == -1:
        for number in reversed(list(_entered)):
            _leave(number)


def _enter(switches: Switches, _: Tensor) -> None:
    number = torch._C._current_graph_task_id()
    if number not in _entered:
        _entered[number] = []
        torch.autograd.Variable._execution_engine.queue_callback(partial(_leave, number))
    if not any(one is switches for one in _entered[number]):
        switches.__enter__()
        _entered[number].append(switches)


def _leave(number: int) -> None:
    # Each puts back what it found, so the last goes first.
    for switches in reversed(_entered.pop(number, [])):
        switches.__exit__()
