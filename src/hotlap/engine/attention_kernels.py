"""The kernels that torch has for attention: which of them fit a call, and how long each takes."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotlap.engine.recording import NotRecordedError, Recorder
from hotlap.engine.watch import meant

TORCHS_OWN: Any = torch._C._nn.scaled_dot_product_attention
POOR_MASKS = SDPBackend.CUDNN_ATTENTION
"""Torch's own choice for 16 bits on an H200 (2.11), and not left to it where attention drops: it draws once for about
four places, and trainings by it end with twice the loss of those by any other (`benchmarks/attention_masks.py`)."""
CLEARLY = 1.05
"""How many times as fast as torch's own choice another kernel has to be."""
ALIKE = 0.05
"""How far another kernel may be from torch's own choice on random numbers, as a fraction: several times what bf16
rounds. A mask or a scale that is not heeded is far beyond."""
PASSES = 8
"""Forward and backward passes in what is timed: one alone is too short for the clock of a GPU."""
ROUNDS = 6
"""How often each kernel is timed, in turn with the others; its best counts."""
LONGEST_S = 0.2
"""After so many seconds of it for one shape, what was timed has to do."""


@dataclass(frozen=True, eq=False)
class Call:
    """What attention is called with."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What may get gradients."""
        return self.query, self.key, self.value

    @property
    def is_differentiated(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)

    def by(self, kernel: SDPBackend | None) -> Tensor:
        """The answer of a kernel, or as torch chooses. Raises RuntimeError where that kernel cannot give it."""
        with good_masks(self.dropout) if kernel is None else sdpa_kernel(kernel):
            answer: Tensor = TORCHS_OWN(
                *self.inputs,
                attn_mask=self.mask,
                dropout_p=self.dropout,
                is_causal=self.causal,
                scale=self.scale,
                enable_gqa=self.grouped,
            )
        return answer

    def shape(self) -> Hashable:
        """What tells calls apart for the choice of a kernel."""
        tensors = [*self.inputs, *([] if self.mask is None else [self.mask])]
        device = self.query.device
        return (
            tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors),
            self.dropout > 0,
            self.causal,
            self.scale,
            self.grouped,
            self.is_differentiated,
            torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
            tuple(allowed()),
            tuple(torch._C._get_sdp_priority_order()),
            device,
        )

    def apart(self) -> Call:
        """The same on leaves of its own, which share its memory: what is done there leaves no trace."""
        query, key, value = (tensor.detach() for tensor in self.inputs)
        if self.is_differentiated:
            for leaf, given in zip((query, key, value), self.inputs, strict=True):
                leaf.requires_grad_(given.requires_grad)
        return dataclasses.replace(self, query=query, key=key, value=value)

    def made_up(self) -> Call:
        """The same on random numbers, without dropout."""
        query, key, value = (torch.randn_like(tensor).detach() for tensor in self.inputs)
        return dataclasses.replace(self, query=query, key=key, value=value, dropout=0.0)

    def blind(self) -> Call | None:
        """The same where the first place of every sequence may look nowhere; None where no mask says who may."""
        if self.mask is None or self.mask.dtype is not torch.bool:
            return None
        shape = (*self.mask.shape[:-2], self.query.shape[-2], self.key.shape[-2])
        mask = self.mask.expand(shape).clone()
        mask[..., 0, :] = False
        return dataclasses.replace(self, mask=mask)


def fastest(seconds: Mapping[SDPBackend | None, float]) -> SDPBackend | None:
    """The kernel that takes least, if that is clearly less than torch's own choice (None), which stays otherwise."""
    if None not in seconds:
        return None
    best = min(seconds, key=lambda kernel: seconds[kernel])
    return best if seconds[best] * CLEARLY <= seconds[None] else None


def own_kernel(call: Call) -> SDPBackend | None:
    """Torch's own choice for a call, out of those with good masks where it drops; None where it does not say."""
    device = call.query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    query, key, value = (tensor.to(dtype or tensor.dtype) for tensor in call.inputs)
    mask = call.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype or mask.dtype)
    try:
        with good_masks(call.dropout):
            number = torch._fused_sdp_choice(
                query, key, value, mask, call.dropout, call.causal, scale=call.scale, enable_gqa=call.grouped
            )
        return SDPBackend(number)
    except (RuntimeError, TypeError, ValueError):
        return None


def candidates(call: Call, own: SDPBackend | None) -> list[SDPBackend]:
    """Other kernels that the user's switches allow and that come to torch's own numbers; none on a CPU.

    Where a place may look nowhere, kernels differ in what they answer: that has to be finite where torch's own is.
    Math is none of them: it keeps all the scores, and rounds elsewhere. Nor is the one with poor masks where attention
    drops: it takes seconds to set up for a shape, and they have been poor at every shape that was looked at.
    """
    left_out = (own, SDPBackend.MATH, *([POOR_MASKS] if call.dropout else []))
    others = [kernel for kernel in allowed() if kernel not in left_out]
    if call.query.device.type != "cuda" or not others:
        return []
    made_up = call.made_up()
    blind = made_up.blind()
    try:
        # By the kernel that was torch's choice for the call: without its dropout that may be another.
        truth = _numbers(made_up, own)
        blind_truth = None if blind is None else _numbers(blind, own)
    except RuntimeError:
        return []
    found: list[SDPBackend] = []
    for kernel in others:
        try:
            fits = alike(truth, _numbers(made_up, kernel))
            if blind is not None and blind_truth is not None:
                fits = fits and as_finite(blind_truth, _numbers(blind, kernel))
        except RuntimeError:  # not for this shape, or not on this GPU
            continue
        if fits:
            found.append(kernel)
    return found


@contextmanager
def good_masks(dropout: float) -> Iterator[None]:
    """Inside, torch chooses for attention that drops a kernel whose masks are good, where the user allows for one."""
    if dropout == 0 or not torch._C._get_cudnn_sdp_enabled() or allowed() == [POOR_MASKS]:
        yield
        return
    torch._C._set_sdp_use_cudnn(False)
    try:
        yield
    finally:
        torch._C._set_sdp_use_cudnn(True)


def allowed() -> list[SDPBackend]:
    """The kernels that the user has not switched off."""
    switches: Any = torch.backends.cuda
    states = {
        SDPBackend.FLASH_ATTENTION: switches.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: switches.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: switches.cudnn_sdp_enabled(),
        SDPBackend.MATH: switches.math_sdp_enabled(),
    }
    return [kernel for kernel, is_on in states.items() if is_on]


def _numbers(call: Call, kernel: SDPBackend | None) -> list[Tensor]:
    """The answer of a kernel, and the gradients of its sum."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in call.inputs]
        answer = dataclasses.replace(call, query=leaves[0], key=leaves[1], value=leaves[2]).by(kernel)
    return [answer.detach(), *torch.autograd.grad(answer, leaves, torch.ones_like(answer))]


def alike(truth: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether all of these are the same numbers to rounding, wherever the first are finite."""
    for right, other in zip(truth, made, strict=True):
        counts, right, other = right.isfinite(), right.float(), other.float()
        gap, size = torch.where(counts, other - right, 0.0).norm(), torch.where(counts, right, 0.0).norm()
        if not bool(gap <= ALIKE * size):
            return False
    return True


def as_finite(truth: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether all of these are finite wherever the first are."""
    pairs = zip(truth, made, strict=True)
    return all(bool((other.isfinite() | ~right.isfinite()).all()) for right, other in pairs)


def timed(call: Call, kernels: Sequence[SDPBackend]) -> dict[SDPBackend | None, float]:
    """Seconds of a forward and, where one may follow, a backward pass by each kernel, and as torch chooses (None).

    They are recorded and replayed, as the step will be: what it takes to launch them does not count. A kernel that
    cannot be recorded has no time.
    """
    device, apart = call.query.device, call.apart()
    recorder = Recorder(device)
    graphs: dict[SDPBackend | None, torch.cuda.CUDAGraph] = {}
    for kernel in (None, *kernels):
        work = functools.partial(_passes, apart, kernel)
        try:
            with recorder.aside():
                work()  # libraries set themselves up
            graphs[kernel] = recorder.record(work)
        except (RuntimeError, NotRecordedError):
            continue
    best = dict.fromkeys(graphs, math.inf)
    begun = time.perf_counter()
    for number in range(ROUNDS):
        if number and time.perf_counter() - begun > LONGEST_S:
            break
        for kernel, graph in graphs.items():
            best[kernel] = min(best[kernel], _replay_s(graph, device) / PASSES)
    return best


def _passes(call: Call, kernel: SDPBackend | None) -> None:
    """Several passes through a kernel."""
    leaves = [tensor for tensor in call.inputs if tensor.requires_grad]
    for _ in range(PASSES):
        answer = call.by(kernel)
        if answer.requires_grad:
            torch.autograd.grad(answer, leaves, answer.detach())


def _replay_s(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    begun.record(stream)
    graph.replay()
    done.record(stream)
    done.synchronize()
    return float(begun.elapsed_time(done)) / 1e3


@contextmanager
def without_a_trace(device: torch.device) -> Iterator[None]:
    """Inside, work draws, waits, warns and takes memory unseen; afterwards all is as it was."""
    on_gpu, kind = device.type == "cuda", device.type
    generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
    state = generator.get_state()
    dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    try:
        with (
            meant(),
            warnings.catch_warnings(),
            torch._C.DisableTorchFunction(),
            # What autocast makes of leaves that come and go must not be kept as it keeps what it makes of weights.
            torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=False),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        generator.set_state(state)
        if on_gpu:
            torch.cuda.empty_cache()
