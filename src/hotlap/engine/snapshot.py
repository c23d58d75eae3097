"""The whole state of a training in memory, restored at the same addresses."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.object_memory import Changes, Left, ObjectMemory, tensors_of
from hotlap.core.torch_private import DropoutBase, foreach_copy_
from hotlap.data.order import HostRandomness
from hotlap.engine.layout import laid_out_as


def twin_of(generator: torch.Generator) -> torch.Generator:
    """A GPU's generator to set instead of this one, which shares its state.

    Once a generator itself was set, cuDNN's recurrent layers make the state of their dropout again, and draw for it.
    """
    return generator.graphsafe_get_state()


class Randomness:
    """The generators of the host and of the device."""

    def __init__(self, device: torch.device) -> None:
        self._host = HostRandomness()
        self._generator = generator_of(device) if device.type == "cuda" else None
        self._state = self._generator.get_state() if self._generator else None

    def restore(self) -> None:
        """Restore all generators. What cuDNN's recurrent layers drop goes on as it is."""
        self._host.restore()
        if self._generator is not None and self._state is not None:
            twin_of(self._generator).set_state(self._state)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator of operations on a device."""
    if device.type != "cuda":
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


class Modes:
    """Which layers are in training mode; often some are and some are not."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modes = [(layer, layer.training) for module in modules for layer in module.modules()]

    def restore(self) -> None:
        """Restore the mode of every layer."""
        for layer, training in self._modes:
            layer.training = training


class Snapshot:
    """Weights, buffers, gradients, modes, optimizer, schedule and randomness at one moment."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        schedule: Any,
        device: torch.device,
    ) -> None:
        self._modules, self._optimizer, self._schedule = modules, optimizer, schedule
        self._tensors = {name: tensor.detach().clone() for name, tensor in _tensors(modules)}
        self._flags = [(p, p.requires_grad) for m in modules for p in m.parameters()]
        self._grads = [(p, None if p.grad is None else p.grad.clone()) for p, _ in self._flags]
        self._modes = Modes(modules)
        self._state = {key: _copied(values) for key, values in optimizer.state.items()}
        self._groups = [_copied(_settings(group)) for group in optimizer.param_groups]
        self._schedule_state = copy.deepcopy(schedule.state_dict()) if schedule is not None else None
        self._randomness = Randomness(device)

    def restore(self) -> None:
        """Restore everything; tensors keep their addresses."""
        _put_back([(tensor, self._tensors[name]) for name, tensor in _tensors(self._modules) if name in self._tensors])
        for (parameter, flag), (_, grad) in zip(self._flags, self._grads, strict=True):
            parameter.requires_grad_(flag)
            # In the parameter's current layout, which may have changed since.
            parameter.grad = None if grad is None else laid_out_as(parameter, grad.clone())
        self._modes.restore()
        self._restore_optimizer()
        if self._schedule is not None:
            self._schedule.load_state_dict(copy.deepcopy(self._schedule_state))
        self._restore_groups()
        self._randomness.restore()

    def _restore_optimizer(self) -> None:
        state = self._optimizer.state
        for key in [key for key in state if key not in self._state]:
            del state[key]
        both: list[tuple[Tensor, Tensor]] = []
        for key, saved in self._state.items():
            current = state[key]
            for name in [name for name in current if name not in saved]:
                del current[name]
            for name, value in saved.items():
                now = current.get(name)
                # A step count may lie on the host under one plan and on the device under another. It stays where it is.
                if isinstance(now, Tensor) and isinstance(value, Tensor):
                    both.append((now, value))
                else:
                    fresh = _copied(value)
                    is_of_key = isinstance(fresh, Tensor) and isinstance(key, Tensor)
                    current[name] = laid_out_as(key, fresh) if is_of_key else fresh
        _put_back(both)

    def _restore_groups(self) -> None:
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in [name for name in group if name not in saved and name != "params"]:
                del group[name]
            for name, value in saved.items():
                now = group.get(name)
                if isinstance(now, Tensor) and isinstance(value, Tensor):
                    _put_back([(now, value)])
                else:
                    group[name] = _copied(value)


def _tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for number, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{number}.{name}", tensor


def _put_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give each first tensor the values of its second, many with one kernel."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, saved in pairs:
        if tensor.shape != saved.shape or tensor.dtype != saved.dtype:
            tensor.data = saved.clone()
        else:
            into, of = alike.setdefault((tensor.device, saved.device, tensor.dtype), ([], []))
            into.append(tensor)
            of.append(saved)
    with torch.no_grad():
        for into, of in alike.values():
            foreach_copy_(into, of)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return copy.deepcopy(value)


# --- Python state --------------------------------------------------------------------------------------


_BY_PLAN = ("_step_supports_amp_scaling", "_opt_called", "found_inf", "grad_scale")
"""Attributes of an optimizer that depend on the current plan."""


class PythonState(ObjectMemory):
    """Python attributes of modules and the optimizer, and everything that the user's functions can reach, at any depth.

    Parameters, buffers and the optimizer's state are kept elsewhere. So are dropout rates, which are changed on purpose
    and restored by the code that changes them.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: Optimizer | None = None, functions: Iterable[Any] = ()
    ) -> None:
        roots, own = _roots(modules, optimizer, functions), _kept_by_others(modules, optimizer)
        super().__init__(roots, own, _left(modules, optimizer, rates=True))


def changes_of(modules: Sequence[nn.Module], optimizer: Optimizer, functions: Iterable[Any]) -> Changes:
    """The same for checkpoints: the changes from here on."""
    left = _left(modules, optimizer, rates=False)
    return Changes(_roots(modules, optimizer, functions), lambda: _kept_by_others(modules, optimizer), left)


def _roots(modules: Sequence[nn.Module], optimizer: Optimizer | None, functions: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = dict(zip(("model", "loss"), modules, strict=False))
    names = ("loss", "forward", "prepare", "augment")
    found |= {name: one for name, one in zip(names, functions, strict=False) if one is not None}
    return found | ({} if optimizer is None else {"optimizer": optimizer})


def _kept_by_others(modules: Sequence[nn.Module], optimizer: Optimizer | None) -> Iterator[Tensor]:
    yield from tensors_of(modules)
    for group in optimizer.param_groups if optimizer is not None else ():
        yield from group["params"]


def _left(modules: Sequence[nn.Module], optimizer: Optimizer | None, *, rates: bool) -> Left:
    layers = [layer for module in modules for layer in module.modules()] if rates else []
    by_layer = {id(vars(layer)): name for layer in layers if (name := rate_name(layer)) is not None}
    inside = None if optimizer is None else vars(optimizer)

    def is_left(holder: Any, key: Any) -> bool:
        return (holder is inside and key in _BY_PLAN) or by_layer.get(id(holder), _BY_PLAN) == key

    return is_left


def rate_name(layer: nn.Module) -> str | None:
    """The attribute that holds the dropout rate of a torch layer; None if it has none."""
    if isinstance(layer, DropoutBase):
        return "p"
    return "dropout" if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) else None
