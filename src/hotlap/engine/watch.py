"""Looking on while a step runs eagerly: what in it a capture would get wrong, and at which line."""

from __future__ import annotations

import inspect
import sys
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hotlap.data.order import HostRandomness

_WAITED = "called a synchronizing CUDA operation"
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_RATES = str(Path(__file__).with_name("rates.py"))
_OURS = ("", -1)
_INSIDE = frozenset(nn.Module().__dict__)
_PLAIN = (int, float, bool, str, type(None))


class Watch:
    """Inside, notes whatever cannot be replayed; `reason` says it afterwards, or None.

    A replay repeats kernels and nothing else. So these would be frozen into it, or break it: a value read back from
    the device, a draw from the host's randomness, and what a module remembers in Python. Nothing is changed by
    looking; it costs some microseconds per layer.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules, self._on_gpu = modules, device.type == "cuda"
        self.reason: str | None = None
        self._open: list[HostRandomness] = []

    def __enter__(self) -> Watch:
        self._before = HostRandomness()
        self._memory = _memory(self._modules)
        self._hooks = [register_module_forward_pre_hook(self._enters), register_module_forward_hook(self._leaves)]
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_WAITED)
        self._shown = warnings.showwarning
        warnings.showwarning = self._hears
        if self._on_gpu:
            self._mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode(self._mode)
        self._caught.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        if self.reason is None and kind is None:
            if not self._before.same_as(HostRandomness()):
                self.reason = "the loss, or a function on batches, draws from the host's randomness"
            else:
                self.reason = _what_changed(self._memory, _memory(self._modules))

    def _hears(self, message: Any, category: Any, *rest: Any, **more: Any) -> None:
        if _WAITED not in str(message):
            self._shown(message, category, *rest, **more)
        elif self.reason is None:
            line = _users_line()
            if line != _OURS:
                self.reason = f"a value is read back from the device{_at(line)}"

    def _enters(self, module: nn.Module, _: Any) -> None:
        self._open.append(HostRandomness())

    def _leaves(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._open and not self._open.pop().same_as(HostRandomness()) and self.reason is None:
            self.reason = f"{type(module).__name__} draws from the host's randomness{_at(_forward_line(module))}"


def why_recording_failed(error: BaseException) -> str:
    """What an error while recording says, and at which line of the user's it happened."""
    text = str(error).strip().splitlines()
    told = text[0] if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    line = next(((f.filename, f.lineno or 0) for f in reversed(frames) if not f.filename.startswith(_OWN)), None)
    return f"{told}{_at(line)}"


def fingerprint(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """What a capture is made for: layers, modes, plain settings such as a dropout rate, parameters and their places."""
    found: list[Any] = []
    for module in modules:
        _print(module, found)
    return tuple(found)


def _print(module: nn.Module, found: list[Any]) -> None:
    inside = module.__dict__
    found.append(id(module))
    found += [value for value in inside.values() if type(value) in _PLAIN]
    for parameter in inside["_parameters"].values():
        if parameter is not None:
            found += (parameter.data_ptr(), parameter.requires_grad)
    found += [buffer.data_ptr() for buffer in inside["_buffers"].values() if buffer is not None]
    # Hooks are Python, which a replay leaves out: one that comes or goes makes another step.
    found += (len(inside["_forward_hooks"]), len(inside["_forward_pre_hooks"]), len(inside["_backward_hooks"]))
    for child in inside["_modules"].values():
        if child is not None:
            _print(child, found)


def _memory(modules: Sequence[nn.Module]) -> dict[tuple[str, str], Any]:
    """What modules remember in Python: plain values, which tensors they hold, how long their lists are."""
    found: dict[tuple[str, str], Any] = {}
    for module in modules:
        for name, layer in module.named_modules():
            owner = f"{type(layer).__name__} {name}".strip()
            for attribute, value in layer.__dict__.items():
                if attribute not in _INSIDE or attribute == "training":
                    found[owner, attribute] = _remembered(value)
            for attribute, buffer in layer._buffers.items():
                found[owner, attribute] = id(buffer)
    return found


def _remembered(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple, dict, set)):
        return len(value)
    return id(value) if isinstance(value, Tensor) else None


def _what_changed(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> str | None:
    for (owner, attribute), value in after.items():
        if (owner, attribute) not in before or before[owner, attribute] != value:
            return f"{owner} changes its attribute {attribute!r} in every step"
    return None


def _users_line() -> tuple[str, int] | None:
    """The innermost line of the user's; `_OURS` for a wait in hotlap's own books, which are not recorded."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _RATES:
            return _OURS
        if not frame.f_code.co_filename.startswith(_OWN) and not frame.f_code.co_filename.endswith("warnings.py"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _forward_line(module: nn.Module) -> tuple[str, int] | None:
    try:
        return inspect.getsourcefile(type(module)) or "", inspect.getsourcelines(type(module).forward)[1]
    except (OSError, TypeError):
        return None


def _at(line: tuple[str, int] | None) -> str:
    return f" ({Path(line[0]).name}:{line[1]})" if line else ""
