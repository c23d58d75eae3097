"""Attention by the kernel that is fastest for its shape, found out by timing while a step is warmed and recorded.

torch has several fused kernels for `scaled_dot_product_attention` and takes them in an order that knows nothing of the
shape: for short sequences another one may take two thirds of the time. The choice is kept for the process. Its kernels
come to the same numbers to rounding, and draw dropout in an order of their own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from hotlap.engine import attention_kernels
from hotlap.engine.attention_kernels import TORCHS_OWN, Call
from hotlap.engine.recording import is_recording
from hotlap.engine.watch import is_looked_into

NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.MATH: "math",
}
MOST_SHAPES = 64
"""Shapes that are looked into in one process; torch chooses for the others."""

_NAME = "scaled_dot_product_attention"
_known: dict[Hashable, Choice] = {}
_in_force: list[GoodMasks] = []
_left_to_torch = False


@dataclass(frozen=True)
class Choice:
    """The kernel for calls of one shape."""

    width: int
    """How many places ask: the length of the sequences."""
    kernel: SDPBackend | None
    """None where torch's own choice stays."""
    own: SDPBackend | None
    """Torch's own choice, where that is known."""

    @property
    def name(self) -> str:
        """In words."""
        if self.kernel is not None:
            return NAMES[self.kernel]
        return f"torch's own ({NAMES[self.own]})" if self.own in NAMES else "torch's own"


class GoodMasks:
    """Inside `with`, attention that drops is made by kernels whose masks are good; can be entered again, and nested.

    Seen are calls of `torch.nn.functional.scaled_dot_product_attention`, as `nn.MultiheadAttention` and `transformers`
    make them.
    """

    def __init__(self) -> None:
        self._is_off = _left_to_torch

    def __enter__(self) -> None:
        # Where somebody else has put a function of their own there, that is what the user wants.
        if not self._is_off and vars(F)[_NAME] in (TORCHS_OWN, _answered):
            _in_force.append(self)
            setattr(F, _NAME, _answered)

    def __exit__(self, *_: object) -> None:
        places = [number for number, one in enumerate(_in_force) if one is self]
        if not places:
            return
        del _in_force[places[-1]]
        if not _in_force and vars(F)[_NAME] is _answered:
            setattr(F, _NAME, TORCHS_OWN)


class WithoutPoorMasks:
    """Inside `with`, no attention at all is left to that kernel; can be entered again, and nested."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(torch._C._get_cudnn_sdp_enabled())
        if attention_kernels.allowed() != [attention_kernels.POOR_MASKS]:
            torch._C._set_sdp_use_cudnn(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_sdp_use_cudnn(self._before.pop())


class Attention(GoodMasks):
    """Inside `with`, all calls of attention are answered by the kernels chosen for them.

    Only for steps that are recorded: choosing, and looking up what was chosen, takes time. `tell` hears in words which
    kernels there are now, and the seconds it took to choose, where some are not torch's own choice.
    """

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        super().__init__()
        self._tell = tell
        self._seen: dict[Choice, None] = {}
        self._told, self._untold_s = "", 0.0

    def __exit__(self, *how: object) -> None:
        """As its base has it, and tell what is new."""
        super().__exit__(*how)
        told = in_words(self._seen)
        if told != self._told:
            self._tell(told, self._untold_s)
            self._told, self._untold_s = told, 0.0

    def note(self, choice: Choice, took_s: float) -> None:
        """Know a choice that is followed, and the seconds that it took to make it just now."""
        self._seen[choice] = None
        self._untold_s += took_s


@contextmanager
def left_to_torch() -> Iterator[None]:
    """Trainings made inside leave the choice to torch for good: to be measured against, and for tests."""
    global _left_to_torch
    before, _left_to_torch = _left_to_torch, True
    try:
        yield
    finally:
        _left_to_torch = before


def in_words(choices: Iterable[Choice]) -> str:
    """Which kernels there are at which widths; nothing where all are torch's own choice."""
    by_width: dict[int, set[str]] = {}
    differs = False
    for choice in choices:
        by_width.setdefault(choice.width, set()).add(choice.name)
        differs = differs or choice.kernel is not None
    if not differs:
        return ""
    told = []
    for names, group in groupby(sorted(by_width), key=lambda width: sorted(by_width[width])):
        widths = list(group)
        where = f"width {widths[0]}" if len(widths) == 1 else f"widths {widths[0]}–{widths[-1]}"
        told.append(f"{' or '.join(names)} at {where}")
    return ", ".join(told)


# --- one call ------------------------------------------------------------------------------------------


def _answered(
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
    """As torch's own, by the kernel that is chosen for such a call."""
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
        except RuntimeError:  # the tensors lie in memory in another way than those it was chosen for
            _known[call.shape()] = dataclasses.replace(choice, kernel=None)
            return call.by(None)


def _choice_for(call: Call, chooser: Attention) -> Choice | None:
    """The choice for a call, made where there is none yet; None while a recording is under way, which must not wait."""
    shape, begun = call.shape(), time.perf_counter()
    if shape not in _known and not is_recording() and len(_known) < MOST_SHAPES:
        _known[shape] = _chosen(call)
    choice = _known.get(shape)
    if choice is not None:
        chooser.note(choice, time.perf_counter() - begun)
    return choice


def _chosen(call: Call) -> Choice:
    with attention_kernels.without_a_trace(call.query.device):
        own = attention_kernels.own_kernel(call)
        kernels = attention_kernels.candidates(call, own)
        kernel = attention_kernels.fastest(attention_kernels.timed(call, kernels)) if kernels else None
    return Choice(call.query.shape[-2], kernel, own)


def _is_left_alone(call: Call) -> bool:
    """Whether torch has to choose: where somebody looks on, or what is drawn now is drawn a second time elsewhere."""
    tensors = [*call.inputs, *([] if call.mask is None else [call.mask])]
    if any(type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or not t.numel() for t in tensors):
        return True
    if call.mask is not None and call.mask.requires_grad:
        return True
    if torch.are_deterministic_algorithms_enabled():
        return True
    # What is computed again has to draw the same masks; before that it may have run without gradients.
    return is_looked_into() or (call.dropout > 0 and not torch.is_grad_enabled())


@contextmanager
def _as_torch_has_it() -> Iterator[None]:
    """Inside, the function is torch's own: others may know it by identity, as the masks of `torch.nn.attention` do."""
    was = vars(F)[_NAME]
    setattr(F, _NAME, TORCHS_OWN)
    try:
        yield
    finally:
        if _in_force:
            setattr(F, _NAME, was)
