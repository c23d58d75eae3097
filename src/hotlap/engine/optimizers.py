"""Switch an optimizer between its plain loop, torch's fused kernel and a step that can be recorded, keeping its state.

A trial step of a small twin shows what an optimizer can do; its name does not.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.code_reads import is_users
from hotlap.core.errors import TrainingError, first_line
from hotlap.core.object_memory import ObjectMemory
from hotlap.core.torch_private import (
    TorchDispatchMode,
    aten_local_scalar_dense,
    aten_to_copy,
    step_post_hooks_of_all,
    step_pre_hooks_of_all,
)
from hotlap.engine.layout import BufferPool
from hotlap.engine.snapshot import Randomness

_COUNTS = ("step", "mu_product")
"""State that torch's optimizers keep on the host in the plain loop, and on the device in the other kinds of step."""

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
"""Layers that can ask for sparse gradients."""


def is_fused(optimizer: Optimizer) -> bool:
    """Whether every group of the optimizer uses the fused kernel."""
    return all(bool(group.get("fused")) for group in optimizer.param_groups)


def why_not_fused(optimizer: Optimizer, modules: Sequence[nn.Module] = ()) -> str | None:
    """Why this optimizer cannot use a fused kernel on its parameters, or None after a real step with one.

    `modules` are those that it trains, as far as they are known: embeddings can ask for sparse gradients.
    """
    name = type(optimizer).__name__
    if "fused" not in optimizer.defaults:
        return f"{name} has no fused kernel"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} with differentiable=True has no fused kernel"
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        return f"{name} with dampening has no fused kernel for a parameter whose first gradient comes later"
    layers = (layer for module in modules for layer in module.modules())
    if has_sparse_gradients(optimizer) or any(isinstance(one, _EMBEDDINGS) and one.sparse for one in layers):
        return f"{name} has no fused kernel for sparse gradients"
    kinds = {(p.device, p.dtype): p for group in optimizer.param_groups for p in group["params"]}
    for (device, dtype), real in kinds.items():
        try:
            with no_trace_of_twins(optimizer):
                twin_of(optimizer, only=real, foreach=False, fused=True).step()
        except Exception as error:  # whatever stops a step with it is the answer
            return f"{name} cannot fuse {dtype} on {device}: {first_line(error)}"
    return None


def has_sparse_gradients(optimizer: Optimizer) -> bool:
    """Whether a gradient that is there now is sparse."""
    return any(p.grad is not None and p.grad.is_sparse for group in optimizer.param_groups for p in group["params"])


class LayoutCheck:
    """Compares the memory layout of the gradients and the state of an optimizer with that of its weights.

    Fused CPU kernels read all of them in the order of memory. Where the layouts differ, they update the wrong elements
    without an error. `backward()` gives a gradient the layout of its weight; `autograd.grad` and scripts may not.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state: Any = None
        self._strides: list[Any] = []
        """Strides of the weights whose state was checked last."""

    def matches_weights(self) -> bool:
        """Whether each present gradient and its state have the layout of their weight; no gradient may be sparse.

        Checks the state again after it was loaded, if other weights have gradients, and after a False.
        """
        weights = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        strides = [*map(_stride, weights)]
        grads = [p.grad for p in weights]
        if [*map(_stride, grads)] != strides and not all(map(_is_laid_out_as, weights, grads)):
            self._state = None
            return False
        state = self._optimizer.state
        if state is not self._state or strides != self._strides:
            kept = [(p, one) for p in weights for one in state.get(p, {}).values() if isinstance(one, Tensor)]
            self._state = state if all(_is_laid_out_as(p, one) for p, one in kept) else None
            self._strides = strides
        return self._state is state


_stride = Tensor.stride


def _is_laid_out_as(weight: Tensor, other: Tensor) -> bool:
    """Whether a tensor has the layout of a weight; true for tensors of another shape, such as counts."""
    strides, others = weight.stride(), other.stride()
    if strides == others or weight.shape != other.shape:
        return True
    return all(a == b for a, b, size in zip(strides, others, weight.shape, strict=True) if size != 1)


def twin_of(optimizer: Optimizer, *, only: Tensor | None = None, **flags: Any) -> Optimizer:
    """A small optimizer of the same class, settings and state, without hooks, whose steps change no real weight.

    For each group it has one parameter of each kind in the group, or `only` one like the given parameter. `flags`
    replace settings of the groups. It is made as by unpickling, since constructors of subclasses take unknown
    arguments.
    """
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    groups = []
    for group in optimizer.param_groups:
        kinds = {(p.device, p.dtype, p.ndim): p for p in group["params"] if only is None or p is only}
        if not kinds:
            continue
        settings = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        settings |= {name: value for name, value in flags.items() if name in settings}
        small = []
        for real in kinds.values():
            # Size 2 in every dimension: some optimizers take only matrices.
            parameter = torch.nn.Parameter(torch.ones((2,) * real.ndim, device=real.device, dtype=real.dtype))
            parameter.grad = torch.ones_like(parameter)
            # Some optimizers make their state when they are made (Adagrad in torch 2.11), so the twin gets its own.
            known = _small_state(optimizer.state.get(real, {}), real, parameter)
            if known:
                state[parameter] = known
            small.append(parameter)
        groups.append({**settings, "params": small})
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__setstate__({"defaults": dict(optimizer.defaults), "state": state, "param_groups": groups})
    # As the constructor sets it; otherwise an optimizer that can be recorded warns when it is not recorded.
    twin._warned_capturable_if_run_uncaptured = True
    settle_counts(twin)
    return twin


@contextmanager
def no_trace_of_twins(optimizer: Optimizer) -> Iterator[None]:
    """Inside, twins of the optimizer may make steps; afterwards what their code wrote to or drew from is put back.

    Raises TrainingError where it cannot be: globals and class attributes belong to all objects of a user's class.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    memory = ObjectMemory({"optimizer": optimizer}, parameters) if is_users(type(optimizer).__module__) else None
    if memory is not None and memory.unknown:
        raise TrainingError(memory.unknown[0])
    randomness = Randomness(parameters[0].device if parameters else torch.device("cpu"))
    try:
        yield
    finally:
        if memory is not None:
            memory.restore()
        randomness.restore()


def _small_state(values: dict[str, Any], real: Tensor, parameter: Tensor) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in values.items():
        if name in _COUNTS or not isinstance(value, Tensor):
            small[name] = copy.deepcopy(value)
        elif value.shape == real.shape:
            small[name] = torch.ones_like(parameter, dtype=value.dtype)
        elif value.numel() == 1:
            small[name] = value.detach().clone()
        else:
            return {}  # of an unknown shape: the twin makes its own state
    return small


_TORCHS_CHOICE: dict[str, bool | None] = {"fused": None, "foreach": None}
"""torch takes its fastest plain loop only if both are None. A False is a choice too."""


def _plain_flags(group: dict[str, Any]) -> dict[str, bool | None]:
    """The flags for a group's plain loop: the user's own, or torch's choice if the group is fused."""
    return _TORCHS_CHOICE if group.get("fused") else {name: group.get(name) for name in _TORCHS_CHOICE}


class Fusion:
    """Switches one optimizer between its kinds of step."""

    def __init__(self, optimizer: Optimizer, pool: BufferPool | None = None) -> None:
        self._optimizer, self._pool = optimizer, pool if pool is not None else BufferPool()
        self._plain = [_plain_flags(group) for group in optimizer.param_groups]
        self._capturable = [bool(g.get("capturable")) for g in optimizer.param_groups]

    def set(self, fused: bool, *, captured: bool = False) -> None:
        """Use the fused kernel from the next step on, or the plain loop; `captured`: one that can be recorded.

        An optimizer with `capturable` keeps it while it is captured, in eager steps too: its step counts stay on the
        device, where recorded steps read and update them.
        """
        for number, group in enumerate(self._optimizer.param_groups):
            known = number < len(self._plain)
            if bool(group.get("fused")) != fused:
                plain = self._plain[number] if known else _TORCHS_CHOICE
                # torch refuses fused together with foreach; the user's choice returns with the plain loop.
                group |= {"fused": True, "foreach": False} if fused else plain
            if "capturable" in group:
                # torch refuses the flag if a parameter is not on a GPU.
                can = captured and all(parameter.is_cuda for parameter in group["params"])
                group["capturable"] = can or (known and self._capturable[number])
        settle_counts(self._optimizer, self._pool)
        # GradScaler reads it, and torch sets it at construction only.
        self._optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]


def settle_counts(optimizer: Optimizer, pool: BufferPool | None = None) -> None:
    """Move step counts to where the kind of step reads them: the host for the plain loop, the device otherwise. A count
    that is there already keeps its address."""
    pool = pool if pool is not None else BufferPool()
    if isinstance(optimizer, torch.optim.ASGD):
        return  # its counts lie on the device in every kind of step
    for group in optimizer.param_groups:
        if "fused" not in group and "capturable" not in group:
            continue
        fused = bool(group.get("fused"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in _COUNTS:
                count = state.get(name)
                if isinstance(count, Tensor):
                    home = parameter.device if fused or group.get("capturable") else torch.device("cpu")
                    dtype = torch.float32 if fused else count.dtype
                    if (count.device, count.dtype) != (home, dtype):
                        room = torch.empty_like(count, device=home, dtype=dtype)
                        state[name] = pool.moved((id(parameter), name), count, room)


def start_momenta(optimizer: Optimizer) -> None:
    """Before a fused step: give momenta of zero to parameters whose first gradient comes later than that of others.

    torch's fused SGD fails on them. The step is that of the plain loop, which copies the first gradient.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    if len(optimizer.state) in (0, sum(len(group["params"]) for group in optimizer.param_groups)):
        return  # the very first step, or none comes later
    for group in optimizer.param_groups:
        if group["momentum"] and group.get("fused"):
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            absent = [one for one in given if optimizer.state.get(one, {}).get("momentum_buffer") is None]
            for parameter in absent if len(absent) < len(given) else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether the user's Python functions run with each step. A recording would not repeat them."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everywhere = (step_pre_hooks_of_all, step_post_hooks_of_all)
    return any(map(bool, (*own, *everywhere)))


def frozen_hyperparameters(optimizer: Optimizer) -> tuple[Hashable, ...]:
    """All settings that a recording freezes: everything but the learning rates. Tensors count by their address."""
    return tuple(
        (len(group["params"]), *(_frozen(v) for k, v in group.items() if k not in ("params", "lr")))
        for group in optimizer.param_groups
    )


def _frozen(value: Any) -> Hashable:
    if value is None or isinstance(value, (float, bool, int, str)):
        return value
    if isinstance(value, Tensor):
        return ("tensor", value.data_ptr())
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(part) for part in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in value.items())
    return value if isinstance(value, Hashable) else repr(value)


@contextmanager
def recording(optimizer: Optimizer, rates: Sequence[Tensor]) -> Iterator[None]:
    """Inside, steps can be recorded and read each group's learning rate from the given tensor on the device.

    Afterwards the groups have their own rates and flags again.
    """
    groups = optimizer.param_groups
    before = [(group["lr"], group.get("capturable")) for group in groups]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            # On the CPU nothing is recorded, and torch refuses the flag.
            if group.get("capturable") is False and rate.is_cuda:
                group["capturable"] = True
                _counts_to_device(optimizer, group)
        yield
    finally:
        for group, (rate_before, flag) in zip(groups, before, strict=True):
            group["lr"] = rate_before
            if flag is not None:
                group["capturable"] = flag


def _counts_to_device(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """For a captured step without a call of `Fusion.set`. Once the counts have moved, one check is enough."""
    first = optimizer.state.get(group["params"][0], {}).get("step") if group["params"] else None
    if isinstance(first, Tensor) and not first.is_cuda:
        settle_counts(optimizer)


_TRIED_RATES = (0.1, 0.2, 0.05, 0.4, 0.1)


def why_not_captured(optimizer: Optimizer) -> str | None:
    """Why a step of this optimizer, with its current settings, cannot be recorded, or None after a real recording.

    It replays a twin's recorded step with other learning rates and gradients, and compares the result with the plain
    loop. Waits for the device.
    """
    name = type(optimizer).__name__
    places = {p.device for group in optimizer.param_groups for p in group["params"]}
    elsewhere = next((place for place in places if place.type != "cuda"), None)
    if elsewhere is not None:
        return f"{name} has parameters on {elsewhere}, and steps are recorded on a GPU"
    try:
        with torch.cuda.device(next(iter(places))), no_trace_of_twins(optimizer):
            return _trial(twin_of(optimizer, capturable=True), twin_of(optimizer, capturable=False, fused=False))
    except Exception as error:  # the error is the answer
        return f"{name} cannot be recorded: {first_line(error)}"


def _trial(recorded: Optimizer, plain: Optimizer) -> str | None:
    rates = [torch.zeros((), device=group["params"][0].device) for group in recorded.param_groups]
    # The first step may create state and wait for it.
    _set_rate_and_gradients(recorded, 0, None)
    recorded.step()
    # A wait while recording breaks more than the recording: torch's generator cannot be used afterwards.
    _set_rate_and_gradients(recorded, 1, rates)
    with recording(recorded, rates), _NoWaiting():  # type: ignore[no-untyped-call]
        recorded.step()
    graph = torch.cuda.CUDAGraph()
    with recording(recorded, rates), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recorded.step()
    for number in range(2, len(_TRIED_RATES)):
        _set_rate_and_gradients(recorded, number, rates)
        graph.replay()
    for number in range(len(_TRIED_RATES)):
        _set_rate_and_gradients(plain, number, None)
        plain.step()
    return _difference(recorded, plain)


@torch.no_grad()
def _set_rate_and_gradients(twin: Optimizer, number: int, rates: Sequence[Tensor] | None) -> None:
    """Set the learning rate and the gradients of the trial's next step."""
    for place, group in enumerate(twin.param_groups):
        if rates is None:
            group["lr"] = _TRIED_RATES[number]
        else:
            rates[place].fill_(_TRIED_RATES[number])
        for parameter in group["params"]:
            values = torch.arange(1.0, parameter.numel() + 1, device=parameter.device) * (1 - 0.3 * number)
            parameter.grad.copy_(values.reshape(parameter.shape))


def _difference(recorded: Optimizer, plain: Optimizer) -> str | None:
    name = type(plain).__name__
    for one, other in zip(recorded.param_groups, plain.param_groups, strict=True):
        for mine, theirs in zip(one["params"], other["params"], strict=True):
            for key, value in plain.state.get(theirs, {}).items():
                if not _same(recorded.state[mine].get(key), value):
                    return f"{name} keeps {key!r} where a replay does not move it"
            if not _same(mine, theirs):
                return f"{name} does not follow its learning rate when it is replayed"
    return None


def _same(one: Any, other: Any) -> bool:
    """Equal up to rounding. A missing step, or one with another rate, differs by far more."""
    if not isinstance(other, Tensor) or not isinstance(one, Tensor):
        return bool(one == other)
    close = 5e-2 if other.dtype in (torch.float16, torch.bfloat16) else 1e-3
    wide = torch.complex128 if other.is_complex() else torch.float64
    return torch.allclose(one.detach().to("cpu", wide), other.detach().to("cpu", wide), close, close, equal_nan=True)


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, an operation of this thread that reads a value back from the device raises."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten_local_scalar_dense.default and args[0].device.type != "cpu":
            raise RuntimeError("it reads a value back from the device, usually the learning rate")
        made = func(*args, **(kwargs or {}))
        if func in (aten_to_copy.default, aten.copy_.default):
            source = args[1] if func is aten.copy_.default else args[0]
            if made.device.type == "cpu" and source.device.type != "cpu":
                raise RuntimeError("it copies a value back from the device")
        return made
