"""Attention by the kernel that is fastest for its shape, found by timing during the warm-up of a recorded step.

torch has several fused kernels for `scaled_dot_product_attention` and takes them in an order that ignores the shape.
For short sequences another kernel may take two thirds of the time. The choice holds for the process. The kernels give
the same numbers to rounding, and draw dropout in different orders.

Whether a kernel draws good dropout masks does not show in answers and gradients, which are right for any mask. It shows
in training: masks that repeat within a batch make its gradients noisier than they have to be.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotlap.core.torch_private import (
    DisableTorchFunction,
    attention_choice,
    attention_order,
    get_cudnn_attention,
    set_cudnn_attention,
    torchs_attention,
)
from hotlap.core.warning_filters import filtered
from hotlap.engine.capture.recording import NotRecordedError, Recorder, intended_wait, is_observed, is_recording

NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "math",
}
MOST_SHAPES = 64
"""Shapes that are timed in one process; torch chooses for the others."""

_NAME = "scaled_dot_product_attention"
_known: dict[Hashable, Choice] = {}
_in_force: list[GoodMasks] = []


@dataclass(frozen=True)
class Choice:
    """The kernel for calls of one shape."""

    width: int
    """Number of queries: the length of the sequences."""
    kernel: SDPBackend | None
    """None if torch's choice stays."""
    own: SDPBackend | None
    """torch's choice, if it is known."""

    @property
    def name(self) -> str:
        """The choice in words."""
        if self.kernel is not None:
            return NAMES[self.kernel]
        return f"torch's own ({NAMES[self.own]})" if self.own in NAMES else "torch's own"


class GoodMasks:
    """Inside `with`, attention with dropout uses kernels with good masks. It can be entered again, and nested.

    It sees calls of `torch.nn.functional.scaled_dot_product_attention`, as `nn.MultiheadAttention` and `transformers`
    make them.
    """

    def __enter__(self) -> None:
        # If user code or a library has replaced the function, keep that.
        if vars(F)[_NAME] in (TORCHS_OWN, _attention_function):
            _in_force.append(self)
            setattr(F, _NAME, _attention_function)

    def __exit__(self, *_: object) -> None:
        places = [number for number, one in enumerate(_in_force) if one is self]
        if not places:
            return
        del _in_force[places[-1]]
        if not _in_force and vars(F)[_NAME] is _attention_function:
            setattr(F, _NAME, TORCHS_OWN)


class WithoutPoorMasks:
    """Inside `with`, torch never uses that kernel for attention. It can be entered again, and nested."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(get_cudnn_attention())
        if self._before[-1] and allowed() != [POOR_MASKS]:
            set_cudnn_attention(False)

    def __exit__(self, *_: object) -> None:
        set_cudnn_attention(self._before.pop())


class Attention(GoodMasks):
    """Inside `with`, calls of attention use the kernels chosen for them.

    Only for steps that are recorded, since choosing a kernel and looking it up take time. If some choices are not
    torch's, `tell` is called with them in words, and the seconds that choosing took.
    """

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        self._tell = tell
        self._seen: dict[Choice, None] = {}
        self._reported, self._unreported_s = "", 0.0

    def __exit__(self, *how: object) -> None:
        """Leave the context, and report new choices."""
        super().__exit__(*how)
        words = in_words(self._seen)
        if words != self._reported:
            self._tell(words, self._unreported_s)
            self._reported, self._unreported_s = words, 0.0

    def note(self, choice: Choice, took_s: float) -> None:
        """Note a choice in use, and the seconds that making it just took."""
        self._seen[choice] = None
        self._unreported_s += took_s


def in_words(choices: Iterable[Choice]) -> str:
    """The kernels in use by width, in words; empty if all are torch's choice."""
    by_width: dict[int, set[str]] = {}
    differs = False
    for choice in choices:
        by_width.setdefault(choice.width, set()).add(choice.name)
        differs = differs or choice.kernel is not None
    if not differs:
        return ""
    parts = []
    for names, group in groupby(sorted(by_width), key=lambda width: sorted(by_width[width])):
        widths = list(group)
        where = f"width {widths[0]}" if len(widths) == 1 else f"widths {widths[0]}–{widths[-1]}"
        parts.append(f"{' or '.join(names)} at {where}")
    return ", ".join(parts)


# --- one call ------------------------------------------------------------------------------------------


def _attention_function(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch's function, by the kernel chosen for such a call."""
    if torch.compiler.is_compiling():
        compiled: Tensor = TORCHS_OWN(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return compiled
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    chooser = next((one for one in reversed(_in_force) if isinstance(one, Attention)), None)
    with _as_torch_has_it():
        choice = None if chooser is None or _is_left_alone(call) else _choice_for(call, chooser)
        if choice is None or choice.kernel is None:
            return call.by(None)
        try:
            return call.by(choice.kernel)
        except RuntimeError:  # the tensors have another memory layout than those it was chosen for
            _known[call.shape()] = dataclasses.replace(choice, kernel=None)
            return call.by(None)


def _choice_for(call: Call, chooser: Attention) -> Choice | None:
    """The choice for a call, made at its first use; None during a recording, which must not wait."""
    shape, begun = call.shape(), time.perf_counter()
    if shape not in _known and not is_recording() and len(_known) < MOST_SHAPES:
        _known[shape] = _chosen(call)
    choice = _known.get(shape)
    if choice is not None:
        chooser.note(choice, time.perf_counter() - begun)
    return choice


def _chosen(call: Call) -> Choice:
    with without_a_trace(call.query.device):
        own = own_kernel(call)
        kernels = candidates(call, own)
        kernel = fastest(timed(call, kernels)) if kernels else None
    return Choice(call.query.shape[-2], kernel, own)


def _is_left_alone(call: Call) -> bool:
    """Whether torch has to choose: if something observes the call, or must draw the same masks again elsewhere."""
    tensors = [*call.inputs, *([] if call.mask is None else [call.mask])]
    if any(type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or not t.numel() for t in tensors):
        return True
    if call.mask is not None and call.mask.requires_grad:
        return True
    if torch.are_deterministic_algorithms_enabled():
        return True
    # A checkpointed layer has to draw the same masks when it is computed again; it may have run without gradients
    # first.
    return is_observed() or (call.dropout > 0 and not torch.is_grad_enabled())


@contextmanager
def _as_torch_has_it() -> Iterator[None]:
    """Inside, the function is torch's. Other code may compare it by identity, as the masks of `torch.nn.attention`
    do."""
    was = vars(F)[_NAME]
    setattr(F, _NAME, TORCHS_OWN)
    try:
        yield
    finally:
        if _in_force:
            setattr(F, _NAME, was)


# --- kernels -------------------------------------------------------------------------------------------


TORCHS_OWN: Any = torchs_attention
POOR_MASKS = SDPBackend.CUDNN_ATTENTION
"""torch's choice for 16 bits on an H200 (2.11). hotlap avoids it with dropout: it draws once for about four positions,
and trainings end with twice the loss of those by any other kernel (`benchmarks/attention_masks.py`)."""
CLEARLY = 1.05
"""Speed-up over torch's choice that another kernel needs."""
ALIKE = 0.05
"""Relative difference to torch's choice that another kernel may have on random numbers: several times bf16's rounding.
An ignored mask or scale gives far more."""
PASSES = 8
"""Forward and backward passes that are timed together: one alone is too short for a GPU's clock."""
ROUNDS = 6
"""Rounds in which each kernel is timed once; its best time counts."""
LONGEST_S = 0.2
"""Seconds after which timing for one shape stops."""


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of an attention call."""

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
        """The tensors that may get gradients."""
        return self.query, self.key, self.value

    @property
    def is_differentiated(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)

    def by(self, kernel: SDPBackend | None) -> Tensor:
        """The output of a kernel, or of torch's choice. Raises RuntimeError if that kernel cannot compute it."""
        with torchs_choice(self) if kernel is None else sdpa_kernel(kernel):
            answer: Tensor = TORCHS_OWN(
                *self.inputs,
                attn_mask=self.mask,
                dropout_p=self.dropout,
                is_causal=self.causal,
                scale=self.scale,
                enable_gqa=self.grouped,
            )
        return answer

    @property
    def avoids_poor_masks(self) -> bool:
        """Whether the kernel with poor masks is left out.

        It also takes up to a second to set up for a shape. Evaluations in 16 bits that hotlap brings have many shapes.
        """
        return self.dropout > 0 or (not self.is_differentiated and any(type(one) is GoodMasks for one in _in_force))

    def shape(self) -> Hashable:
        """The key by which the choice of a kernel tells calls apart."""
        tensors = [*self.inputs, *([] if self.mask is None else [self.mask])]
        device = self.query.device
        return (
            tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors),
            self.dropout > 0,
            self.avoids_poor_masks,
            self.causal,
            self.scale,
            self.grouped,
            self.is_differentiated,
            torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
            tuple(allowed()),
            tuple(attention_order()),
            device,
        )

    def detached(self) -> Call:
        """The same call on separate leaves that share its memory, so that it leaves no trace."""
        query, key, value = (tensor.detach() for tensor in self.inputs)
        if self.is_differentiated:
            for leaf, given in zip((query, key, value), self.inputs, strict=True):
                leaf.requires_grad_(given.requires_grad)
        return dataclasses.replace(self, query=query, key=key, value=value)

    def on_random_numbers(self) -> Call:
        """The same call on random numbers, without dropout."""
        query, key, value = (torch.randn_like(tensor).detach() for tensor in self.inputs)
        return dataclasses.replace(self, query=query, key=key, value=value, dropout=0.0)

    def with_nothing_to_see(self) -> Call | None:
        """The same call with a mask that hides everything from the first query; None if there is no boolean mask."""
        if self.mask is None or self.mask.dtype is not torch.bool:
            return None
        shape = (*self.mask.shape[:-2], self.query.shape[-2], self.key.shape[-2])
        mask = self.mask.expand(shape).clone()
        mask[..., 0, :] = False
        return dataclasses.replace(self, mask=mask)


def fastest(seconds: Mapping[SDPBackend | None, float]) -> SDPBackend | None:
    """The fastest kernel, if it is clearly faster than torch's choice (None), which stays otherwise."""
    if None not in seconds:
        return None
    best = min(seconds, key=lambda kernel: seconds[kernel])
    return best if seconds[best] * CLEARLY <= seconds[None] else None


def own_kernel(call: Call) -> SDPBackend | None:
    """torch's choice for a call, among kernels with good masks if it has dropout; None if torch does not report it."""
    device = call.query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    query, key, value = (tensor.to(dtype or tensor.dtype) for tensor in call.inputs)
    mask = call.mask
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype or mask.dtype)
    try:
        with torchs_choice(call):
            number = attention_choice(
                query, key, value, mask, call.dropout, call.causal, scale=call.scale, enable_gqa=call.grouped
            )
        return SDPBackend(number)
    except (RuntimeError, TypeError, ValueError):
        return None


def candidates(call: Call, own: SDPBackend | None) -> list[SDPBackend]:
    """Other kernels that the user allows and that give torch's numbers; none on a CPU.

    If a query may look nowhere, kernels differ in their output; it has to be finite where torch's is. Math is left out:
    it keeps all scores, and rounds elsewhere. With dropout the kernel with poor masks is left out: it takes seconds to
    set up for a shape, and its masks were poor at every shape that was checked.
    """
    left_out = (own, SDPBackend.MATH, *([POOR_MASKS] if call.avoids_poor_masks else []))
    others = [kernel for kernel in allowed() if kernel not in left_out]
    if call.query.device.type != "cuda" or not others:
        return []
    probe = call.on_random_numbers()
    blind = probe.with_nothing_to_see()
    try:
        # By torch's choice for this call: without its dropout torch may choose another.
        truth = _numbers(probe, own)
        blind_truth = None if blind is None else _numbers(blind, own)
    except RuntimeError:
        return []
    found: list[SDPBackend] = []
    for kernel in others:
        try:
            fits = alike(truth, _numbers(probe, kernel))
            if blind is not None and blind_truth is not None:
                fits = fits and is_finite_where(blind_truth, _numbers(blind, kernel))
        except RuntimeError:  # the kernel does not support this shape or GPU
            continue
        if fits:
            found.append(kernel)
    return found


def torchs_choice(call: Call) -> AbstractContextManager[None]:
    """Inside, torch chooses the kernel for this call, if possible one with good masks where that matters."""
    return WithoutPoorMasks() if call.avoids_poor_masks else nullcontext()


def allowed() -> list[SDPBackend]:
    """The kernels that the user has not disabled."""
    switches: Any = torch.backends.cuda
    states = {
        SDPBackend.FLASH_ATTENTION: switches.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: switches.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: switches.cudnn_sdp_enabled(),
        SDPBackend.MATH: switches.math_sdp_enabled(),
    }
    return [kernel for kernel, is_on in states.items() if is_on]


def _numbers(call: Call, kernel: SDPBackend | None) -> list[Tensor]:
    """The output of a kernel, and the gradients of its sum."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in call.inputs]
        answer = dataclasses.replace(call, query=leaves[0], key=leaves[1], value=leaves[2]).by(kernel)
    return [answer.detach(), *torch.autograd.grad(answer, leaves, torch.ones_like(answer))]


def alike(truth: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether all of these are the same numbers to rounding, where the first are finite."""
    for right, other in zip(truth, made, strict=True):
        counts, right, other = right.isfinite(), right.float(), other.float()
        gap, size = torch.where(counts, other - right, 0.0).norm(), torch.where(counts, right, 0.0).norm()
        if not bool(gap <= ALIKE * size):
            return False
    return True


def is_finite_where(truth: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether all of these are finite where the first are."""
    pairs = zip(truth, made, strict=True)
    return all(bool((other.isfinite() | ~right.isfinite()).all()) for right, other in pairs)


def timed(call: Call, kernels: Sequence[SDPBackend]) -> dict[SDPBackend | None, float]:
    """Seconds of a forward pass, and of a backward pass if one may follow, by each kernel and by torch's choice (None).

    They are recorded and replayed, as in the step, so that launch time does not count. A kernel that cannot be recorded
    has no time.
    """
    device, detached = call.query.device, call.detached()
    recorder = Recorder(device)
    graphs: dict[SDPBackend | None, torch.cuda.CUDAGraph] = {}
    for kernel in (None, *kernels):
        work = functools.partial(_passes, detached, kernel)
        try:
            with recorder.aside():
                work()  # warm-up
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
    """Inside, work may draw, wait, warn and allocate; afterwards everything is restored."""
    on_gpu, kind = device.type == "cuda", device.type
    generator = torch.cuda.default_generators[device.index] if on_gpu else torch.default_generator
    state = generator.get_state()
    dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    try:
        with (
            intended_wait(),
            filtered(),
            DisableTorchFunction(),
            # Autocast must not cache its casts of these temporary leaves.
            torch.autocast(kind, dtype=dtype, enabled=is_on, cache_enabled=False),
        ):
            yield
    finally:
        generator.set_state(state)
        if on_gpu:
            torch.cuda.empty_cache()


# --- dropout masks -------------------------------------------------------------------------------------


DRAWS = 60
"""Calls that are drawn: as many bits as a whole number has, enough to tell positions apart."""
RATE = 0.5
MOST_PLACES = 2**20
"""A call with more is checked with fewer samples and heads."""
LEAST_DISTINCT = 0.999
"""Share of positions that must have a pattern of their own over all draws."""
SPREAD, DEVIATIONS = 1.2, 5.0
"""How much more than by chance the number of dropped positions may vary, plus this many standard deviations."""


@dataclass(frozen=True, kw_only=True)
class Masks:
    """What several calls dropped."""

    distinct: float
    """Share of positions whose pattern over all draws differs from every other one."""
    spread: float
    """Variance of the number dropped in a draw, a head, a sample, a row or a column: 1 if all draws are independent."""
    limit: float
    """The largest variance that passes."""

    @property
    def are_good(self) -> bool:
        """Whether every position was drawn independently."""
        return self.distinct >= LEAST_DISTINCT and self.spread <= self.limit

    def __str__(self) -> str:
        return f"{self.distinct:.0%} of positions dropped independently, {self.spread:.2g} times the variance of chance"


@torch.no_grad()
def masks_of(call: Call, kernel: SDPBackend) -> Masks:
    """The dropout masks of a kernel in calls like this one. Raises RuntimeError if it cannot make them.

    Every query weighs all keys alike, and each key has its own value, so that the output shows the mask.
    """
    probe, columns = _probe(call)
    places = math.prod(probe.query.shape[:-1]) * columns
    code = torch.zeros(places, dtype=torch.int64, device=probe.query.device)
    sums: list[list[Tensor]] = []
    for _ in range(DRAWS):
        answer = probe.by(kernel)[..., :columns]
        kept = answer.float() * probe.key.shape[-2] > 0.5 / (1 - RATE)
        code = 2 * code + kept.flatten()
        sums.append([kept.sum().view(1), *(kept.sum(dim=_but(axis)) for axis in range(4))])
    worst = (-math.inf, 0.0, 0.0)
    for draws in zip(*sums, strict=True):
        counts = torch.stack(draws).double()
        size = places / counts.shape[1]
        spread = float((counts - size * (1 - RATE)).square().mean()) / (size * RATE * (1 - RATE))
        limit = SPREAD + DEVIATIONS * math.sqrt(2 / counts.numel())
        worst = max(worst, (spread - limit, spread, limit))
    return Masks(distinct=len(torch.unique(code)) / places, spread=worst[1], limit=worst[2])


def _probe(call: Call) -> tuple[Call, int]:
    """A call of the same shape on numbers that show the mask, and the number of keys for which they do."""
    query, key, value = call.inputs
    device, kind = query.device, query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    columns = min(key.shape[-2], value.shape[-1])
    samples, heads = (1, *query.shape[:-2])[-2:] if query.dim() > 2 else (1, 1)
    a_head = query.shape[-2] * columns
    heads = max(min(heads, 2), min(heads, MOST_PLACES // a_head))
    samples = max(1, min(samples, MOST_PLACES // (a_head * heads)))

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(samples, heads, *like.shape[-2:], dtype=dtype, device=device)

    values = torch.eye(*value.shape[-2:], dtype=dtype, device=device).expand(samples, heads, -1, -1).contiguous()
    made = replace(call, query=zeros(query), key=zeros(key), value=values)
    return replace(made, mask=None, dropout=RATE, causal=False, scale=None, grouped=False), columns


def _but(axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(4) if other != axis)
