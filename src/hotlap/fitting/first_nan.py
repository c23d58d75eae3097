"""Where numbers first cease to be finite: the steps are made again, and every layer is watched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.errors import first_few
from hotlap.data.order import Order
from hotlap.data.sources import tensors_in
from hotlap.engine.rig import Place, Rig
from hotlap.engine.step import Window

SHOWN = 8
"""Samples of a batch that a message lists."""
ITSELF = "(the batch itself)"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where numbers first ceased to be finite."""

    step: int
    """The number of the update, from 1 on."""
    batch: str
    """Its batch, in words."""
    where: str
    """What was not finite first, in words."""
    values: tuple[str, ...]
    """The values around it, a line each."""

    def __str__(self) -> str:
        return f"it begins at step {self.step:,}, {self.batch}: {self.where}"


def find_origin(
    rig: Rig,
    order: Order,
    windows: Iterable[Window],
    *,
    good: int,
    skips: bool,
    until: int,
    most_s: float,
    ended: Callable[[], None],
) -> Origin | None:
    """Make these updates again, up to step `until`, and watch every layer; None if all numbers stay finite.

    Before step `good` they were finite: None too if they are not now, since that is another course. Skipped updates
    are origins only with `skips`. Waits for the device after each layer. Gives up after `most_s` seconds. Calls `ended`
    after good updates.
    """
    watch, ends_s = _Watch(rig), time.perf_counter() + most_s
    for window in windows:
        if rig.steps >= until or time.perf_counter() > ends_s:
            break
        place, step = rig.place, rig.steps + 1
        if not window.pieces:  # all of its samples raised, so that there is no update
            rig.advance(window)
            continue
        indices = _indices(order, place, window)
        before = rig.skipped
        with watch.hooks(len(window.pieces) == 1):
            loss = float(rig.advance(window))
        was_skipped = rig.skipped > before
        found = watch.verdict(loss, was_skipped)
        if found is not None and (skips or not was_skipped):
            if step < good:
                return None
            where, values, rows = found
            # Without samples that raised, rows are not those of the order.
            samples = [indices[row] for row in rows] if rows and window.samples == len(indices) else indices
            batch = f"epoch {place.epoch + 1}, batch {place.window:,} of {rig.epoch_windows:,} ({_listed(samples)})"
            return Origin(step=step, batch=batch, where=where, values=tuple(values))
        ended()
    return None


def last_batch(rig: Rig, order: Order) -> str:
    """The batch before the rig's place, in words."""
    number, window, _ = rig.place
    if not window and (not number or not order.needs_no_user_code):
        return f"the last one of epoch {number}"
    number = number if window else number - 1
    epoch = order.epoch(number)
    window = window or len(epoch)
    indices = [index for piece in epoch.pieces(window - 1, None) for index in piece.tolist()]
    return f"epoch {number + 1}, batch {window:,} of {len(epoch):,} ({_listed(indices)})"


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers in these tensors are finite; waits once for the device."""
    flags = [_values(tensor).isfinite().all() for tensor in tensors if _has_fractions(tensor)]
    return not flags or bool(torch.stack(flags).all())


def figures(tensors: Iterable[Tensor]) -> str:
    """What numbers there are, in words: `3 NaN, 1 Inf of 30 numbers, largest finite 2.5`."""
    numbers = nans = infinities = 0
    largest = 0.0
    for tensor in tensors:
        if not _has_fractions(tensor):
            continue
        values = _values(tensor)
        numbers += values.numel()
        nan, finite = int(values.isnan().sum()), values.isfinite()
        nans, infinities = nans + nan, infinities + values.numel() - nan - int(finite.sum())
        if bool(finite.any()):
            largest = max(largest, float(values.where(finite, torch.zeros_like(values)).abs().max()))
    bad = ", ".join(f"{count:,} {kind}" for count, kind in ((nans, "NaN"), (infinities, "Inf")) if count)
    return f"{bad or 'all finite'} of {numbers:,} numbers, largest finite {largest:.3g}"


class _Watch:
    """Notes what is not finite in one step, in order.

    A model may use infinities on purpose, as in a mask. So a step counts as bad only if its loss, a gradient or a
    weight is not finite, and what was not finite in good steps either is no origin.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._names = {
            layer: _name(module, name, layer, "model" if number == 0 else "loss")
            for number, module in enumerate(rig.modules)
            for name, layer in module.named_modules()
        }
        self._weights = {
            p: f"{name} of the {'model' if number == 0 else 'loss'}"
            for number, module in enumerate(rig.modules)
            for name, p in module.named_parameters()
        }
        self._usual: set[str] = set()
        self._forward: dict[str, tuple[list[str], list[int]]] = {}
        self._backward: dict[str, tuple[list[str], list[int]]] = {}
        self._is_whole = True
        self._seen_gradient = "the loss"

    @contextmanager
    def hooks(self, is_whole: bool) -> Iterator[None]:
        """Inside, the layers of the rig are watched; `is_whole` says whether the batch goes through in one piece."""
        self._forward, self._backward, self._is_whole, self._seen_gradient = {}, {}, is_whole, "the loss"
        handles: list[Any] = []
        for layer in self._names:
            with suppress(RuntimeError, AttributeError):  # scripted layers take none
                handles.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
                handles.append(layer.register_forward_hook(self._after, with_kwargs=True))
        trained = [parameter for parameter in self._weights if parameter.requires_grad]
        handles += [_hook(one, partial(self._weight_gradient, one)) for one in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def verdict(self, loss: float, was_skipped: bool) -> tuple[str, list[str], list[int]] | None:
        """What of the step was not finite first, the values around it, and its rows; None for a good step."""
        gradients = [p.grad for p in self._weights if p.grad is not None]
        weights = [p for p in self._weights if not are_finite([p])]
        rate = f"learning rate {float(self._rig.optimizer.param_groups[0]['lr']):g}"
        new_forward = {where: rest for where, rest in self._forward.items() if where not in self._usual}
        found: tuple[str, list[str], list[int]]
        if not math.isfinite(loss):
            found = f"the loss is {loss}, though the output of every layer is finite", [], []
            new = new_forward
        elif self._backward or not are_finite(gradients) or was_skipped:
            found = "the norm of all gradients together is not finite", [f"gradients: {figures(gradients)}"], []
            given = {where: rest for where, rest in new_forward.items() if where.endswith(ITSELF)}
            new = given | self._backward
        elif weights:
            name = self._weights[weights[0]]
            of = weights[0].grad
            values = [f"the weight: {figures(weights[:1])}", rate]
            values += [f"its gradient: {figures([of])}"] if of is not None else []
            return f"the update makes {name} not finite, though its gradient is finite", values, []
        else:
            self._usual.update(self._forward)
            return None
        where, values, rows = next(((where, *rest) for where, rest in new.items()), found)
        return where, [*values, f"the loss: {loss:.4g}", rate], rows

    # --- hooks ---------------------------------------------------------------------------------------

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors_in((args, kwargs))
        name = self._names[layer]
        if not are_finite(given):
            what = ITSELF if layer is self._rig.model else "(made between layers, or the target)"
            values = [f"the input: {figures(given)}"]
            self._note(self._forward, f"the input of {name} is not finite {what}", values, given)

    def _after(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        made, name = tensors_in(output), self._names[layer]
        if not are_finite(made):
            values = [
                f"its output: {figures(made)}",
                f"its inputs: {figures(tensors_in((args, kwargs)))}",
                f"its weights: {figures(layer.parameters())}",
            ]
            self._note(self._forward, f"the output of {name} is not finite", values, made)
        for tensor in made:
            if tensor.requires_grad:
                _hook(tensor, partial(self._output_gradient, name))

    def _output_gradient(self, name: str, grad: Tensor) -> None:
        if are_finite([grad]):
            self._seen_gradient = name
            return
        words = f"in the backward pass, the gradient between {self._seen_gradient} and {name} is not finite"
        self._note(self._backward, words, [f"the gradient: {figures([grad])}"], [grad])

    def _weight_gradient(self, parameter: nn.Parameter, grad: Tensor) -> None:
        if not are_finite([grad]):
            words = f"in the backward pass, the gradient of {self._weights[parameter]} is not finite"
            values = [f"the gradient: {figures([grad])}", f"the weight: {figures([parameter])}"]
            self._note(self._backward, words, values, [])

    def _note(self, to: dict[str, Any], where: str, values: list[str], tensors: list[Tensor]) -> None:
        if where not in to:
            to[where] = values, self._rows(tensors)

    def _rows(self, tensors: list[Tensor]) -> list[int]:
        """The rows of a batch that are not finite, if only some of them are not."""
        for tensor in tensors if self._is_whole else ():
            if _has_fractions(tensor) and tensor.ndim and not tensor.is_sparse:
                good = tensor.detach().isfinite().flatten(1).all(1) if tensor.ndim > 1 else tensor.detach().isfinite()
                if not bool(good.all()):
                    return [] if not bool(good.any()) else (~good).nonzero()[:, 0].tolist()
        return []


def _name(module: nn.Module, name: str, layer: nn.Module, role: str) -> str:
    return f"{name} ({type(layer).__name__})" if layer is not module else f"the {role} {type(layer).__name__}"


def _values(tensor: Tensor) -> Tensor:
    """The numbers that a tensor holds, in a form that torch can test."""
    held = (tensor._values() if tensor.is_sparse else tensor).detach()
    return held.float() if held.element_size() == 1 else held  # torch tests no 8-bit numbers


def _hook(tensor: Tensor, then: Callable[[Tensor], None]) -> Any:
    return tensor.register_hook(then)  # type: ignore[no-untyped-call]


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _indices(order: Order, place: Place, window: Window) -> list[int]:
    """The samples of a window; the place is that after it."""
    pieces = order.epoch(place.epoch).pieces(place.window - window.updates, None)
    return [index for piece in pieces for index in piece.tolist()]


def _listed(samples: list[int]) -> str:
    return f"sample{'' if len(samples) == 1 else 's'} {first_few([*map(str, samples)], SHOWN)}"
