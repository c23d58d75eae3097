"""Weights cast together, and their gradients computed on a second stream: for steps that are recorded.

Under autocast a separate kernel casts each weight, and another casts its gradient back. Here one kernel casts a group
of weights, and one their gradients. The layers before a linear layer wait only for the gradient of its input. So the
gradient of its weights is computed on a second stream. Every number comes from the same operation as otherwise, and is
the same bit by bit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotlap.core.torch_private import aten_unsafe_view, foreach_copy_, function_mode_count
from hotlap.core.turns import turn
from hotlap.engine.capture.recording import another_stream, is_observed, is_recording

GROUP_BYTES = 64 * 2**20
"""Bytes of weights that are cast at once. Their gradients in 16 bits stay until the last of them is there."""
MOST_BEHIND = 16
"""Layers whose gradients may be in progress on the second stream. Their inputs stay in memory until then."""
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
Room = Callable[[Tensor], Tensor]


class Overlap:
    """Inside `with`, `F.linear` and convolutions take weights that were cast together.

    A step must call `backward` for its gradients. A weight takes part from the pass after it was first seen. Until
    then, and in unusual cases, torch computes as always. `dtype` is what autocast computes in. If it is None, only the
    second stream is left to gain from.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype | None, *, overlaps: bool = True, casts_together: bool = True
    ) -> None:
        """Without `overlaps` there is no second stream; without `casts_together` each weight is cast separately."""
        number = torch.cuda.current_device() if device.type == "cuda" else None
        self._device = device if number is None or device.index is not None else torch.device("cuda", number)
        self._dtype = dtype
        self._stream = _second_stream(self._device) if device.type == "cuda" and overlaps else None
        self._group_bytes = GROUP_BYTES if casts_together else 0
        self._groups: list[list[Tensor]] = []
        self._group_of: dict[int, int] = {}
        self._new: set[int] = set()
        self._ready: dict[int, Tensor] = {}
        self._uses: Counter[int] = Counter()
        self._behind: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self._is_forked = self._is_last = False
        self._room: Room | None = None
        self._alone: dict[int, bool] = {}
        """Whether all of a weight's gradient is computed here."""
        self._given: list[tuple[Tensor, Tensor, int]] = []
        self._patched: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._patch("linear", self._linear)
        if self._dtype is not None:
            for name in _CONVOLUTIONS:
                self._patch(name, self._convolution)

    def __exit__(self, *_: object) -> None:
        for name, original in self._patched.items():
            setattr(F, name, original)
        self._patched.clear()
        self._release()

    def forget(self) -> None:
        """Forget all weights."""
        self._groups.clear()
        self._group_of.clear()
        self._alone.clear()
        self._release()

    @contextmanager
    def leaving(self, room: Room | None) -> Iterator[None]:
        """Inside, gradients are written to the buffer that `room` returns for a parameter."""
        before, self._room = self._room, room
        try:
            yield
        finally:
            self._room = before

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss. All of them are ready for what comes next on the stream."""
        self._is_last = True
        try:
            torch.autograd.backward(loss)
            self._check_later_gradients()
        finally:
            self._is_last = False
            self._join()
            self._release()

    # --- weights ---------------------------------------------------------------------------------------

    def _patch(self, name: str, made: Callable[[Any], Any]) -> None:
        # If user code or a library has replaced the function, keep that.
        if vars(F)[name] is _TORCHS_OWN[name]:
            self._patched[name] = _TORCHS_OWN[name]
            setattr(F, name, made(_TORCHS_OWN[name]))

    def _linear(self, original: Any) -> Any:
        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 -- torch's name
            made: Tensor
            if not (self._is_ordinary_call(input) and input.dim() > 1 and self._are_grouped(weight, bias)):
                made = original(input, weight, bias)
                return made
            given = input if self._dtype is None else input.to(self._dtype)
            made = _Linear.apply(self, (id(weight), id(bias)), given, *self._cast(weight, bias))  # type: ignore[no-untyped-call]
            return made

        return linear

    def _convolution(self, original: Any) -> Any:
        def convolution(
            input: Tensor,  # noqa: A002 -- torch's name
            weight: Tensor,
            bias: Tensor | None = None,
            *more: Any,
            **named: Any,
        ) -> Tensor:
            if self._is_ordinary_call(input) and self._are_grouped(weight, bias):
                weight, bias = self._cast(weight, bias)
            made: Tensor = original(input, weight, bias, *more, **named)
            return made

        return convolution

    def _is_ordinary_call(self, x: Tensor) -> bool:
        """Whether a call is ordinary: nothing observes it, and nothing of it will be computed again."""
        if type(x) not in (Tensor, nn.Parameter) or x.device != self._device or not torch.is_grad_enabled():
            return False
        kind = self._device.type
        casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if casts != self._dtype or x.dtype not in (torch.float32, self._dtype):
            return False
        if casts is not None and x.is_leaf and x.requires_grad:  # autocast casts it once for all its uses
            return False
        if torch.compiler.is_compiling() or function_mode_count():
            return False
        return not is_observed()

    def _are_grouped(self, *weights: Tensor | None) -> bool:
        """Whether all of them are in groups; from the next pass on they are."""
        there = [weight for weight in weights if weight is not None]
        if not all(map(_is_usual, there)):
            return False
        # Weights of a pass that saw a new one stay torch's to its end: one of the two must add up a shared weight's
        # uses, in its order.
        is_known = all(id(weight) in self._group_of and id(weight) not in self._new for weight in there)
        if not is_known and not is_recording():
            for weight in there:
                self._add_to_group(weight)
        # A group that has grown since it was cast is cast in its new size at the next pass.
        return is_known and all(id(w) in self._ready or self._group_is_fresh(w) for w in there)

    def _add_to_group(self, weight: Tensor) -> None:
        if id(weight) in self._group_of:
            return
        if not self._groups or sum(one.nbytes for one in self._groups[-1]) + weight.nbytes > self._group_bytes:
            self._groups.append([])
        self._groups[-1].append(weight)
        self._group_of[id(weight)] = len(self._groups) - 1
        self._new.add(id(weight))

    def _group_is_fresh(self, weight: Tensor) -> bool:
        return not any(id(one) in self._ready for one in self._groups[self._group_of[id(weight)]])

    def _cast(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        for one in (weight, bias):
            if one is None:
                continue
            self._uses[id(one)] += 1
            if id(one) not in self._ready:
                group = self._groups[self._group_of[id(one)]]
                made = _Weights.apply(self, *group)  # type: ignore[no-untyped-call]
                self._ready.update(zip(map(id, group), made, strict=True))
        return self._ready[id(weight)], None if bias is None else self._ready[id(bias)]

    def cast(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The weights of a group as operations take them."""
        if self._dtype is None:
            return tuple(weight.detach() for weight in weights)
        made = [torch.empty_like(weight, dtype=self._dtype) for weight in weights]
        foreach_copy_(made, list(weights))
        return tuple(made)

    # --- gradients -------------------------------------------------------------------------------------

    def may_overlap(self, weights: tuple[int, ...]) -> bool:
        """Whether weights' gradients may be computed on the second stream: nothing reads them before all are ready."""
        if torch.is_grad_enabled():  # a gradient that is part of the loss, which then depends on the weights once more
            self._uses.update(weights)
            return False
        if self._stream is None or not self._is_last:
            return False
        return all(self._uses[weight] <= 1 for weight in weights)  # otherwise torch adds up the gradients of all uses

    @contextmanager
    def on_second_stream(self, *read: Tensor) -> Iterator[None]:
        """Inside, work runs on the second stream, after everything on this one. The tensors that it reads are kept
        until then."""
        assert self._stream is not None
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        self._is_forked = True
        with torch.cuda.stream(self._stream):
            yield
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._behind.append((done, read))
        if len(self._behind) > MOST_BEHIND:
            # Release the tensors after the wait, not before.
            oldest = self._behind.popleft()
            here.wait_event(oldest[0])

    def gradients_for_autograd(self, weights: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What torch has to add to the weights' gradients: nothing, if they are added here."""
        if torch.is_grad_enabled() or not self._is_last:
            return [None if grad is None else grad.to(w.dtype) for w, grad in zip(weights, grads, strict=True)]
        there = [(weight, grad) for weight, grad in zip(weights, grads, strict=True) if grad is not None]
        if not there:
            return [None] * len(weights)
        with self.on_second_stream(*(grad for _, grad in there)) if self._stream is not None else nullcontext():
            for (weight, _), grad in zip(there, self._cast_back(there), strict=True):
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
                self._given.append((weight, weight.grad, weight.grad._version))
        # If a weight is used elsewhere too, torch adds another gradient to this one, on the other stream. Eager passes
        # show such uses before anything is recorded.
        if not (is_recording() and all(self._alone.get(id(weight)) for weight, _ in there)):
            self._join()
        return [None] * len(weights)

    def _cast_back(self, there: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        grads = [grad for _, grad in there]
        if self._dtype is None and self._room is None:
            return grads
        made = [
            torch.empty_like(weight) if self._room is None or weight.grad is not None else self._room(weight)
            for weight, _ in there
        ]
        foreach_copy_(made, grads)
        return made

    def _check_later_gradients(self) -> None:
        """Find the weights that got more gradients after those that were computed here."""
        for weight, grad, version in self._given:
            is_alone = weight.grad is grad and grad._version == version
            if is_recording() and self._alone.get(id(weight)) and not is_alone:
                raise RuntimeError("a weight has another use, which earlier updates did not show")
            self._alone[id(weight)] = is_alone and self._alone.get(id(weight), True)

    def _join(self) -> None:
        if self._is_forked:
            assert self._stream is not None
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._is_forked = False

    def _release(self) -> None:
        self._behind.clear()
        self._given.clear()
        self._ready.clear()
        self._new.clear()
        self._uses.clear()
        self._is_forked = False


class _Weights(torch.autograd.Function):
    """Casts a group of weights, and casts their gradients back."""

    @staticmethod
    def forward(ctx: Any, overlap: Overlap, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.overlap, ctx.weights = overlap, weights
        ctx.set_materialize_grads(False)
        return overlap.cast(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.overlap.gradients_for_autograd(ctx.weights, grads))


class _Linear(torch.autograd.Function):
    """A linear layer whose weights' gradients may be computed beside the gradient of its input."""

    @staticmethod
    def forward(
        ctx: Any, overlap: Overlap, keys: tuple[int, int], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.overlap, ctx.keys = overlap, keys
        ctx.save_for_backward(x, weight)
        made: Tensor = _TORCHS_OWN["linear"](x, weight, bias)
        # torch does not allow in-place changes of a view that was made in here.
        return aten_unsafe_view(made, made.shape) if made._is_view() else made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])

        def of_weights() -> tuple[Tensor | None, Tensor | None]:
            of_weight = rows.t().mm(x.reshape(-1, x.shape[-1])) if wants_weight else None
            return of_weight, rows.sum(0) if wants_bias else None

        if ctx.overlap.may_overlap(ctx.keys):
            with ctx.overlap.on_second_stream(rows, x):
                of_weight, of_bias = of_weights()
        else:
            of_weight, of_bias = of_weights()
        of_x = rows.mm(weight).view(x.shape) if wants_x else None
        return None, None, of_x, of_weight, of_bias


def _is_usual(weight: Tensor) -> bool:
    """Whether a weight is an ordinary trained parameter without hooks on its gradient."""
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.dtype is torch.float32
        and weight.layout is torch.strided
        and not weight._backward_hooks
        and not getattr(weight, "_post_accumulate_grad_hooks", None)
    )


def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return _stream_beside(device, None if turn.get() is None else torch.cuda.current_stream(device).cuda_stream)


@cache
def _stream_beside(device: torch.device, own: int | None) -> torch.cuda.Stream:
    # One for the process, since cuBLAS keeps memory for each stream that it has used. Recordings that are replayed at
    # the same time must not share that memory, so each training that takes turns has one.
    return another_stream(device)


_TORCHS_OWN = {name: vars(F)[name] for name in ("linear", *_CONVOLUTIONS)}
