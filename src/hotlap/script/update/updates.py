"""The optimizers of a script under a changeable kind of step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from hotlap.engine.capture.recording import Recorder
from hotlap.engine.layout import BufferPool
from hotlap.engine.optimizers import Fusion, LayoutCheck, has_sparse_gradients, is_fused, settle_counts, why_not_fused
from hotlap.script.calls.graphs import Recording
from hotlap.script.find.finder import WHY
from hotlap.script.patches import Patches
from hotlap.script.update.capture import CapturedUpdate, hush, why_strange
from hotlap.script.update.clipping import Clipping
from hotlap.script.update.graphs import Desk, parameters_of
from hotlap.script.update.trials import Look, raw_step, why_captured_differs, why_fused_differs

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a step, as hooks before one may replace them."""


@dataclass(frozen=True)
class _Way:
    """How the steps of one optimizer are made, where not as the script has set them."""

    fusion: Fusion
    fused: bool
    changes: bool
    """Whether its kind is not the script's own."""
    captured: CapturedUpdate | None
    layout: LayoutCheck

    def set(self, optimizer: Optimizer) -> None:
        """Have the optimizer's next step made so."""
        self.fusion.set(self.fused, captured=self.update is not None)
        hush(optimizer)

    @property
    def update(self) -> CapturedUpdate | None:
        """What makes its steps by replays, as long as it does."""
        return self.captured if self.captured is not None and self.captured.given_up is None else None


class Updates:
    """Makes the steps of some optimizers with fused kernels, or by replays of recorded ones, or as the script has
    set them. There may be none: a script that updates its weights itself goes on doing so.

    Settings are changed for the time of a step alone: in between, the script finds them as it made them.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        make_recorder: Callable[[torch.device], Recording] | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.own = "fused" if self.optimizers and all(is_fused(one) for one in self.optimizers) else "plain"
        self._reasons: dict[int, str | None] = {}
        self._fusions: dict[int, Fusion] = {}
        self._rooms: dict[int, BufferPool] = {}
        self._plan = (self.own, False)
        self._ways: dict[int, _Way] = {}
        self._left_alone: set[int] = set()
        self._before: Look | None = None
        self._hooks: list[Any] = []
        self._desk = Desk()
        self._make_recorder = make_recorder
        self._recorders: dict[torch.device, Recording] = {}
        self._captures: dict[tuple[int, bool], CapturedUpdate] = {}
        self._clipping = Clipping(self._desk, self._recorder_on)

    # --- plans -----------------------------------------------------------------------------------

    def supports(self, kind: str) -> str | None:
        """Why no optimizer can make its steps so; None where one can at least."""
        if kind == self.own:
            return None
        if not self.optimizers:
            return WHY
        if kind == "plain":
            return "the script has fused its optimizer itself"
        reasons = [self._why_not(one) for one in self.optimizers]
        return None if None in reasons else reasons[0]

    def use(self, kind: str, *, captured: bool = False) -> None:
        """Make steps so, from the next on; `captured`: by replays, where that can be."""
        if (kind, captured) == self._plan:
            return
        self._plan = (kind, captured)
        self._put_back()
        self._unhook()
        self._ways = {}
        self._left_alone.clear()
        for one in self.optimizers:
            fused, changes = self._fuses(one, kind), self._changes(one, kind)
            update = self._capture_of(one, fused) if captured else None
            if update is None and not changes:
                settle_counts(one, self._rooms_of(one))
                continue
            if id(one) not in self._fusions:
                self._fusions[id(one)] = Fusion(one, self._rooms_of(one))
            self._ways[id(one)] = _Way(self._fusions[id(one)], fused, changes, update, LayoutCheck(one))
            self._hooks.append(one.register_state_dict_pre_hook(self._as_the_script_has_it))

    @property
    def clipping(self) -> Clipping | None:
        """What clips gradients under the plan in force; None where torch itself does."""
        return self._clipping if self._plan[1] else None

    @property
    def warmup_steps(self) -> int:
        """Steps and clippings so far under the plan in force that were not at its pace."""
        updates = [way.captured for way in self._ways.values() if way.captured is not None]
        return sum(update.warmup_steps for update in updates) + (self._clipping.warmup_steps if self._plan[1] else 0)

    @property
    def uncaptured(self) -> str | None:
        """Why steps, or some of them, are not captured under a plan that captures; None where there is no reason."""
        found = [way.captured.given_up for way in self._ways.values() if way.captured is not None]
        return next(filter(None, found), None)

    def tidy(self) -> None:
        """Let go of all that belongs to other plans than the one in force."""
        used = [way.captured for way in self._ways.values()]
        for update in self._captures.values():
            if update not in used:
                update.forget()
        if not self._plan[1]:
            self._let_go()

    def close(self) -> None:
        """Leave the optimizers as the script made them."""
        self.use(self.own)
        self._put_back()
        for update in self._captures.values():
            update.forget()
        self._let_go()
        for rooms in self._rooms.values():
            rooms.forget()
        self._rooms.clear()
        self._fusions.clear()

    def why_other(self, kind: str, *, captured: bool = False) -> str | None:
        """Why a step of that kind does not do what the script's own does, right after one of its steps; else None.

        Made with the gradients that are there; nothing is left of it. Where only replays of it do something else, or
        cannot be made, such steps will not be captured.
        """
        for one in self.optimizers:
            if self._changes(one, kind):
                reason = why_fused_differs(one)
                if reason is not None:
                    return reason
            fused = self._fuses(one, kind)
            update = self._capture_of(one, fused) if captured else None
            if update is not None and update.given_up is None:
                make = functools.partial(self._recorder_of, one)
                reason = why_captured_differs(one, update, fused=fused, make_recorder=make, desk=self._desk)
                if reason is not None:
                    update.give_up(reason)
        return None

    # --- steps -----------------------------------------------------------------------------------

    def replayed(self, optimizer: Optimizer) -> bool:
        """Make a step by a replay, where there is one that fits as things are; False, and nothing done, elsewhere."""
        way = self._ways.get(id(optimizer))
        if way is None or self._before is not None or id(optimizer) in self._left_alone:
            return False
        update = way.update
        return update is not None and update.replayed()

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: Any = None) -> Given | None:
        """To be called as a step begins, with what it was given.

        Where the step was made by a replay, given back is what makes torch's own do nothing.
        """
        way = self._ways.get(id(optimizer))
        if way is None or id(optimizer) in self._left_alone:
            return None
        if self._before is not None:
            self._put_back()  # a step has raised
        if way.changes and has_sparse_gradients(optimizer):
            return None  # no fused kernel takes them
        update = way.update
        is_alone = (len(args) <= 1 and not kwargs) or all(arg is None for arg in (*args[1:], *(kwargs or {}).values()))
        if update is not None and is_alone and update.replayed():
            return (update.idle,), {}
        if way.changes and not way.layout.matches_weights():  # a replay looks at its gradients' places by itself
            return None
        self._before = Look(optimizer)
        way.set(optimizer)
        if update is not None and is_alone and self._replayed_after_all(optimizer, way, update):
            return (update.idle,), {}
        if way.update is None and not way.changes:
            self._put_back()
            settle_counts(optimizer, self._rooms_of(optimizer))
            self._left_alone.add(id(optimizer))
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """To be called as it ends."""
        if self._before is not None and self._before.optimizer is optimizer:
            self._put_back()

    def _replayed_after_all(self, optimizer: Optimizer, way: _Way, update: CapturedUpdate) -> bool:
        """Whether the step could be replayed once counts lie where they are read, or once it was recorded."""
        look = self._before
        assert look is not None
        if update.recorded:
            look.restore()
            if update.replayed_at_last():
                return True
            way.set(optimizer)
        graph = update.prepare()
        if graph is not None:
            look.restore()
            if update.taken(graph):
                return True
        way.set(optimizer)
        return False

    def _put_back(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.restore()

    # --- what there is ---------------------------------------------------------------------------

    def _changes(self, optimizer: Optimizer, kind: str) -> bool:
        return kind != self.own and self._why_not(optimizer) is None

    def _fuses(self, optimizer: Optimizer, kind: str) -> bool:
        return self._changes(optimizer, kind) or is_fused(optimizer)

    def _why_not(self, optimizer: Optimizer) -> str | None:
        if id(optimizer) not in self._reasons:
            self._reasons[id(optimizer)] = why_not_fused(optimizer)
        return self._reasons[id(optimizer)]

    def _capture_of(self, optimizer: Optimizer, fused: bool) -> CapturedUpdate | None:
        """What makes such steps by replays; None where that cannot be, as is known beforehand."""
        parameters = parameters_of(optimizer)
        if not parameters or (self._make_recorder is None and parameters[0].device.type != "cuda"):
            return None
        if not fused and any(group.get("fused") for group in optimizer.param_groups):
            return None  # the script has fused some of its groups
        key = (id(optimizer), fused)
        if key not in self._captures:
            make = functools.partial(self._recorder_of, optimizer)
            self._captures[key] = CapturedUpdate(optimizer, raw_step, make_recorder=make, desk=self._desk)
        return self._captures[key]

    def _recorder_of(self, optimizer: Optimizer) -> Recording:
        recorder = self._recorder_on(parameters_of(optimizer)[0].device)
        assert recorder is not None
        return recorder

    def _recorder_on(self, device: torch.device) -> Recording | None:
        """What records on a device; None where nothing does."""
        if self._make_recorder is None and device.type != "cuda":
            return None
        if device not in self._recorders:
            self._recorders[device] = (self._make_recorder or Recorder)(device)
        return self._recorders[device]

    def _let_go(self) -> None:
        self._clipping.forget()
        self._recorders.clear()
        self._desk.clear()

    def _rooms_of(self, optimizer: Optimizer) -> BufferPool:
        if id(optimizer) not in self._rooms:
            self._rooms[id(optimizer)] = BufferPool()
            # What was recorded finds counts where they were, whatever state they were asked for in between.
            self._rooms[id(optimizer)].keeps = True
        return self._rooms[id(optimizer)]

    def _as_the_script_has_it(self, optimizer: Optimizer) -> None:
        self._put_back()  # a step has raised
        settle_counts(optimizer, self._rooms_of(optimizer))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


# --- steps and zero_grad without what torch does around them ---------------------------------------------
#
# Steps that are replays, and gradients set to None, without what torch does around them for profilers and hooks.


class Shortcuts:
    """Stand in for `step` and `zero_grad` of some optimizers: what torch does around them takes as long as a replay."""

    def __init__(self, replayed: Callable[[Optimizer], bool]) -> None:
        """`replayed` makes a step by a replay and tells all who have to know of it; False where it did nothing."""
        self._replayed = replayed
        self._patches = Patches()
        self._ours: dict[int, Optimizer] = {}

    def put(self, optimizers: Sequence[Optimizer]) -> None:
        """Stand in for those of these optimizers, if they are torch's own."""
        if self._ours:
            return
        self._ours = {id(one): one for one in optimizers if why_strange(one) is None}
        if self._ours:
            self._patches.put(Optimizer, "zero_grad", self._zero_grad)
        for kind in {type(one) for one in self._ours.values()}:
            self._patches.put(kind, "step", self._step)

    def take_out(self) -> None:
        """Leave torch as it was."""
        if self._ours:
            self._patches.take_out_all()
            self._ours = {}

    def _zero_grad(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if set_to_none is not True or id(optimizer) not in self._ours or torch.compiler.is_compiling():
                own(optimizer, set_to_none)
                return
            for parameter in parameters_of(optimizer):
                parameter.grad = None

        return zero_grad

    def _step(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            alone = not args and not kwargs and len(_global_optimizer_post_hooks) <= 1
            if alone and id(optimizer) in self._ours and self._replayed(optimizer):
                return None
            return own(optimizer, *args, **kwargs)

        step.__wrapped__ = getattr(own, "__wrapped__", own)  # without torch's hooks
        return step


# --- backward passes in the thread of the script itself --------------------------------------------------


class Backwards:
    """Has autograd work in the thread that calls it, or as the script has it.

    torch gives each GPU a thread of its own. To wake it and to be woken takes the host longer than a replay: 0.2 ms of
    a step of 1.3 ms were measured on an H200. With one GPU there is nothing that the two could do at a time, but for
    what the script does in Python while it waits.
    """

    def __init__(self) -> None:
        self._was: bool | None = None

    def use(self, *, here: bool) -> None:
        """From the next backward pass on; to be told in the thread of the script."""
        if here and self._was is None:
            self._was = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)
        elif not here and self._was is not None:
            torch._C._set_multithreading_enabled(self._was)
            self._was = None
