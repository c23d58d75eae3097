"""What one training step does, counted while it runs: operations, arithmetic, and the memory that they touch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hotlap.core.terminal import logger
from hotlap.core.torch_private import (
    TorchDispatchMode,
    aten_flash_attention,
    aten_flash_attention_backward,
    tree_leaves,
)

log = logger(__name__)

# Names without the overload. Allocations, and notes for torch's allocator and profiler, are no work.
_IDLE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream"})
_IDLE_NAMESPACES = frozenset({"profiler", "prim"})
# These overwrite without reading.
_OVERWRITES = frozenset(
    {"zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_", "_foreach_zero_", "_foreach_copy_"}
)
# These touch some rows of their first tensor, which may hold all data of a training.
_ROWS = frozenset(
    {
        "embedding", "_embedding_bag", "index", "index_select", "gather", "take",
        "index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_",
    }
)  # fmt: skip
# For these the host waits for the device, to learn a number or a size. `.item()` is the first of them.
_WAITS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"})
_COPIES = frozenset({"copy_", "_to_copy"})


@dataclass(frozen=True, kw_only=True)
class Census:
    """What a step did on its training device."""

    operations: int
    """Operations that write something; views and allocations do not count."""
    flops: int
    """Floating-point operations of products, convolutions, attention and recurrent layers."""
    bytes: int
    """Bytes read and written, counted for each operation separately. It is more than reaches the memory, since caches
    save some."""
    waits: int = 0
    """How often the host waited for the device: `.item()`, `.cpu()`, shapes that depend on numbers."""


def census(run: Callable[[], object]) -> Census:
    """Run a step once, backward pass included, and count what it does. Its numbers are those of any other step.

    Run it eagerly, after a step that made the optimizer's state: a replay shows nothing, and compiled code runs
    uncompiled. Takes up to a tenth of a millisecond per operation.
    """
    with Counting() as counting:
        run()
    # A training on a GPU keeps some numbers on the host, such as the optimizer's step count.
    kinds = sorted(counting.tallies, key=lambda kind: kind == "cpu")
    operations, flops, touched = counting.tallies[kinds[0]] if kinds else (0, 0, 0)
    return Census(operations=operations, flops=flops, bytes=touched, waits=counting.waits)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation that ran, and what it did."""

    name: str
    kind: str
    """Of device."""
    runs: int
    """How often the device runs it: on a CPU, an operation on a list runs once for each tensor."""
    steps: int
    """Time steps that it works through one after the other; 1 but for recurrent layers."""
    flops: int
    bytes: int
    dtype: torch.dtype | None
    """Of its numbers; None if it has none."""


class Counting(TorchDispatchMode):
    """Sees every operation below autograd. torch applies it in the threads of a backward pass too."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tallies: dict[str, list[int]] = {}
        """For each kind of device: operations, flops, bytes."""
        self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        try:
            self._count(func, args, kwargs, out)
        except Exception as error:  # an unknown kind of tensor must not stop a training
            log.debug("%s is not counted: %s", func, error)
        return out

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        traits = _traits(func)
        if traits.idle:
            return
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = list(_dense(leaves))
        self.waits += makes_the_host_wait(traits.name, given, kwargs, out)
        changed, overwritten = traits.written(args, kwargs)
        old = {_place(tensor) for tensor in given}
        fresh = [tensor for tensor in _dense(tree_leaves(out)) if _place(tensor) not in old]
        written = [*_dense(tree_leaves((changed, overwritten))), *fresh]
        kind = next((tensor.device.type for tensor in (*written, *given) if tensor.device.type != "cpu"), "cpu")
        if not any(tensor.numel() for tensor in written):
            return
        unread = {id(tensor) for tensor in tree_leaves(overwritten)}
        read = [tensor for tensor in given if id(tensor) not in unread]
        if given and (traits.rows or any(leaf.is_sparse for leaf in leaves)):
            read, written = _without(given[0], read), _without(given[0], written)
            rows = min(_volume(given[:1], kind), max(_volume(written, kind), _volume(read, kind)))
            touched = rows * (2 if changed else 1)
        else:
            touched = 0
        numbers = next((one for one in (*written, *given) if one.is_floating_point()), None)
        self.add(
            Operation(
                name=traits.name,
                kind=kind,
                runs=len(args[0]) if traits.foreach and kind == "cpu" else 1,
                steps=_STEPS[traits.name](*args) if traits.name in _STEPS else 1,
                flops=_flops(func, traits, args, kwargs, out),
                bytes=touched + _volume(read, kind) + _volume(written, kind),
                dtype=None if numbers is None else numbers.dtype,
            )
        )

    def add(self, seen: Operation) -> None:
        """Count an operation."""
        tally = self.tallies.setdefault(seen.kind, [0, 0, 0])
        for place, count in enumerate((seen.runs, seen.flops, seen.bytes)):
            tally[place] += count


@dataclass(frozen=True)
class _Traits:
    """What an operation's schema shows about it."""

    name: str
    names: tuple[str, ...]
    changes: tuple[int, ...]
    """Which arguments it writes to."""
    outs: tuple[int, ...]
    """Those of them that it does not read."""
    idle: bool

    @property
    def foreach(self) -> bool:
        return self.name.startswith("_foreach_")

    @property
    def rows(self) -> bool:
        return self.name in _ROWS

    def causal(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return "is_causal" in self.names and bool(self.argument(self.names.index("is_causal"), args, kwargs))

    def argument(self, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return args[number] if number < len(args) else kwargs.get(self.names[number])

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Arguments that are changed in place, and arguments that are overwritten."""
        changed = [self.argument(n, args, kwargs) for n in self.changes if n not in self.outs]
        return changed, [self.argument(n, args, kwargs) for n in self.outs]


@cache
def _traits(func: Any) -> _Traits:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operation holds others and counts as one
        return _Traits(str(func), (), (), (), False)
    space, _, name = schema.name.partition("::")
    changes = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    outs = [n for n in changes if schema.arguments[n].is_out or name in _OVERWRITES]
    reshapes = torch.Tag.inplace_view in func.tags
    return _Traits(
        name=name,
        names=tuple(argument.name for argument in schema.arguments),
        changes=tuple(changes),
        outs=tuple(outs),
        idle=name in _IDLE or space in _IDLE_NAMESPACES or reshapes,
    )


def _dense(leaves: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that hold numbers; for a sparse one its indices and values."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.layout == torch.strided:
                yield leaf
            elif leaf.layout == torch.sparse_coo:
                yield from (leaf._indices(), leaf._values())


def makes_the_host_wait(name: str, given: Sequence[Tensor], kwargs: Mapping[str, Any], out: Any) -> bool:
    if all(tensor.device.type in ("cpu", "meta") for tensor in given):
        return False
    if name in _COPIES:
        return isinstance(out, Tensor) and out.device.type == "cpu" and not kwargs.get("non_blocking")
    return name in _WAITS


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _without(table: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if _place(tensor) != _place(table)]


def _volume(tensors: Iterable[Tensor], kind: str) -> int:
    """Bytes on this kind of device that the tensors occupy. Memory that is expanded, shared or passed twice counts
    once."""
    held: dict[int, list[int]] = {}
    for tensor in tensors:
        if tensor.device.type == kind:
            row = held.setdefault(_place(tensor), [0, tensor.untyped_storage().nbytes()])
            row[0] += tensor.numel() * tensor.element_size()
    return sum(map(min, held.values()))


# ---
# The floating-point operations of one operation: torch's own formulas, and those that torch lacks or gets wrong.


def _flops(func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations; 0 if a formula does not know the shapes."""
    try:
        flops = flops_of(func, traits.name, args, kwargs, out)
    except Exception as error:
        log.debug("the arithmetic of %s is not counted: %s", func, error)
        return 0
    # Causal kernels skip what a position must not see.
    return flops // 2 if traits.causal(args, kwargs) else flops


def flops_of(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations with these arguments; 0 for operations bound by memory, such as sums and activations.

    A multiplication and an addition count as two. Raises what a formula raises for unknown shapes.
    """
    if name in _OWN:
        return _OWN[name](*args)
    formula = flop_registry.get(getattr(func, "_overloadpacket", func))
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """As many as the forward pass for each of the two gradients. torch's formula ignores groups."""
    transposed, wanted = rest[4], rest[7]
    places = prod((x if transposed else grad).shape[2:])
    return 2 * x.shape[0] * places * weight.numel() * (bool(wanted[0]) + bool(wanted[1]))


def _recurrent(x: Tensor, *weights: Tensor) -> int:
    """Every matrix is applied to every step of every sequence. Padded batches have three dimensions, packed ones
    two."""
    return 2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


_ATTENTION = flop_registry.get(aten_flash_attention, aten_flash_attention)
_ATTENTION_BACKWARD = flop_registry.get(aten_flash_attention_backward, aten_flash_attention_backward)
_OWN: dict[str, Callable[..., int]] = {
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": lambda *args: _recurrent(args[0], *args[1]),
    # The gradient of the input is always computed, that of the weights if the mask asks for it.
    "_cudnn_rnn_backward": lambda *args: _recurrent(args[0], *args[1]) * (1 + bool(args[21][3])),
    "mkldnn_rnn_layer": lambda *args: _recurrent(*args[:3]),
    "mkldnn_rnn_layer_backward": lambda *args: 2 * _recurrent(*args[:3]),
    "_scaled_dot_product_flash_attention_for_cpu": lambda *args: int(_ATTENTION(*args[:3])),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda *args: int(_ATTENTION_BACKWARD(*args[:4])),
}


def _cudnn_steps(
    x: Tensor, weights: Sequence[Tensor], stride: int, batch_first: bool, batch_sizes: Sequence[int]
) -> int:
    """Steps of all layers and directions. Packed batches name the samples of each step."""
    return (len(batch_sizes) or x.shape[1 if batch_first else 0]) * (len(weights) // stride)


_STEPS: dict[str, Callable[..., int]] = {
    "mkldnn_rnn_layer": lambda *args: int(args[0].shape[0]),
    "mkldnn_rnn_layer_backward": lambda *args: int(args[0].shape[0]),
    "_cudnn_rnn": lambda *args: _cudnn_steps(args[0], args[1], args[2], args[10], args[14]),
    "_cudnn_rnn_backward": lambda *args: _cudnn_steps(args[0], args[1], args[2], args[14], args[18]),
}
