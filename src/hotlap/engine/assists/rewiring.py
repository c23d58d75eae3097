"""Layers and losses of torch and `transformers`, rewired for recordings: nothing is read back or copied from the host.

hotlap changes methods of the loaded model only, while a step runs. They are copies of the library's methods in which
some names refer to something else. The library and its other models stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotlap.core.torch_private import CAUSAL_MASK_CHECK
from hotlap.engine.capture.recording import intended_wait, is_recording

PACKAGE = "transformers"
_LOOKING = tuple(f"{PACKAGE}.{name}" for name in ("masking_utils", "modeling_attn_mask_utils", "modeling_utils"))
"""Modules whose functions read masks and inputs, unless they are traced."""
_IGNORED = -100
_P = ParamSpec("_P")
_T = TypeVar("_T")


def rewire(*models: nn.Module) -> Rewired | None:
    """The rewired form of these models, not applied yet; None if there is nothing to change."""
    rewirings: list[_TorchStacks | _Encoders] = [_TorchStacks()]
    if PACKAGE in sys.modules:
        rewirings.append(_Encoders())
    layers = dict.fromkeys(layer for model in models for layer in model.modules())
    methods = [
        (layer, name, types.MethodType(function, layer))
        for rewiring in rewirings
        for layer in layers
        for name, function in rewiring.methods(type(layer)).items()
    ]
    what = tuple(words for rewiring in rewirings for words in rewiring.what)
    return Rewired(methods, what) if methods else None


class Rewired:
    """A model that can be rewired for recordings, and restored, any number of times.

    Its numbers are the same: bit by bit if masks hide something, else to rounding. The library leaves out a mask that
    hides nothing; here it is made, so that fused attention takes another kernel, with other dropout draws. Kept
    positions stay as long as this object, since recordings read them at their addresses.
    """

    def __init__(self, methods: list[tuple[nn.Module, str, types.MethodType]], what: tuple[str, ...]) -> None:
        self._methods = methods
        self.what = what
        """The changes, in words."""

    def apply(self) -> None:
        """Rewire the model."""
        for layer, name, method in self._methods:
            vars(layer).setdefault(name, method)  # the user may have set a method there

    def undo(self) -> None:
        """Restore the model."""
        for layer, name, method in self._methods:
            if vars(layer).get(name) is method:
                del vars(layer)[name]

    def __enter__(self) -> Rewired:
        self.apply()
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def during(self, work: Callable[_P, _T]) -> Callable[_P, _T]:
        """The work, with the model rewired while it runs."""

        @functools.wraps(work)
        def adapted(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self:
                return work(*args, **kwargs)

        return adapted


# Copies of a library's functions in which some names refer to something else; the library stays as it is.


class Rewiring:
    """Copies the functions that a function of one package reaches, if they have to refer to something else.

    A copy runs the same code object with other globals and another closure. Other callers do not see it.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._copies: dict[int, tuple[Any, Any]] = {}

    def instead(self, holder: types.FunctionType, name: str, value: Any) -> Any:
        """The new value for the global `name` of `holder`: by default its own value, copied if needed."""
        return self.of(value)

    def of(self, thing: Any) -> Any:
        """A copy of `thing` with the changes; `thing` itself if nothing that it reaches changes."""
        original = python_of(thing)
        if not isinstance(original, types.FunctionType) or not self.owns(original):
            return thing
        if id(original) not in self._copies:
            # A recursive function reaches its original.
            self._copies[id(original)] = (original, original)
            self._copies[id(original)] = (original, self._copied(original))
        return self._copies[id(original)][1]

    def owns(self, thing: Any) -> bool:
        """Whether a class or function belongs to the package."""
        return str(getattr(thing, "__module__", None)).partition(".")[0] == self._package

    def _copied(self, function: types.FunctionType) -> types.FunctionType:
        known = function.__globals__
        found = {name: self.instead(function, name, known[name]) for name in names_in(function) if name in known}
        changes = {name: value for name, value in found.items() if value is not known[name]}
        cells = tuple(self._copied_cell(cell) for cell in function.__closure__ or ())
        if not changes and all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
            return function
        copy = types.FunctionType(
            function.__code__, {**known, **changes}, function.__name__, function.__defaults__, cells or None
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
        copy.__dict__.update(function.__dict__)
        return copy

    def _copied_cell(self, cell: types.CellType) -> types.CellType:
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            return cell
        copy = self.of(held)
        return cell if copy is held else types.CellType(copy)


def python_of(thing: Any) -> Any:
    """The Python function behind a scripted one; anything else as it is.

    torch keeps it for its compiler, which runs it instead of the scripted one.
    """
    return getattr(thing, "_torchdynamo_inline", thing) if isinstance(thing, torch.jit.ScriptFunction) else thing


def names_in(function: types.FunctionType) -> dict[str, None]:
    """The names of globals and attributes in a function's code, each once."""
    return dict.fromkeys(_names(function.__code__))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def decorated(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """A function and, if it decorates others, those too."""
    yield function
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if isinstance(held, types.FunctionType) and held is not function:
            yield from decorated(held)


class _TorchStacks(Rewiring):
    """torch's stacks of layers, which read every mask to see whether it is causal.

    A layer that gets the mask and no hint computes the same with it.
    """

    def __init__(self) -> None:
        super().__init__("torch")
        self.what: dict[str, None] = {}

    def methods(self, kind: type) -> dict[str, Callable[..., Any]]:
        """The forward pass of a stack, without the read."""
        forward: Any = getattr(kind, "forward", None)
        own = (nn.TransformerEncoder.forward, nn.TransformerDecoder.forward)
        if forward not in own or CAUSAL_MASK_CHECK not in names_in(forward):
            return {}
        self.what["masks are not read back"] = None
        return {"forward": self.of(forward)}

    def instead(self, holder: types.FunctionType, name: str, value: Any) -> Any:
        return _as_hinted if name == CAUSAL_MASK_CHECK else value


def _as_hinted(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether a mask is marked as causal."""
    return bool(is_causal)


class _Encoders(Rewiring):
    """The methods of encoders, without what cannot be recorded."""

    def __init__(self) -> None:
        super().__init__(PACKAGE)
        self._kinds: dict[type, dict[str, Callable[..., Any]]] = {}
        self._positions = _Positions()
        self.what: dict[str, None] = {}

    def methods(self, kind: type) -> dict[str, Callable[..., Any]]:
        """The changed methods that the forward pass of such a layer calls on itself, by name."""
        if kind not in self._kinds:
            theirs = any(map(self.owns, kind.__mro__))
            self._kinds[kind] = dict(self._found(kind)) if theirs else {}
        return self._kinds[kind]

    def _found(self, kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
        for name in _called(kind):
            method = inspect.getattr_static(kind, name, None)
            if isinstance(method, staticmethod) and name == "relative_position_bucket" and _has_bias_by_width(kind):
                self.what["relative positions are kept"] = None
                yield name, self._positions.kept_of_layer(method.__func__)
            elif isinstance(method, types.FunctionType):
                copy = self.of(method)
                if name == "forward" and self.owns(method) and _counts_labels(method):
                    self.what["labels are not counted on the host"] = None
                    copy = _counting_no_labels(copy)
                if copy is not method:
                    yield name, copy

    def instead(self, holder: types.FunctionType, name: str, value: Any) -> Any:
        if holder.__module__ in _LOOKING:
            if name == "is_tracing":
                self.what["masks and padding are not read back"] = None
                return _is_not_to_be_read
            if value is torch and "tensor" in names_in(holder):
                self.what["numbers are not copied from the host"] = None
                return _TorchFilling()
        if type(value).__name__ == "AttentionMaskInterface":
            return self._interface(value)
        copy = super().instead(holder, name, value)
        if isinstance(value, torch.jit.ScriptFunction) and copy is not value:
            self.what["scripted functions run as Python"] = None
        if name == "build_relative_position" and isinstance(python_of(value), types.FunctionType):
            self.what["relative positions are kept"] = None
            return self._positions.kept(copy)
        return copy

    def _interface(self, functions: Any) -> Any:
        """The library's table of functions that make masks, one for each kind of attention."""
        copies = {kind: self.of(function) for kind, function in functions.items()}
        changes = {kind: copy for kind, copy in copies.items() if copy is not functions[kind]}
        if not changes:
            return functions
        table = type(functions)()
        for kind, copy in changes.items():
            table[kind] = copy  # in this table only, as the library does it
        return table


def _has_bias_by_width(kind: type) -> bool:
    """Whether a layer's buckets are distances between its positions, as in MPNet, and not boxes on a page."""
    return hasattr(kind, "compute_position_bias")


def _called(kind: type) -> Iterator[str]:
    """The names of methods that the forward pass of such a layer may call on itself."""
    seen, ahead = {"forward"}, ["forward"]
    while ahead:
        name = ahead.pop()
        own = [vars(base)[name] for base in kind.__mro__ if base is not nn.Module and name in vars(base)]
        if own:
            yield name
        functions = [inner for method in own if isinstance(method, types.FunctionType) for inner in decorated(method)]
        fresh = {name: None for function in functions for name in names_in(function) if name not in seen}
        seen |= fresh.keys()
        ahead += fresh


# --- what stands in for what -------------------------------------------------------------------------


def _is_not_to_be_read(tensor: Any = None) -> bool:
    """Replaces the library's check for tracing, so that it does not read a tensor's values."""
    return tensor is not None


class _TorchFilling:
    """torch, except that a number reaches the device as a kernel argument, not by a copy from the host."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, *, device: Any = None, **settings: Any) -> Tensor:
        """As `torch.tensor`."""
        if type(data) in (int, float, bool) and device is not None:
            return torch.full((), data, device=device, **settings)
        return torch.tensor(data, device=device, **settings)


class _Positions:
    """Relative positions, which depend on sizes alone: computed once for each size, and kept at their address."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def kept(self, build: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`build` for functions of two layers' outputs, which use their last but one size, and plain settings."""

        @functools.wraps(build)
        def kept(*args: Any, **kwargs: Any) -> Tensor:
            settings = tuple(map(_size_of, args)), tuple((name, _size_of(value)) for name, value in kwargs.items())
            return self._given((build, settings), lambda: build(*args, **kwargs))

        return kept

    def kept_of_layer(self, build: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`build` for functions of all distances between positions, kept on the device of the layer's bias."""

        def relative_position_bucket(layer: Any, distances: Tensor, **settings: Any) -> Tensor:
            device = layer.relative_attention_bias.weight.device
            key = (build, tuple(distances.shape), device, tuple(settings.items()))
            return self._given(key, lambda: build(distances, **settings).to(device))

        return relative_position_bucket

    def _given(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key in self._kept:
            return self._kept[key]
        if torch.compiler.is_compiling() or is_recording():
            return make()  # its memory would belong to the recording
        with intended_wait(), torch.inference_mode(False), torch.no_grad():
            self._kept[key] = made = make()
        return made


def _size_of(value: Any) -> Hashable:
    return (value.size(-2), value.device) if isinstance(value, Tensor) else value


def _counts_labels(forward: types.FunctionType) -> bool:
    """Whether a head selects the samples that have a label, so that their number decides shapes."""
    return any({"nonzero", "problem_type"} <= names_in(function).keys() for function in decorated(forward))


def _counting_no_labels(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The head's forward pass with the same loss, the mean over samples whose label is not negative."""

    @functools.wraps(forward)
    def adapted(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return forward(self, *args, **kwargs)
        if self.config.problem_type is not None or self.num_labels == 1 or labels.dim() != 1:
            return forward(self, *args, labels=labels, **kwargs)
        outputs = forward(self, *args, **kwargs)
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        has_label = labels >= 0
        targets = torch.where(has_label, labels, _IGNORED).long()
        total = F.cross_entropy(logits.float(), targets, ignore_index=_IGNORED, reduction="sum")
        loss = total / has_label.sum().clamp(min=1)
        if isinstance(outputs, Mapping):
            return type(outputs)(**{**outputs, "loss": loss})
        return (loss, *outputs)

    return adapted


# ---


# --- losses --------------------------------------------------------------------------------------------


_OWN = F.cross_entropy
_IS_TORCHS = getattr(getattr(_OWN, "__code__", None), "co_filename", None) == F.__file__
"""Whether the function is torch's: a library may have replaced it before hotlap was imported."""


@functools.wraps(_OWN)
def cross_entropy(
    input: Tensor,  # noqa: A002 - as torch calls it
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch's own, but with class weights and smoothed labels it does not search for ignored targets.

    For their mean torch selects the weights of targets that count, and waits for their number. Here ignored targets
    have weight zero. The numbers are the same, bit by bit if no target is ignored, else to rounding.
    """
    waits = (
        weight is not None
        and label_smoothing > 0
        and reduction == "mean"
        and size_average is None
        and reduce is None
        and not target.is_floating_point()
    )
    if not waits:
        return _OWN(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    assert weight is not None
    of_classes = 0 if input.ndim == 1 else 1
    logs = F.log_softmax(input, of_classes)
    plain = F.nll_loss(logs, target, weight, ignore_index=ignore_index)
    ignored = target == ignore_index
    spread = [1] * input.ndim
    spread[of_classes] = weight.shape[0]
    smooth = -(logs * weight.view(spread)).sum(of_classes)
    counted = weight.gather(0, target.masked_fill(ignored, 0).flatten()).masked_fill(ignored.flatten(), 0)
    smooth = smooth.masked_fill(ignored, 0).sum() / counted.sum()
    return (1 - label_smoothing) * plain + smooth * (label_smoothing / input.shape[of_classes])


def replacement_of(own: Callable[..., Any]) -> Callable[..., Any]:
    """The function to call instead of a loss of torch; a user's or library's function stays."""
    return cross_entropy if own is _OWN and _IS_TORCHS else own


def without_waiting(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """The work, with losses of torch that do not wait, however a layer or the user's function calls them."""

    @functools.wraps(work)
    def waiting_for_nothing(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        own: Any = F.cross_entropy
        F.cross_entropy = replacement_of(own)
        try:
            return work(*args, **kwargs)
        finally:
            F.cross_entropy = own

    return waiting_for_nothing
