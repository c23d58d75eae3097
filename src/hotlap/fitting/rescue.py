"""Out of memory: hotlap makes the update again under a plan that needs less, and undoes the failed try."""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotlap.core.errors import TrainingError, first_line
from hotlap.core.ledger import Ledger
from hotlap.core.plan import Memory, Plan
from hotlap.core.torch_private import BatchNormBase
from hotlap.core.units import show_bytes
from hotlap.data.resident import PendingRows
from hotlap.data.sources import tensors_in
from hotlap.engine.blocks import checkpointed_blocks
from hotlap.engine.capture.captured_step import CapturedStep
from hotlap.engine.rig import Place, Rig
from hotlap.engine.snapshot import Randomness
from hotlap.engine.step import EagerStep, Window, is_out_of_memory, let_go_of_frames
from hotlap.fitting.memory_return import LargerPlans
from hotlap.fitting.task import Task
from hotlap.fitting.what_would_fit import what_would_fit
from hotlap.machine.memory_shortage import Shortage, held_bytes, release_unused, shortage

MOST_AGAIN = 3
"""Windows of a plan that are made again under it once memory was freed: from then on it needs more than there is."""
TRIES = 2
"""Windows of a shape that have to go through under a plan before it is known to fit: the first update has no state of
the optimizer beside it yet."""
_UPDATE = (EagerStep.finish.__code__, EagerStep.ended.__code__)
"""The code that changes weights, and the schedule after them."""
_UPDATES = (EagerStep.__call__.__code__, CapturedStep.__call__.__code__, CapturedStep._run_eagerly.__code__)
"""The code that makes the updates of a window one after the other, each by its `number`."""


class Rescue:
    """Looks after the memory of one training.

    Before a window that is not known to fit it notes what a step may change, so that the step can be made again.
    That takes some tenths of a millisecond, so windows of a shape that went through before go without: should one of
    them run out of memory after all, it is made again too, but draws other masks, and batch norms count it twice; the
    ledger says so.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._plan: Plan | None = None
        self._went_through: dict[Plan, Counter[Hashable]] = {}
        self._here: Counter[Hashable] = Counter()
        self._shape: Hashable = None
        self._before: _Before | None = None
        self._left = ""
        """What of the failed step could not be put back, in words."""
        self._is_half_made = False
        """Whether an update was begun and not ended, so that the weights are of no step."""
        self._tried: list[str] = []
        self._short, self._freed_bytes = Shortage(), 0
        """Why memory ran out last, and what the garbage collector freed then."""
        self._again: Counter[Plan] = Counter()
        self._fetches = 0
        """How often batches since the last step were fetched again."""
        self._is_again = False
        """Whether the window in hand is made again under the same plan."""
        self.larger = LargerPlans(rig)
        """What did not fit, and may again."""

    def begins(self, window: Window) -> None:
        """Remember the state before the step of this window."""
        if self._rig.plan is not self._plan:
            self._plan = self._rig.plan
            self._here = self._went_through.setdefault(self._plan, Counter())
        self._shape = _shape(window)
        self._before = _Before(self._rig) if self._here[self._shape] < TRIES else None

    def ended(self) -> None:
        """Forget it: the step was made."""
        if self._before is not None:
            self._here[self._shape] += 1
            self._before = None
        self._tried.clear()
        self._is_again, self._fetches = False, 0
        if self.larger:
            self.larger.went_through()

    def undo(self, error: Exception, window: Window) -> Place:
        """Leave nothing of a step that ran out of memory; the place in the data from which to go on.

        Raises TrainingError where it came so far that it can be neither undone nor made again.
        """
        rig = self._rig
        made, updating = _how_far(error)
        before, self._before = (self._before if not made else None), None
        self._short = shortage(error, rig.device)
        let_go_of_frames(error)
        if updating and (before is None or not before.can_update_again(rig.optimizer)):
            self._is_half_made = True
            raise TrainingError(
                f"out of memory in the middle of the update of step {rig.steps + made:,}, which can therefore not be "
                f"made again ({first_line(error)}); go on from the last checkpoint, with the fused optimizer, which "
                "needs no memory of its own, or with a smaller model"
            ) from None
        for parameter in _parameters(rig):
            parameter.grad = None
        self._put_back(before, window, made)
        del before  # which holds copies of what was on the device
        held = held_bytes(rig.device)
        gc.collect()
        self._freed_bytes = held - held_bytes(rig.device)
        release_unused(rig.device)
        return rig.place

    def why_again(self, error: Exception) -> str | None:
        """Why the same plan may fit now that memory was freed; None if it has to be a smaller one.

        Each window is made again only once like this, and a plan a few times at most.
        """
        rig, short = self._rig, self._short
        asked = short.asked_bytes
        if self._is_again or self._again[rig.plan] == MOST_AGAIN or not asked:
            return None
        if not short.is_fragmented and self._freed_bytes < asked:
            return None
        self._is_again = True
        self._again[rig.plan] += 1
        freed = [] if self._freed_bytes < asked else [f"{show_bytes(self._freed_bytes)} was garbage, and is free now"]
        why = "; ".join([f"out of memory: {first_line(error)}{self._left}", *freed, *short.notes])
        rig.write_down("memory freed", "fault", why)
        return why

    def fetches_again(self, error: Exception) -> bool:
        """Whether to fetch a batch again that memory ran out for: steps fill it while the next batches are fetched.

        Raises TrainingError where that has not helped.
        """
        if not is_out_of_memory(error):
            return False
        if self._fetches == MOST_AGAIN:
            raise TrainingError(
                f"out of memory at step {self._rig.steps:,} while its batch is fetched, {MOST_AGAIN + 1} times: "
                f"{first_line(error)}; use smaller batches or samples, or a machine with more memory"
            ) from None
        self._fetches += 1
        let_go_of_frames(error)
        release_unused(self._rig.device)
        self._rig.write_down("batch fetched again", "fault", f"out of memory: {first_line(error)}")
        return True

    def step_back(self, error: Exception, window: Window) -> str | None:
        """Put the training back to before the update that an error ended; why that cannot be done, or None.

        The error and its traceback stay as they are, for the user to look at.
        """
        made, updating = _how_far(error)
        if updating or self._is_half_made:
            return f"the update of step {self._rig.steps + made:,} had begun"
        self._put_back(self._before if not made else None, window, made)
        return None

    def _put_back(self, before: _Before | None, window: Window, made: int) -> None:
        """Count the updates of a window that were made, and stand before the next one."""
        rig = self._rig
        self._left = "" if before is not None else "; what the step had drawn and moved in buffers stays so"
        if before is not None:
            before.restore(rig.optimizer)
        rig.steps += made
        rig.samples += made * sum(window.sizes)
        epoch, number, served = rig.place
        left = window.updates - made
        rig.place = Place(epoch, number - left, served - left)

    def use_less(self, error: Exception, window: Window) -> str:
        """Put the training under the next plan that needs less; what it is. Raises TrainingError where there is none.

        First more blocks are checkpointed, which leaves the numbers as they are; then batches are cut.
        """
        rig, line = self._rig, first_line(error)
        self._tried.append(_described(rig.plan.memory))
        smaller = _smaller(rig, max(window.sizes))
        if smaller is None:
            why = f"out of memory at step {rig.steps:,}, whatever was tried ({'; '.join(self._tried)}): {line}"
            fits = what_would_fit(rig, window)
            cure = [] if fits else ["use a smaller model, shorter samples or a GPU with more memory"]
            raise TrainingError("\n  ".join(["; ".join([why, *self._short.notes, *cure]), *fits])) from None
        why = "; ".join([f"out of memory: {line}{self._left}", *self._short.notes])
        failed = rig.plan
        rig.use(smaller, why=why, outcome="fault")
        rig.release_other_plans()
        release_unused(rig.device)
        self.larger.failed(failed, self._short.asked_bytes, fitted=bool(self._went_through.pop(failed, None)))
        return "; ".join([_described(smaller.memory), *self._short.notes])

    def use_more(self) -> str | None:
        """Put the training under the larger plan that it left, if that may fit again; what it is, and why."""
        found = self.larger.next()
        if found is None:
            return None
        plan, why = found
        self._rig.use(plan, why=f"tried again, since {why}")
        return f"{_described(plan.memory)}, since {why}"


class _Before:
    """What a step may change before its update is made, and how to see whether that has begun."""

    def __init__(self, rig: Rig) -> None:
        layers = [layer for module in rig.modules for layer in module.modules()]
        self._buffers = [(layer, _copied(layer._buffers)) for layer in layers if layer._buffers]
        self._remembered = rig.python_state()
        self._randomness = Randomness(rig.device)
        self._marks = _marks(rig.optimizer)

    def can_update_again(self, optimizer: Optimizer) -> bool:
        """Whether no weight and no state has changed, though the optimizer was at work.

        Only torch's own optimizers can be seen through: others may write to memory that does not tell.
        """
        now = _marks(optimizer)
        return type(optimizer).__module__.startswith("torch.optim") and all(
            now.get(key) == mark for key, mark in self._marks.items()
        )

    def restore(self, optimizer: Optimizer) -> None:
        """Put it all back. State that the optimizer has begun to make goes: half of it may be missing."""
        for layer, values in self._buffers:
            for name, (buffer, saved) in values.items():
                layer._buffers[name] = buffer
                if buffer is not None and saved is not None:
                    with torch.no_grad():
                        buffer.copy_(saved)
        for parameter in [p for p in optimizer.state if (id(p), None) not in self._marks]:
            del optimizer.state[parameter]
        self._remembered.restore()
        self._randomness.restore()


def _copied(buffers: dict[str, Tensor | None]) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    return {name: (one, None if one is None else one.detach().clone()) for name, one in buffers.items()}


def _marks(optimizer: Optimizer) -> dict[tuple[int, Any], Any]:
    """How often each weight and each part of its state was written to; what is no tensor, as it is."""
    marks: dict[tuple[int, Any], Any] = {}
    for group in optimizer.param_groups:
        marks |= {(id(parameter), "weight"): parameter._version for parameter in group["params"]}
    for parameter, state in optimizer.state.items():
        marks[id(parameter), None] = len(state)
        for name, value in state.items():
            marks[id(parameter), ("state", name)] = value._version if isinstance(value, Tensor) else repr(value)
    return marks


def _shape(window: Window) -> Hashable:
    """What tells windows apart by the memory that they need."""
    pieces = window.pieces
    if not pieces:
        return ()
    first = pieces[0]
    if type(first) is PendingRows:
        return window.updates, *((id(piece.columns), piece.count) for piece in pieces)
    if len(pieces) == 1 and type(first) is tuple and type(first[-1]) is type(first[0]) is Tensor and len(first) == 2:
        return first[0].shape, first[1].shape  # the usual case, in every step: in a third of the time
    return tuple(tensor.shape for piece in pieces for tensor in tensors_in(piece))


def _how_far(error: BaseException | None) -> tuple[int, bool]:
    """How many of a window's updates were made before an error, and whether the next one was under way."""
    made, updating = 0, False
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            updating = updating or frame.f_code in _UPDATE
            if frame.f_code in _UPDATES:
                made = max(made, frame.f_locals.get("number", 0))
        error = error.__cause__
    return made, updating


def _parameters(rig: Rig) -> list[Tensor]:
    mine = [p for group in rig.optimizer.param_groups for p in group["params"]]
    return [*mine, *(p for module in rig.modules for p in module.parameters())]


def _smaller(rig: Rig, piece: int) -> Plan | None:
    """The next plan that needs less memory than the one in force, whose largest piece has so many samples."""
    plan, blocks = rig.plan, len(checkpointed_blocks(rig.model))
    checkpointed = plan.memory.checkpoint
    if checkpointed < blocks:
        more = min(max(1, 2 * checkpointed), blocks)
        proposed = _in(plan, dataclasses.replace(plan.memory, checkpoint=more))
        if rig.supports(proposed) is None:
            return proposed
    norms = any(isinstance(layer, BatchNormBase) and layer.training for layer in rig.model.modules())
    half = -(-piece // 2)
    # A batch norm has nothing to compute from one sample.
    return plan.but(micro_batch=half) if half < piece and half >= 1 + norms else None


def _in(plan: Plan, memory: Memory) -> Plan:
    """The plan in this memory; blocks that are checkpointed are not compiled."""
    plan = dataclasses.replace(plan, memory=memory)
    return plan.but(compile="no") if memory.checkpoint else plan


def _described(memory: Memory) -> str:
    pieces = "batches whole" if memory.micro_batch is None else f"micro-batches of {memory.micro_batch}"
    if not memory.checkpoint:
        return pieces
    return f"{memory.checkpoint} block{'s' if memory.checkpoint > 1 else ''} checkpointed, {pieces}"


def within(task: Task, memory: Memory) -> Task:
    """The task with all of its plans in this memory: what is tuned from, and what is replayed."""
    own = _in(task.own_plan, memory)
    if task.replayed is None:
        return dataclasses.replace(task, own_plan=own)
    replayed = Ledger()
    for entry in task.replayed:
        replayed.record(dataclasses.replace(entry, plan=_in(entry.plan, memory)))
    return dataclasses.replace(task, own_plan=own, replayed=replayed)
