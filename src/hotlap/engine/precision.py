"""The number formats of a step: autocast for forward passes, and process-wide switches around the step."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from hotlap import machine
from hotlap.core.plan import Execution, Numerics
from hotlap.core.torch_private import get_mkldnn_enabled, set_mkldnn_enabled
from hotlap.core.tricks import ATTENTION_MASKS
from hotlap.core.warning_filters import filtered
from hotlap.engine.assists.attention import GoodMasks, WithoutPoorMasks
from hotlap.engine.capture.fingerprint import INSIDE
from hotlap.engine.depthwise import compile_kernels, depthwise_directly, depthwise_kinds
from hotlap.engine.layout import why_not_channels_last
from hotlap.machine.tf32 import Tf32

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What autocast computes in, by precision."""
_NARROW = frozenset(AUTOCAST.values())
_CONTAINERS = frozenset((list, dict, OrderedDict, deque))
_LAYERS_STAY = 64
"""Calls after which hotlap looks for new layers."""
_LOOKED_AT = 64
"""Entries of a container that are checked, the last ones: earlier entries were checked when they were new."""
_DEPTH = 3
"""Depth of nested containers that is checked."""


def precision_context(
    numerics: Numerics, device: torch.device, modules: Sequence[nn.Module]
) -> Callable[[], AbstractContextManager[Any]]:
    """A factory of the context in which forward passes of these modules run.

    Tensors that a module keeps between calls, such as the state of an LSTM, get their own dtype back at the end.
    Otherwise the next call in another precision would raise.
    """
    dtype = AUTOCAST.get(numerics.precision)
    is_direct = numerics.depthwise == "direct" and depthwise_kinds(modules) > 0
    convolving = depthwise_directly if is_direct else nullcontext
    if is_direct and dtype is not None and numerics.layout == "channels_last" and device.type == "cuda":
        compile_kernels(modules, device, dtype)
    if dtype is None:  # TF32 is a switch of the process, set around the whole step
        return convolving
    kept = _KeptTensors(modules)

    @contextmanager
    def cast() -> Iterator[None]:
        kept.look()
        try:
            with torch.autocast(device.type, dtype=dtype), convolving():
                yield
        finally:
            kept.widen()

    return cast


class _KeptTensors:
    """The tensors that modules keep in their attributes and buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # Weights of 16 bits have states of 16 bits anyway.
        narrow = any(parameter.dtype in _NARROW for module in modules for parameter in module.parameters())
        self._modules = [] if narrow else modules
        self._layers: list[nn.Module] = []
        self._calls = 0
        self._narrow: set[tuple[nn.Module, str]] = set()

    def look(self) -> None:
        """Before a call: look for new layers now and then. What layers keep in 16 bits from the beginning stays so."""
        if self._calls % _LAYERS_STAY == 0:
            self._layers = [layer for module in self._modules for layer in module.modules() if _may_keep(layer)]
        if not self._calls:
            self._narrow = {(layer, name) for layer, _, name, value in self._places() if _is_narrow(value)}
        self._calls += 1

    def widen(self) -> None:
        """Give everything else in 16 bits the dtype that it has without autocast."""
        for layer, holder, name, value in self._places():
            if _is_narrow(value) and (layer, name) not in self._narrow:
                holder[name] = _widened(value)

    def _places(self) -> list[tuple[nn.Module, dict[str, Any], str, Any]]:
        """Everything that may hold tensors: the layer, the dict that holds it, the name there, and the value."""
        found = []
        for layer in self._layers:
            inside = layer.__dict__
            for name, value in inside.items():
                if name not in INSIDE and (type(value) in _CONTAINERS or isinstance(value, (Tensor, tuple))):
                    found.append((layer, inside, name, value))
            if inside["_buffers"]:
                held = inside["_buffers"]
                found += [(layer, held, name, buffer) for name, buffer in held.items() if buffer is not None]
        return found


def _may_keep(layer: nn.Module) -> bool:
    """Whether user code runs in a layer; it may keep what it sees."""
    inside = layer.__dict__
    return not type(layer).__module__.startswith("torch.") or bool(inside["_forward_hooks"]) or "forward" in inside


def _is_narrow(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return value.dtype in _NARROW
    if depth == _DEPTH or not (isinstance(value, tuple) or type(value) in _CONTAINERS):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return any(_is_narrow(part, depth + 1) for part in islice(reversed(parts), _LOOKED_AT))


def _widened(value: Any, depth: int = 0) -> Any:
    """The value with its tensors in 32 bits. Containers are changed in place, since the user may hold them too."""
    if not _is_narrow(value, depth):
        return value
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, tuple):
        parts = [_widened(part, depth + 1) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for place, part in list(entries)[-_LOOKED_AT:]:
        value[place] = _widened(part, depth + 1)
    return value


class Switches:
    """The process-wide switches that a plan asks for. They are set inside and restored afterwards.

    - TF32, if the precision is `tf32`.

    - cuDNN's timing of convolutions, if the plan autotunes them.

    - Good dropout masks for attention in 16 bits, which torch would leave to another kernel than in 32.

    - No oneDNN, if a CPU has no instructions for `bf16`: torch would try it, warn, and do without it from then on.

    Everything else stays as the user has it. The switches can be entered again, also while they are set. They are False
    if there is nothing to switch, so that a step can leave them out.
    """

    def __init__(self, numerics: Numerics, execution: Execution, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._tf32 = Tf32() if numerics.precision == "tf32" and on_gpu else None
        self._autotune = execution.autotune and on_gpu
        self._masks: AbstractContextManager[Any] | None = None
        if on_gpu and numerics.precision in AUTOCAST and ATTENTION_MASKS not in execution.without:
            # torch's compiler would trace the function that checks calls, so the kernel is switched off altogether.
            self._masks = GoodMasks() if execution.compile == "no" else WithoutPoorMasks()
        self._without_onednn = not on_gpu and numerics.precision == "bf16" and _is_emulated("bf16", device)
        self._before: list[bool] = []

    def __bool__(self) -> bool:
        return self._tf32 is not None or self._autotune or self._masks is not None or self._without_onednn

    def __enter__(self) -> None:
        if self._tf32 is not None:
            self._tf32.__enter__()
        if self._autotune:
            self._before.append(torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = True
        if self._masks is not None:
            self._masks.__enter__()
        if self._without_onednn:
            self._before.append(get_mkldnn_enabled())
            set_mkldnn_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self._without_onednn:
            set_mkldnn_enabled(self._before.pop())
        if self._masks is not None:
            self._masks.__exit__(None, None, None)
        if self._autotune:
            torch.backends.cudnn.benchmark = self._before.pop()
        if self._tf32 is not None:
            self._tf32.__exit__()


def why_not_numerics(numerics: Numerics, modules: Sequence[nn.Module], device: torch.device) -> str | None:
    """Why these modules cannot be trained in these numerics on this device; None where they can.

    It leaves the optimizer out, which decides for itself.
    """
    reason = why_not_precision(numerics.precision, device) if numerics.precision != "fp32" else None
    if reason is None and numerics.layout == "channels_last":
        reason = why_not_channels_last(modules)
    return reason


def why_not_precision(precision: str, device: torch.device) -> str | None:
    """Why training on this device cannot use this precision, or None where it can."""
    fact = machine.dtype_fact(device, precision)
    # A CPU without these instructions still trains in bf16 or fp16, slowly. On a GPU nobody wants that.
    here = _is_emulated(precision, device) and device.type == "cpu" and machine.detect().pretended is None
    if fact.support is not machine.Support.HARDWARE and not here:
        return f"{precision} is {fact.support} on this {device.type}: {fact.reason}"
    if precision in AUTOCAST and not _autocasts(device.type, AUTOCAST[precision]):
        return f"torch {torch.__version__} has no autocast to {precision} on {device.type}"
    return None


def _is_emulated(precision: str, device: torch.device) -> bool:
    return machine.dtype_fact(device, precision).support is machine.Support.EMULATED


@cache
def _autocasts(kind: str, dtype: torch.dtype) -> bool:
    """Whether autocast computes in this dtype. Where it cannot, torch only warns and computes in fp32."""
    with filtered(), torch.autocast(kind, dtype=dtype):
        ones = torch.ones(2, 2, device=kind)
        return (ones @ ones).dtype is dtype
