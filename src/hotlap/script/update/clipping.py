"""Clips gradients by their norm with replays, at the level of the two parts of torch's `clip_grad_norm_`.

torch first computes the norm, then scales the gradients. A replay does both at once, in its own memory, with the latest
limit; the second part copies the scaled gradients if the limit is that one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from hotlap.core.errors import first_line
from hotlap.core.torch_private import CLIP_NORM, CLIP_SCALE, foreach_copy_
from hotlap.engine.capture.recording import NotRecordedError, Recorder
from hotlap.script.update.capture import SharedInputs

WARM = 2
"""Clippings that torch makes itself before one is recorded."""
MOST_KINDS = 16
"""Most sets of gradients to record; torch clips others."""
MOST_LIMITS = 3
"""Most limits recorded in turn, before clipping is left to torch."""
CAPTURED_NORMS = (2.0, float("inf"))


def clipping_patches(clipping: Callable[[], Clipping | None]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions that make patches for torch's parts, by the parts' names; none if torch has no such parts.

    Other code that uses these parts may do anything between them, so it gets torch's own.
    """
    clip = getattr(clip_grad.clip_grad_norm_, "__wrapped__", None)
    has_parts = hasattr(clip_grad, CLIP_NORM) and hasattr(clip_grad, CLIP_SCALE)
    if clip is None or not has_parts or not {CLIP_NORM, CLIP_SCALE} <= set(clip.__code__.co_names):
        return
    code = clip.__code__

    def norms(norm: Callable[..., Any]) -> Callable[..., Any]:
        def norm_of(*args: Any, **kwargs: Any) -> Any:
            found = clipping() if sys._getframe(1).f_code is code else None
            return norm(*args, **kwargs) if found is None else found.norm(norm, *args, **kwargs)

        return norm_of

    def scales(scale: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(*args: Any, **kwargs: Any) -> Any:
            found = clipping() if sys._getframe(1).f_code is code else None
            return scale(*args, **kwargs) if found is None else found.scale(scale, *args, **kwargs)

        return scaled

    yield CLIP_NORM, norms
    yield CLIP_SCALE, scales


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    grads: list[Tensor]
    """Where a replay reads the gradients, and leaves them clipped."""
    total: Tensor
    """Where it leaves their norm."""
    limit: float

    def replay(self, grads: list[Tensor]) -> Tensor:
        """The norm of these gradients, in new memory; the gradients themselves are not clipped yet."""
        with torch.no_grad():
            foreach_copy_(self.grads, grads)
            self.graph.replay()
            return self.total.clone()


class _Kind:
    """Clippings of gradients of the same shapes."""

    def __init__(self) -> None:
        self.seen = 0
        """Clippings by torch with this limit."""
        self.limit: float | None = None
        """The latest limit."""
        self.others = 0
        """How often the limit changed."""
        self.last: Tensor | None = None
        """The latest norm computed by torch."""
        self.recorded: _Recorded | None = None
        self.given_up: str | None = None

    def note(self, total: Tensor, limit: float) -> None:
        """torch has clipped such gradients."""
        if limit != self.limit:
            self.others += self.limit is not None
            self.limit, self.seen, self.recorded = limit, 0, None
        self.seen += 1
        self.last = total
        if self.others >= MOST_LIMITS:
            self.give_up("its limit keeps changing")

    def give_up(self, reason: str) -> None:
        """Leave clipping to torch."""
        self.recorded, self.last, self.given_up = None, None, reason


@dataclass(frozen=True)
class _ReturnedNorm:
    """A norm that was returned; the script is expected to scale these gradients next."""

    kind: _Kind
    grads: list[Tensor]
    total: Tensor
    made: _Recorded | None
    """The recording that has scaled them already, in its own memory."""


class Clipping:
    """Makes the two parts of clipping by a replay; new or unusual clippings are left to torch."""

    def __init__(self, shared_inputs: SharedInputs, recorder_on: Callable[[torch.device], Recorder | None]) -> None:
        self._shared_inputs, self._recorder_on = shared_inputs, recorder_on
        self._kinds: dict[Hashable, _Kind] = {}
        self._returned_norm: _ReturnedNorm | None = None
        self._original_norm: Callable[..., Tensor] | None = None
        self._original_scale: Callable[..., None] | None = None
        self.warmup_steps = 0
        """Clippings that replayed no earlier recording, although one may still exist for them."""

    def forget(self) -> None:
        self._kinds.clear()
        self._returned_norm = None

    def norm(
        self,
        original: Callable[..., Tensor],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """The norm of some gradients, as `original` computes it."""
        self._returned_norm, self._original_norm = None, original
        kind = None
        if type(tensors) is list and tensors and not error_if_nonfinite:
            kind = self._kind_of(tensors, norm_type, foreach)
        if kind is None:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        if kind.recorded is not None:
            try:
                total = kind.recorded.replay(tensors)
                self._returned_norm = _ReturnedNorm(kind, tensors, total, kind.recorded)
                return total
            except Exception as error:  # torch then does the work
                kind.give_up(first_line(error))
        total = original(tensors, norm_type, error_if_nonfinite, foreach)
        if kind.given_up is None:
            self.warmup_steps += 1
            self._returned_norm = _ReturnedNorm(kind, tensors, total, None)
        return total

    def scale(
        self,
        original: Callable[..., None],
        parameters: Any,
        max_norm: float,
        total_norm: Tensor,
        foreach: bool | None = None,
    ) -> None:
        """Scale the gradients of some parameters, as `original` does."""
        returned_norm, self._returned_norm, self._original_scale = self._returned_norm, None, original
        if returned_norm is None or returned_norm.total is not total_norm or type(max_norm) not in (float, int):
            original(parameters, max_norm, total_norm, foreach)
            return
        made = returned_norm.made
        if made is not None and max_norm == made.limit:
            with torch.no_grad():
                foreach_copy_(returned_norm.grads, made.grads)
            return
        original(parameters, max_norm, total_norm, foreach)
        returned_norm.kind.note(total_norm, float(max_norm))

    def _kind_of(self, grads: Sequence[Tensor], norm_type: float, foreach: bool | None) -> _Kind | None:
        """The state of clipping such gradients, recorded when it is time; None if torch has to do it."""
        if norm_type not in CAPTURED_NORMS:
            return None
        try:
            if not self._shared_inputs.is_free(grads[0].device):
                return None
            key = (norm_type, foreach, grads[0].device, *[g.shape for g in grads], *[g.dtype for g in grads])
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= MOST_KINDS or self._recorder_on(grads[0].device) is None:
                    return None
                kind = self._kinds[key] = _Kind()
        except Exception:  # the list may hold anything
            return None
        if kind.recorded is None and kind.given_up is None and kind.seen >= WARM:
            self.warmup_steps += 1
            try:
                kind.recorded = self._recorded(kind, grads, float(norm_type), foreach)
            except Exception as error:  # torch then does the work
                kind.give_up(first_line(error))
        return kind

    def _recorded(self, kind: _Kind, grads: Sequence[Tensor], norm_type: float, foreach: bool | None) -> _Recorded:
        norm, scale, limit, last = self._original_norm, self._original_scale, kind.limit, kind.last
        recorder = self._recorder_on(grads[0].device)
        if norm is None or scale is None or limit is None or last is None or recorder is None:
            raise NotRecordedError("torch has not clipped such gradients yet")
        if any(type(g) is not Tensor or g.layout is not torch.strided or g.device != last.device for g in grads):
            raise NotRecordedError("not all gradients are plain ones on one device")
        if len(set(map(id, grads))) < len(grads):
            raise NotRecordedError("a gradient is given twice")
        buffers, total = self._shared_inputs.buffers(grads), torch.empty_like(last)
        holders = [SimpleNamespace(grad=buffer) for buffer in buffers]

        def work() -> None:
            found = norm(buffers, norm_type, False, foreach)
            scale(holders, limit, found, foreach)
            total.copy_(found)

        return _Recorded(recorder.record(work), buffers, total, limit)
