"""One step of an optimizer, recorded: what it reads, what it was made for, and what a replay leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from hotlap.engine.capture.recording import NotRecordedError
from hotlap.engine.optimizers import recording
from hotlap.script.calls.graphs import Recording

FILLED = 4
"""Learning rates that are written one by one; more of them at a time are sent together."""
FOR_GOOD = 8
"""Steps in a row with gradients in the same other memory, after which they are taken to stay there."""
_END = object()
_place = Tensor.data_ptr
_stride = Tensor.stride


class Desk:
    """Memory in which graphs find gradients. All share it: each lays there whatever it reads, right before.

    So all have to be replayed on one stream.
    """

    def __init__(self) -> None:
        self._rooms: dict[Hashable, Tensor] = {}
        self._streams: dict[torch.device, int] = {}

    def is_free(self, device: torch.device) -> bool:
        """Whether it can be used now: on the stream of its first use, which is not being recorded by the script."""
        if device.type != "cuda":
            return True
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        return self._streams.setdefault(device, stream) == stream and not torch.cuda.is_current_stream_capturing()

    def rooms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A room for each of the tensors."""
        taken: dict[Hashable, int] = {}
        found = []
        for tensor in tensors:
            room = torch.empty_like(tensor, requires_grad=False)
            form = (room.device, room.dtype, tuple(room.shape), room.stride())
            number = taken[form] = taken.get(form, 0) + 1
            found.append(self._rooms.setdefault((form, number), room))
        return found

    def clear(self) -> None:
        """Let go of all of it."""
        self._rooms.clear()
        self._streams.clear()


class Followed:
    """The learning rates of an optimizer's groups on its device; the groups themselves keep plain numbers."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._table = torch.zeros(len(optimizer.param_groups), dtype=torch.float32, device=device)
        self.rates = self._table.unbind()
        self._written: list[float | None] = [None] * len(self.rates)

    def follow(self, groups: Sequence[dict[str, Any]]) -> None:
        """Have on the device what the groups have now. Raises TypeError where that is no plain number."""
        now = [group["lr"] for group in groups]
        if now == self._written:
            return
        if any(isinstance(rate, Tensor) for rate in now):
            raise TypeError("a learning rate is a tensor")
        changed = [number for number, rate in enumerate(now) if rate != self._written[number]]
        if len(changed) <= FILLED:
            for number in changed:
                self.rates[number].fill_(float(now[number]))
        else:
            # A copy from pageable memory would wait for all that was launched before.
            here = torch.tensor(now, dtype=torch.float32, device="cpu", pin_memory=self._table.is_cuda)
            self._table.copy_(here, non_blocking=True)
        self._written = now


class Fit:
    """What of an optimizer a recording holds fast: its settings but for the rates, and where its tensors lie.

    Asked before each step, so it is made of as little Python as can be.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [
            (group, len(group), look := itemgetter(*frozen_names(group)), look(group))
            for group in optimizer.param_groups
        ]
        parameters = parameters_of(optimizer)
        self._places = [*map(_place, parameters)]
        self._state = [*_values(optimizer), _END]
        # Whoever moves state to other memory without replacing it moves all of it.
        first = optimizer.state.get(parameters[0], {}) if parameters else {}
        self._some = [value for value in first.values() if isinstance(value, Tensor)]
        self._some_places = [*map(_place, self._some)]

    def holds(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
        """Whether all of it is as it was; `parameters` are the optimizer's now."""
        groups = optimizer.param_groups
        if len(groups) != len(self._groups):
            return False
        for group, (before, size, look, settings) in zip(groups, self._groups, strict=True):
            if group is not before or len(group) != size or look(group) != settings:
                return False
        return (
            [*map(_place, parameters)] == self._places
            and all(map(is_, chain(_values(optimizer), (_END,)), self._state))
            and [*map(_place, self._some)] == self._some_places
        )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    groups = optimizer.param_groups
    if len(groups) == 1:
        alone: list[Tensor] = groups[0]["params"]
        return alone
    return [parameter for group in groups for parameter in group["params"]]


def frozen_names(group: dict[str, Any]) -> list[str]:
    """The settings of a group that a recording holds fast."""
    return [name for name in group if name not in ("params", "lr")]


def _values(optimizer: Optimizer) -> chain[Any]:
    return chain.from_iterable([kept.values() for kept in optimizer.state.values()])


def _places(tensors: Sequence[Any]) -> list[int]:
    """Where tensors lie. Raises TypeError where one is None."""
    return [*map(_place, tensors)]


def _strides(tensors: Sequence[Any]) -> list[Any]:
    return [*map(_stride, tensors)]


class UpdateGraph:
    """A step with the gradients of the parameters that have one now.

    Recorded twice: with gradients where they lie now, which is where the next ones will be if backward passes are
    recorded too; and with gradients on the desk, where they are laid if they come to lie elsewhere. To be made while
    the optimizer is set to be recorded, after steps that made its state.
    """

    def __init__(
        self, optimizer: Optimizer, step: Callable[[Optimizer], None], recorder: Recording, desk: Desk
    ) -> None:
        self._optimizer, self._step = optimizer, step
        parameters = parameters_of(optimizer)
        self._used = [parameter for parameter in parameters if parameter.grad is not None]
        self._unused = [parameter for parameter in parameters if parameter.grad is None]
        if not self._used:
            raise NotRecordedError("nothing has a gradient")
        grads = [parameter.grad for parameter in self._used if parameter.grad is not None]
        self._device = self._used[0].device
        self._grads = desk.rooms(grads)
        self._followed = Followed(optimizer, self._device)
        self._fit: Fit | None = None
        before = Fit(optimizer)
        self._followed.follow(optimizer.param_groups)
        self._lie = self._lay = (_places(grads), _strides(grads))
        self._elsewhere = 0
        try:
            self._at_once = recorder.record(self._work)
            for parameter, room in zip(self._used, self._grads, strict=True):
                parameter.grad = room
            self._from_desk = recorder.record(self._work)
        finally:
            for parameter, grad in zip(self._used, grads, strict=True):
                parameter.grad = grad
        if not before.holds(optimizer, parameters):
            raise NotRecordedError("its state comes to lie elsewhere with each step")

    def _work(self) -> None:
        with recording(self._optimizer, self._followed.rates):
            self._step(self._optimizer)

    def settle(self) -> None:
        """Told that the optimizer has the script's own settings again, in which each replay has to find it."""
        self._fit = Fit(self._optimizer)

    @property
    def fits(self) -> bool:
        """Whether the optimizer is what it was when this was made, whatever has a gradient."""
        return self._fit is not None and self._fit.holds(self._optimizer, parameters_of(self._optimizer))

    def lies_as(self, other: UpdateGraph) -> bool:
        """Whether gradients lay there when this was recorded where the other one has seen the last ones."""
        return self._lie == other._lay

    def begin_again(self) -> None:
        """Told that gradients lie there again where they lay when it was recorded."""
        self._lay, self._elsewhere = self._lie, 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether the last gradients lay elsewhere than when it was recorded."""
        return self._lay != self._lie

    @property
    def is_outrun(self) -> bool:
        """Whether gradients have come to lie elsewhere for good, so that one recorded now need not lay them out."""
        return self._elsewhere >= FOR_GOOD

    def replay(self) -> bool:
        """Make a step; False, and nothing done, where other parameters have gradients than when it was recorded."""
        if self._unused and any(parameter.grad is not None for parameter in self._unused):
            return False
        grads = [parameter.grad for parameter in self._used]
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            lie = (_places(grads), _strides(grads))
            self._followed.follow(self._optimizer.param_groups)
            is_there = lie == self._lie
            self._elsewhere = self._elsewhere + 1 if lie == self._lay and not is_there else 0
            self._lay = lie
            if not is_there:
                torch._foreach_copy_(self._grads, grads)  # type: ignore[arg-type]
        except TypeError:  # one has no gradient this time, or a rate has become a tensor
            return False
        finally:
            torch._C._set_grad_enabled(was_enabled)
        (self._at_once if is_there else self._from_desk).replay()
        increment_version(self._used)
        return True
