"""A call of a module in pieces along the batch, computed again in the backward pass, where that keeps its meaning.

The script gets the outputs of all samples, so its loss sees the whole batch. Gradients are those of the whole call, to
rounding. Dropout draws other masks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hotlap.core.errors import TrainingError, first_line
from hotlap.core.torch_private import BatchNormBase
from hotlap.data.order import even_cuts
from hotlap.engine.capture.fingerprint import memory, what_changed
from hotlap.engine.differentiating import gradients
from hotlap.engine.snapshot import Modes, generator_of
from hotlap.script.calls.eager import why_hooked, why_not_changed
from hotlap.script.calls.module_state import ModuleState
from hotlap.script.calls.trees import (
    is_container,
    kind_of,
    leaves,
    map_leaves,
    parts_of,
    unknown_type_in,
    with_leaves,
    write_marks,
)

CLOSE, CLOSE_16 = 5e-3, 5e-2
"""How far the outputs of a sample may lie apart, as a part of the largest, alone and beside another: rounding, also
that of TF32; and in 16 bits."""

MARGIN_BYTES = 2**24
"""Memory that must stay free beside a piece, for what comes and goes between two steps."""

Call = Callable[..., Any]


def batch_of(args: Any, kwargs: Any) -> int:
    """The number of samples in a call: the first dimension of its first tensor that has one, else 0."""
    return next((len(one) for one in leaves((args, kwargs)) if one.ndim), 0)


def in_pieces(module: nn.Module, original: Call, args: Any, kwargs: Any, pieces: int) -> Any:
    """The outputs of a call made in so many pieces. Raises TrainingError if they cannot be joined."""
    total = batch_of(args, kwargs)
    bounds = list(pairwise(even_cuts(total, -(-total // pieces))))
    found = [_piece(module, original, *_rows((args, kwargs), total, slice(a, b))) for a, b in bounds]
    return _joined(found, [b - a for a, b in bounds])


def fits(module: nn.Module, original: Call, args: Any, kwargs: Any, pieces: int, device: torch.device) -> None:
    """Make the forward and backward pass of the first piece, without a trace; raises what it raises.

    Beside it lies as much memory as all outputs take, twice: the script's loss will want that.
    """
    total = batch_of(args, kwargs)
    most = -(-total // pieces)
    with ModuleState(module, device):
        args, kwargs = _rows((args, kwargs), total, slice(0, most))
        outputs = _piece(module, original, args, kwargs)
        beside = MARGIN_BYTES + 2 * pieces * sum(output.nbytes for output in leaves(outputs))
        held = torch.empty(beside, dtype=torch.uint8, device=device)
        rehearse_backward(module, outputs)
        del held


def rehearse_backward(module: nn.Module, outputs: Any, *, retain_graph: bool = False) -> None:
    """Make the backward pass from these outputs with gradients of zero, which touches no `grad`; raises what it raises.

    It makes the gradients that the weights lack; if they lack none, that of the first weight only.
    """
    wanting = [output for output in leaves(outputs) if output.requires_grad]
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    lacking = [weight for weight in weights if not weight.is_leaf or weight.grad is None] or weights[:1]
    if wanting and lacking:
        gradients(wanting, lacking, [torch.zeros_like(output) for output in wanting], retain_graph=retain_graph)


def _piece(module: nn.Module, original: Call, args: Any, kwargs: Any) -> Any:
    """One piece of a call; if it will be differentiated, it keeps its arguments alone and is computed again."""
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    modes = Modes([module])

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return contextlib.nullcontext(), _as_then(module, modes)

    # torch looks for the device, whose random state it keeps, among the arguments that it can see.
    return checkpoint(
        lambda *_: original(*args, **kwargs), *leaves((args, kwargs)), use_reentrant=False, context_fn=contexts
    )


@contextlib.contextmanager
def _as_then(module: nn.Module, modes: Modes) -> Iterator[None]:
    """Inside, layers are in the mode of the forward pass: the script may have called `eval()` since."""
    now = Modes([module])
    modes.restore()
    try:
        yield
    finally:
        now.restore()


# --- where it keeps its meaning --------------------------------------------------------------------------


def why_not_in_pieces(module: nn.Module, original: Call, args: Any, kwargs: Any, device: torch.device) -> str | None:
    """Why a call cannot be made in pieces, or would mean something else; None if it can.

    The first and the last sample go through the module alone and together: their outputs must be the same, and nothing
    may change in the module.
    """
    if (reason := why_not_changed(module)) is not None:
        return reason
    for layer in module.modules():
        if isinstance(layer, BatchNormBase) and (layer.training or layer.running_mean is None):
            return "its batch norms compute over the whole batch"
    if (reason := why_hooked(module)) is not None:
        return reason
    if (kind := unknown_type_in((args, kwargs))) is not None:
        return f"its arguments hold a {kind}"
    if batch_of(args, kwargs) < 2:
        return "its batch is a single sample"
    return _why_dependent(module, original, args, kwargs, device)


def _why_dependent(module: nn.Module, original: Call, args: Any, kwargs: Any, device: torch.device) -> str | None:
    """Why the outputs of a sample depend on the samples beside it, or a call changes the module; None if neither."""
    total = batch_of(args, kwargs)

    def outputs_of(*chosen: int) -> list[Tensor]:
        given = _rows((args, kwargs), total, list(chosen))
        before = write_marks(leaves(given))
        found = leaves(original(*given[0], **given[1]))
        if write_marks(leaves(given)) != before:
            raise TrainingError("it writes to its arguments")
        if any(not one.ndim or len(one) != len(chosen) for one in found):
            raise TrainingError("its outputs hold a tensor without the batch's dimension, such as a loss")
        return found

    def why() -> str | None:
        both, alone = outputs_of(0, -1), (outputs_of(0), outputs_of(-1))
        same = all(
            len(both) == len(outputs)
            and all(_are_close(a[row : row + 1], b) for a, b in zip(both, outputs, strict=True))
            for row, outputs in enumerate(alone)
        )
        return None if same else "its outputs for a sample depend on the samples beside it"

    modes = Modes([module])
    with ModuleState(module, device), torch.no_grad():
        before, marks, drawn = memory([module]), write_marks(module.buffers()), _drawn(device)
        try:
            reason = why()
            if write_marks(module.buffers()) != marks:
                return "it changes its buffers in each call"
            if (changed := what_changed(before, memory([module]))) is not None:
                return changed
            if reason is not None and not torch.equal(_drawn(device), drawn):
                for layer in module.modules():  # dropout, most likely: it has to be compared without
                    layer.training = False
                reason = why()
        except TrainingError as error:
            return str(error)
        except Exception as error:
            return f"it fails with fewer samples: {first_line(error)}"
        finally:
            modes.restore()
        return reason


def _drawn(device: torch.device) -> Tensor:
    return torch.cat([generator_of(one).get_state() for one in {torch.device("cpu"), device}])


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    kind = one.device.type
    is_16 = one.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(kind)
    largest = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=(CLOSE_16 if is_16 else CLOSE) * largest, equal_nan=True)


# --- cutting and joining -----------------------------------------------------------------------------------


def _rows(given: Any, total: int, rows: slice | list[int]) -> Any:
    """Arguments with these rows of all tensors that have the batch's first dimension; others stay whole."""
    return map_leaves(given, lambda one: one[rows] if one.ndim and len(one) == total else one)


def _joined(parts: list[Any], sizes: list[int]) -> Any:
    """The outputs of all pieces as one. Raises TrainingError if they do not go together."""
    columns = [leaves(part) for part in parts]
    first = parts[0]
    fit = all(kind_of(part) == kind_of(first) and _values(part) == _values(first) for part in parts)
    if not fit or len({len(column) for column in columns}) > 1:
        raise TrainingError("its pieces give outputs of different kinds")
    for column, size in zip(columns, sizes, strict=True):
        if any(not one.ndim or len(one) != size for one in column):
            raise TrainingError("its outputs hold a tensor without the batch's dimension, such as a loss")
    if len({tuple(one.shape[1:] for one in column) for column in columns}) > 1:
        raise TrainingError("its pieces give outputs of different sizes")
    return with_leaves(first, columns[0], [torch.cat(column) for column in zip(*columns, strict=True)])


def _values(tree: Any) -> list[Any]:
    """All that is neither tensor nor container."""
    if isinstance(tree, Tensor):
        return []
    return [value for _, part in parts_of(tree) for value in _values(part)] if is_container(tree) else [tree]
