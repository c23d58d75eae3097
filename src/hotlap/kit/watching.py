"""Watches updates as they are made, a Rig's or a script's own: what lives in memory, in which layer, held by whom."""

from __future__ import annotations

import functools
import gc
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotlap.kit.live import LiveTensors, Piece
from hotlap.script.patches import Patches

KINDS = ("parameters", "gradients", "optimizer", "activations", "backward", "update", "batch")
"""What memory is for: `backward` are gradients of activations, `update` what an update needs while it is made."""
MOST_HELD = 5
"""Lines that hold memory, of which so many are told."""


class Watch:
    """Inside `with`, updates are watched: each operation is told apart by where in an update it is made."""

    def __init__(
        self,
        live: LiveTensors,
        parameters: Iterable[Tensor],
        modules: Iterable[nn.Module],
        *,
        sees_updates: bool = True,
    ) -> None:
        """Without `sees_updates` somebody else tells when an update begins and ends."""
        self.live, self._sees_updates = live, sees_updates
        self._parameters = [p for p in parameters if p.requires_grad]
        self._names = {id(part): name for module in modules for name, part in module.named_modules()}
        self._patches = Patches()
        self._inside: list[str] = []
        self.outputs: dict[str, int] = {}
        """Bytes that each module gave, of those that were called."""

    def __enter__(self) -> Watch:
        hooked, live = self._patches.hooked, self.live
        live.kind = "batch"
        hooked("before", register_module_forward_pre_hook(self._enters))
        hooked("after", register_module_forward_hook(self._leaves, always_call=True))
        if self._sees_updates:
            hooked("update begins", register_optimizer_step_pre_hook(self.update_begins))
            hooked("update ends", register_optimizer_step_post_hook(self.update_ends))
        self._patches.put(torch.autograd, "backward", self._backward(torch.autograd.backward))
        for number, parameter in enumerate(self._parameters):
            handle = parameter.register_post_accumulate_grad_hook(self._has_gradient)  # type: ignore[no-untyped-call]
            hooked(f"gradient {number}", handle)
        live.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *how: Any) -> None:
        self.live.__exit__(*how)  # type: ignore[no-untyped-call]
        self._patches.take_out_all()

    def _enters(self, module: nn.Module, inputs: Any) -> None:
        if module.__class__.__module__.startswith("torch.optim"):
            return
        self._inside.append(self._names.get(id(module)) or type(module).__name__)
        self.live.layer = self._inside[-1]
        if self.live.kind != "backward":  # a block that is computed again is part of the backward pass
            self.live.kind = "activations"

    def _leaves(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._inside:
            name = self._inside.pop()
            if isinstance(output, Tensor):
                self.outputs[name] = output.numel() * output.element_size()
        self.live.layer = self._inside[-1] if self._inside else "loss"

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.live.kind = "backward"
            try:
                return original(*args, **kwargs)
            finally:
                self.live.kind, self.live.layer = "batch", ""
                self._inside.clear()

        return backward

    def _has_gradient(self, parameter: Tensor) -> None:
        self.live.know([parameter.grad], "gradients")

    def update_begins(self, *_: Any) -> None:
        """Told that the optimizer begins."""
        self.live.kind = "update"

    def update_ends(self, *_: Any) -> None:
        """Told that the optimizer has made its update."""
        self.live.kind = "batch"


@dataclass(frozen=True, kw_only=True)
class Held:
    """Memory that grows with every update, and who made it."""

    line: str
    """The user's line that makes it."""
    bytes_an_update: int
    tensors_an_update: float
    holder: str
    """What holds it, as far as it can be seen."""

    def __str__(self) -> str:
        from hotlap.core.units import show_bytes

        count = f"{self.tensors_an_update:.0f} tensor{'s'[: self.tensors_an_update != 1]}"
        where = f", held by {self.holder}" if self.holder else ""
        return f"{show_bytes(self.bytes_an_update)} an update ({count}) made at {self.line}{where}"


def growth(live: LiveTensors, first: int, last: int) -> list[Held]:
    """What was made in each of the turns from `first` to `last` and still lives, by the line that made it.

    What lives from one update to the next and no longer, as a loss that is overwritten, does not count: the last turn's
    tensors are not looked at.
    """
    gc.collect()
    by_line: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for key, piece in live.pieces.items():
        if first <= piece.turn < last and piece.kind not in ("parameters", "optimizer", "gradients"):
            by_line[piece.line].append((key, piece))
    found = []
    for line, pieces in by_line.items():
        turns = Counter(piece.turn for _, piece in pieces)
        if len(turns) < last - first:
            continue
        count = last - first
        size = sum(piece.size for _, piece in pieces) // count
        found.append(
            Held(
                line=line or "a line of torch's or hotlap's own",
                bytes_an_update=size,
                tensors_an_update=len(pieces) / count,
                holder=_holder({key for key, _ in pieces}),
            )
        )
    return sorted(found, key=lambda one: -one.bytes_an_update)[:MOST_HELD]


def _holder(keys: set[int]) -> str:
    """The name under which a container of these tensors is kept; empty where it cannot be seen."""
    for one in gc.get_objects():
        if type(one) is Tensor and one.layout is torch.strided and one.untyped_storage()._cdata in keys:
            for container in gc.get_referrers(one):
                name = _name_of(container) if isinstance(container, (list, dict, set, tuple)) else ""
                if name:
                    return name
    return ""


def _name_of(container: Any) -> str:
    """How a container is called: an attribute of an object, a name of a module, a variable of a function."""
    for names in gc.get_referrers(container):
        if isinstance(names, FrameType):
            continue
        if isinstance(names, dict):
            key = next((key for key, value in names.items() if value is container and isinstance(key, str)), None)
            if key is None:
                continue
            if "__name__" in names and "__builtins__" in names:
                return f"{names['__name__']}.{key}"
            owner = next((o for o in gc.get_referrers(names) if getattr(o, "__dict__", None) is names), None)
            if owner is not None and not isinstance(owner, ModuleType):
                return f"{type(owner).__name__}.{key}"
        elif hasattr(names, "__dict__") and not isinstance(names, type):
            # From Python 3.11 on, attributes may lie in the object itself.
            key = next((key for key, value in vars(names).items() if value is container), None)
            if key is not None:
                return f"{type(names).__name__}.{key}"
    return ""
