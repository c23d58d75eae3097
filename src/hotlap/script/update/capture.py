"""Replays steps of an optimizer, with the same numbers as its own steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from hotlap.core.errors import first_line
from hotlap.core.torch_private import current_raw_stream, foreach_copy_, set_grad_enabled, step_pre_hooks_of_all
from hotlap.engine.capture.recording import NotRecordedError, Recorder
from hotlap.engine.optimizers import frozen_hyperparameters, recording, why_not_captured

WARM = 2
"""Consecutive steps with the same settings and gradients that the optimizer makes itself before one is recorded."""
PATIENCE = 16
"""Steps that may not be replays, plus one for each four that are."""
MOST_AGAIN = 3
"""Times a step is recorded again because gradients have moved: plans that alternate use different memory."""
CHECKS = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")
"""torch's queries of the driver before each step, by their names in versions of torch. Each takes a tenth of a
millisecond, and tells nothing new."""


class CapturedUpdate:
    """Makes the steps of one optimizer by replays; new or unusual steps are left to the optimizer."""

    def __init__(
        self, optimizer: Optimizer, *, make_recorder: Callable[[], Recorder], shared_inputs: SharedInputs
    ) -> None:
        self._optimizer, self._make_recorder, self._shared_inputs = optimizer, make_recorder, shared_inputs
        self._graph: UpdateGraph | None = None
        self._look: Any = None
        self._alike = 0
        self._replays = 0
        self._others: list[UpdateGraph] = []
        self._is_tried = False
        first = next(iter(parameters_of(optimizer)), None)
        self._device = first.device if first is not None else torch.device("cpu")
        self.idle = _idle(optimizer)
        """An optimizer of the same kind with nothing to update: torch steps it in place of a replayed step."""
        self.warmup_steps = 0
        """Steps that replayed no earlier recording, although one may still exist for such steps."""
        self.given_up: str | None = why_unknown(optimizer)
        """Why nothing is captured; None while that is possible."""

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    def replayed(self) -> bool:
        """Make the step by a replay; False if nothing was done."""
        graph = self._graph
        if graph is not None and graph.has_moved:
            graph = self._graph = self._matching(graph)
        if graph is not None and graph.has_moved_for_good and len(self._others) < MOST_AGAIN:
            others = [*self._others, graph]
            self.forget()
            self._others = others
            return False
        try:
            made = graph is not None and self._is_usual() and graph.fits and graph.replay()
        except Exception as error:  # the optimizer then makes the step
            self.give_up(first_line(error))
            return False
        if made:
            self._replays += 1
            self._look = None
        return made

    def _matching(self, graph: UpdateGraph) -> UpdateGraph:
        """The graph recorded for the current addresses of gradients, if there is one: plans alternate."""
        for number, other in enumerate(self._others):
            if other.matches_addresses_of(graph):
                self._others[number] = graph
                other.begin_again()
                return other
        return graph

    def replayed_after_all(self) -> bool:
        """Try again, with counts where the graph reads them; drops a graph that does not fit even then."""
        if self.replayed():
            return True
        if self._graph is not None and not self._graph.fits:
            self.forget()
        return False

    def why_not(self) -> str | None:
        """Why a step with the current settings cannot be recorded; on a GPU, tries it once with a twin optimizer."""
        reason = why_unfit(self._optimizer)
        if reason is None and self._device.type == "cuda" and not self._is_tried:
            reason = why_not_captured(self._optimizer)
            self._is_tried = reason is None
        return reason

    def prepare(self) -> UpdateGraph | None:
        """Called with the settings for recording, before a step that was no replay; returns a new graph when it is
        time.

        Pass it to `taken` once the optimizer has its own settings again.
        """
        self.warmup_steps += 1
        if self.warmup_steps > PATIENCE + self._replays // 4:
            self.give_up("its settings, or which parameters have gradients, keep changing")
            return None
        try:
            look = self._looked() if self._is_usual() else None
            self._alike = self._alike + 1 if look is not None and look == self._look else 0
            self._look = look
            if self._alike < WARM:
                return None
            reason = self.why_not()
            if reason is not None:
                self.give_up(reason)
                return None
            return self.recorded_step()
        except Exception as error:  # the optimizer then makes its steps itself
            self.give_up(f"it cannot be recorded: {first_line(error)}")
            return None

    def recorded_step(self) -> UpdateGraph:
        """Record a step with the current settings."""
        return UpdateGraph(self._optimizer, self._make_recorder(), self._shared_inputs)

    def taken(self, graph: UpdateGraph) -> bool:
        """Use a prepared graph, and make its first step."""
        graph.settle()
        self._graph = graph
        return self.replayed()

    def give_up(self, reason: str) -> None:
        """Leave all steps to the optimizer."""
        self.forget()
        self.given_up = self.given_up or reason

    def forget(self) -> None:
        """Release all recordings."""
        self._graph, self._look, self._alike = None, None, 0
        self._others = []

    def _looked(self) -> Any:
        """What must stay the same for some steps before one is recorded."""
        parameters = parameters_of(self._optimizer)
        return (
            tuple((id(p), p.data_ptr(), p.grad is not None) for p in parameters),
            frozen_hyperparameters(self._optimizer),
        )

    def _is_usual(self) -> bool:
        """Whether only torch takes part in this step, on the usual stream."""
        optimizer = self._optimizer
        if (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or len(step_pre_hooks_of_all) > 1
            or "found_inf" in optimizer.__dict__
            or "grad_scale" in optimizer.__dict__
            or torch.compiler.is_compiling()
        ):
            return False
        return self._shared_inputs.is_free(self._device)


def why_unknown(optimizer: Optimizer) -> str | None:
    """Why the effects of an optimizer's steps are unknown; None for torch's own optimizers."""
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim."):
        return f"{name} is not one of torch's own optimizers"
    return None if all(group["params"] for group in optimizer.param_groups) else f"{name} has an empty group"


def why_unfit(optimizer: Optimizer) -> str | None:
    """Why an optimizer's steps must not be recorded in its current state; None if they may."""
    name = type(optimizer).__name__
    groups, parameters = optimizer.param_groups, parameters_of(optimizer)
    if len({parameter.device for parameter in parameters}) > 1:
        return f"{name} has parameters on several devices"
    if any(type(parameter) not in (Tensor, nn.Parameter) for parameter in parameters):
        return f"{name} has parameters that are more than tensors"
    if any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters):
        return f"{name} has parameters in float64, but recorded learning rates are float32"
    if any(group.get("differentiable") for group in groups):
        return f"{name} is differentiable"
    if not all(_is_plain(group.get(key)) for group in groups for key in ("lr", *frozen_names(group))):
        return f"{name} has settings that are more than plain values"
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(grad.layout is not torch.strided or type(grad) is not Tensor for grad in grads):
        return f"{name} has sparse gradients"
    device = parameters[0].device
    values = [value for kept in optimizer.state.values() for value in kept.values()]
    if any(not isinstance(value, Tensor) or value.device != device for value in values):
        return f"{name} keeps more than tensors on {device}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def skip_driver_checks(optimizer: Optimizer) -> None:
    """Make the optimizer skip its queries of the driver before steps."""
    for name in CHECKS:
        vars(optimizer).setdefault(name, _no_check)


def restore_driver_checks(optimizer: Optimizer) -> None:
    """Undo `skip_driver_checks`."""
    for name in CHECKS:
        if vars(optimizer).get(name) is _no_check:
            del vars(optimizer)[name]


def _no_check() -> None:
    """Replaces such a query."""


def _idle(optimizer: Optimizer) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(defaults={"differentiable": False}, param_groups=[], state={})
    skip_driver_checks(made)
    return made


# --- one recorded step -------------------------------------------------------------------


FILLED = 4
"""Most learning rates to write one by one; more of them are sent together."""
FOR_GOOD = 8
"""Consecutive steps with gradients at the same new address after which they count as moved for good."""
_END = object()
_place = Tensor.data_ptr
_stride = Tensor.stride


class SharedInputs:
    """Shared memory in which graphs find gradients; each step copies what its graph reads there, right before the
    replay.

    So all these graphs must be replayed on one stream.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._streams: dict[torch.device, int] = {}

    def is_free(self, device: torch.device) -> bool:
        """Whether it can be used now: on the stream of its first use, while the script records no graph."""
        if device.type != "cuda":
            return True
        stream = current_raw_stream(device.index)
        return self._streams.setdefault(device, stream) == stream and not torch.cuda.is_current_stream_capturing()

    def buffers(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        taken: dict[Hashable, int] = {}
        found = []
        for tensor in tensors:
            buffer = torch.empty_like(tensor, requires_grad=False)
            form = (buffer.device, buffer.dtype, tuple(buffer.shape), buffer.stride())
            number = taken[form] = taken.get(form, 0) + 1
            found.append(self._buffers.setdefault((form, number), buffer))
        return found

    def clear(self) -> None:
        self._buffers.clear()
        self._streams.clear()


class DeviceRates:
    """The learning rates of an optimizer's groups on its device; the groups keep plain numbers."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._table = torch.zeros(len(optimizer.param_groups), dtype=torch.float32, device=device)
        self.rates = self._table.unbind()
        self._written: list[float | None] = [None] * len(self.rates)

    def follow(self, groups: Sequence[dict[str, Any]]) -> None:
        """Copy the groups' current rates to the device. Raises TypeError if one is a tensor."""
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
            # A copy from pageable memory would wait for all earlier work.
            here = torch.tensor(now, dtype=torch.float32, device="cpu", pin_memory=self._table.is_cuda)
            self._table.copy_(here, non_blocking=True)
        self._written = now


class RecordedState:
    """The state that a recording depends on: settings except learning rates, and addresses of tensors.

    Checked before each step, so it uses as little Python as possible.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = [
            (group, len(group), look := itemgetter(*frozen_names(group)), look(group))
            for group in optimizer.param_groups
        ]
        parameters = parameters_of(optimizer)
        self._places = [*map(_place, parameters)]
        self._state = [*_values(optimizer), _END]
        # Code that moves state to other memory without replacing it moves all of it.
        first = optimizer.state.get(parameters[0], {}) if parameters else {}
        self._some = [value for value in first.values() if isinstance(value, Tensor)]
        self._some_places = [*map(_place, self._some)]

    def holds(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
        """Whether the state is unchanged; `parameters` are the optimizer's current ones."""
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


def step_without_hooks(optimizer: Optimizer) -> None:
    """A step without any hooks."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def frozen_names(group: dict[str, Any]) -> list[str]:
    """The settings of a group that a recording depends on."""
    return [name for name in group if name not in ("params", "lr")]


def _values(optimizer: Optimizer) -> chain[Any]:
    return chain.from_iterable([kept.values() for kept in optimizer.state.values()])


def _places(tensors: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """The addresses of tensors, and their strides. Raises TypeError if one is None."""
    return [*map(_place, tensors)], [*map(_stride, tensors)]


class UpdateGraph:
    """A step for the parameters that have a gradient now.

    It is recorded twice: with gradients at their current addresses, where the next ones will be if backward passes are
    recorded too; and with gradients in shared memory, for gradients elsewhere. Create it while the optimizer has the
    settings for recording, after steps that created its state.
    """

    def __init__(self, optimizer: Optimizer, recorder: Recorder, shared_inputs: SharedInputs) -> None:
        self._optimizer = optimizer
        parameters = parameters_of(optimizer)
        self._used = [parameter for parameter in parameters if parameter.grad is not None]
        self._unused = [parameter for parameter in parameters if parameter.grad is None]
        if not self._used:
            raise NotRecordedError("nothing has a gradient")
        grads = [parameter.grad for parameter in self._used if parameter.grad is not None]
        self._device = self._used[0].device
        self._grads = shared_inputs.buffers(grads)
        self._rates = DeviceRates(optimizer, self._device)
        self._recorded_state: RecordedState | None = None
        before = RecordedState(optimizer)
        self._rates.follow(optimizer.param_groups)
        self._recorded_at = self._last_at = _places(grads)
        self._moved_steps = 0
        try:
            self._at_once = recorder.record(self._work)
            for parameter, buffer in zip(self._used, self._grads, strict=True):
                parameter.grad = buffer
            self._from_shared = recorder.record(self._work)
        finally:
            for parameter, grad in zip(self._used, grads, strict=True):
                parameter.grad = grad
        if not before.holds(optimizer, parameters):
            raise NotRecordedError("its state moves in memory with each step")

    def _work(self) -> None:
        with recording(self._optimizer, self._rates.rates):
            step_without_hooks(self._optimizer)

    def settle(self) -> None:
        """The optimizer has the script's own settings again; each replay must find them."""
        self._recorded_state = RecordedState(self._optimizer)

    @property
    def fits(self) -> bool:
        """Whether the optimizer is unchanged since the recording, apart from which parameters have gradients."""
        return self._recorded_state is not None and self._recorded_state.holds(
            self._optimizer, parameters_of(self._optimizer)
        )

    def matches_addresses_of(self, other: UpdateGraph) -> bool:
        """Whether this was recorded for the addresses at which the other graph last saw gradients."""
        return self._recorded_at == other._last_at

    def begin_again(self) -> None:
        """Gradients are back at the recorded addresses."""
        self._last_at, self._moved_steps = self._recorded_at, 0

    @property
    def has_moved(self) -> bool:
        """Whether the last gradients were at other addresses than recorded."""
        return self._last_at != self._recorded_at

    @property
    def has_moved_for_good(self) -> bool:
        """Whether gradients have moved for good, so that a new recording avoids the copies."""
        return self._moved_steps >= FOR_GOOD

    def replay(self) -> bool:
        """Make a step; False, and nothing done, if other parameters have gradients than recorded."""
        if self._unused and any(parameter.grad is not None for parameter in self._unused):
            return False
        grads = [parameter.grad for parameter in self._used]
        was_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            now_at = _places(grads)
            self._rates.follow(self._optimizer.param_groups)
            is_there = now_at == self._recorded_at
            self._moved_steps = self._moved_steps + 1 if now_at == self._last_at and not is_there else 0
            self._last_at = now_at
            if not is_there:
                foreach_copy_(self._grads, grads)
        except TypeError:  # a gradient is missing, or a learning rate has become a tensor
            return False
        finally:
            set_grad_enabled(was_enabled)
        (self._at_once if is_there else self._from_shared).replay()
        increment_version(self._used)
        return True
