"""Updates that are skipped if gradients are not finite, and the scaled loss of fp16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from hotlap.core.torch_private import foreach_unscale_, update_scale_
from hotlap.engine.optimizers import no_trace_of_twins, twin_of
from hotlap.engine.schedules import Schedule, moves_rates_only

START = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000
"""The defaults of torch's GradScaler."""
FLOOR = 1.0
"""The least scale; GradScaler has none.

After 145 bad steps in a row, 1 / scale is infinite, and GradScaler updates with infinite gradients. A scale below 1
would drown the small gradients that it should save. Gradients that are not finite at 1 are so without any scale.
"""
CEILING = 2.0**24
"""The largest scale. Gradients that need more to be seen in fp16 (below 2**-48) do not change fp32 weights, which have
24 bits."""


class LossScale:
    """The scale of an fp16 loss, adapted as GradScaler does, and whether the gradients of a step are finite.

    Every value is a tensor that keeps its address, and only `skips` and `overflowed` wait for the device, so that a
    step can be recorded. If not `enabled`, it scales nothing and only checks for finite values.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        enabled: bool = True,
        start: float = START,
        growth: float = GROWTH,
        backoff: float = BACKOFF,
        interval: int = GROWTH_INTERVAL,
        floor: float = FLOOR,
        ceiling: float = CEILING,
    ) -> None:
        self.enabled = enabled
        self._start = start if enabled else 1.0
        self._growth, self._backoff, self._interval = growth, backoff, interval
        self._floor, self._ceiling = floor, ceiling
        self.scale = torch.full((), self._start, dtype=torch.float32, device=device)
        """The factor of the loss."""
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        """1 if the last gradients were not finite, else 0. Optimizers that can skip an update read it."""
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped = torch.zeros((), dtype=torch.float64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to differentiate."""
        return loss * self.scale if self.enabled else loss

    def unscale_(self, grads: Sequence[Tensor]) -> None:
        """Divide gradients by the scale in place, and check whether all of them are finite."""
        self.found_inf.zero_()
        if grads:
            dense = [grad._values() if grad.is_sparse else grad for grad in grads]
            foreach_unscale_(dense, self.found_inf, self.scale.reciprocal())

    def look_at(self, norm: Tensor) -> None:
        """Check by their total norm whether gradients are finite: one number, where `unscale_` reads all of them."""
        self.found_inf.copy_(norm.isfinite().logical_not())

    def update(self) -> None:
        """After a step: count it if it was skipped, and adapt the scale."""
        self._skipped.add_(self.found_inf)
        if self.enabled:
            update_scale_(self.scale, self._good, self.found_inf, self._growth, self._backoff, self._interval)
            self.scale.clamp_(self._floor, self._ceiling)

    def overflowed(self) -> bool:
        """Whether the last gradients were not finite; waits for the device."""
        return bool(self.found_inf)

    def skips(self) -> int:
        """Skipped updates so far; waits for the device."""
        return int(self._skipped)

    def reset(self) -> None:
        """Start again."""
        for tensor in self._all():
            tensor.zero_()
        self.scale.fill_(self._start)

    def saved(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A copy of its state."""
        scale, good, found_inf, skipped = (tensor.clone() for tensor in self._all())
        return scale, good, found_inf, skipped

    def put_back(self, saved: Sequence[Tensor]) -> None:
        """Restore a copy of the state, also one from another device."""
        for tensor, value in zip(self._all(), saved, strict=True):
            tensor.copy_(value)

    def _all(self) -> tuple[Tensor, ...]:
        return self.scale, self._good, self.found_inf, self._skipped


@contextmanager
def skipping(optimizer: Optimizer, found_inf: Tensor) -> Iterator[None]:
    """Inside, a step of an optimizer that `skips_on_device` changes nothing if `found_inf` is 1."""
    _give_momentum(optimizer)
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        yield
    finally:
        # The plain loop refuses to run while it is set.
        optimizer.found_inf = None  # type: ignore[attr-defined]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether this optimizer, with its current settings, can skip an update without the host waiting for the result.

    A twin skips one: weights, state and step counts have to stay the same, and its next step has to equal that of a
    twin that skipped none. Other optimizers wait for `overflowed`.
    """
    if isinstance(optimizer, SGD) and any(group["momentum"] and group["dampening"] for group in optimizer.param_groups):
        return False  # see _give_momentum
    try:
        with no_trace_of_twins(optimizer):
            return _skips(twin_of(optimizer), twin_of(optimizer))
    except Exception:  # it does not take the flag
        return False


def _skips(skipped: Optimizer, plain: Optimizer) -> bool:
    _give_momentum(skipped)  # so that the state before and after the skipped step can be compared
    before = _contents(skipped)
    for parameter in _parameters(skipped):
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))
    with skipping(skipped, torch.ones((), device=_parameters(skipped)[0].device)):
        skipped.step()
    after = _contents(skipped)
    if not all(torch.equal(after[name], value) for name, value in before.items()):
        return False
    for parameter in _parameters(skipped):
        parameter.grad = torch.ones_like(parameter)
    with skipping(skipped, torch.zeros((), device=_parameters(skipped)[0].device)):
        skipped.step()
    plain.step()
    ours, theirs = _contents(skipped), _contents(plain)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())


def _give_momentum(optimizer: Optimizer) -> None:
    """Create the momentum of fused SGD before its first step.

    Fused SGD creates it without filling it. If that very step is skipped, it goes on from whatever was in memory (torch
    2.11 and 2.13). From zeros it makes the same first step, unless momentum is dampened.
    """
    groups = optimizer.param_groups
    # As many states as parameters: the usual case, so nothing else is checked.
    if not isinstance(optimizer, SGD) or len(optimizer.state) >= sum(len(group["params"]) for group in groups):
        return
    for group in groups:
        if group["momentum"] and not group["dampening"] and group.get("fused"):
            for parameter in group["params"]:
                if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _contents(optimizer: Optimizer) -> dict[tuple[int, str], Tensor]:
    """Copies of all weights and state, by number and name."""
    found = {(n, ""): p.detach().clone() for n, p in enumerate(_parameters(optimizer))}
    for n, parameter in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            found[n, name] = torch.as_tensor(value).clone() if value is not None else torch.zeros(0)
    return found


# --- guards --------------------------------------------------------------------------------------------


class Guards:
    """Decides which updates are skipped: for fp16's scaled loss, or if the user wants to skip gradients that are not
    finite.

    One for each training. It outlives changes of plan, since the scale that fp16 has found must.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, device: torch.device, *, skip_nonfinite: bool) -> None:
        self._optimizer, self._schedule, self._device = optimizer, schedule, device
        self._scale: LossScale | None = None
        self._check = LossScale(device, enabled=False) if skip_nonfinite else None
        self._before = 0

    def of(self, precision: str) -> tuple[LossScale | None, bool]:
        """The guard of steps in this precision, and whether the device can skip an update without the host."""
        guard = self._check
        if precision == "fp16":
            guard = self._scale = self._scale or LossScale(self._device)
        if guard is None:
            return None, False
        # A schedule that moves more than the rate needs its position on the host at once.
        return guard, skips_on_device(self._optimizer) and moves_rates_only(self._schedule, self._optimizer)

    @property
    def may_skip(self) -> bool:
        """Whether an update may have been skipped."""
        return self._scale is not None or self._check is not None

    @property
    def skipped(self) -> int:
        """Skipped updates; waits for the device, which counts them."""
        return self._before + sum(guard.skips() for guard in self._all())

    def set_skipped(self, skipped: int) -> None:
        """Set the number of skipped updates so far."""
        self._before = skipped - sum(guard.skips() for guard in self._all())

    def saved(self) -> dict[str, Any]:
        """A copy of the state."""
        kept: dict[str, Any] = {"before": self._before}
        if self._scale is not None:
            kept["scale"] = self._scale.saved()
        if self._check is not None:
            kept["check"] = self._check.saved()
        return kept

    def put_back(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""
        if "scale" in saved:
            self._scale = self._scale or LossScale(self._device)
            self._scale.put_back(saved["scale"])
        elif self._scale is not None:
            self._scale.reset()
        if self._check is not None and "check" in saved:
            self._check.put_back(saved["check"])
        self._before = saved["before"]

    def _all(self) -> list[LossScale]:
        return [guard for guard in (self._scale, self._check) if guard is not None]
