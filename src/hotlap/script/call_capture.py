"""Calls made by replaying what was recorded of them, with the numbers of eager ones."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.data.columns import tensors_in
from hotlap.engine.capture import MOST_GRAPHS, PATIENCE, WARM_UPDATES
from hotlap.engine.fingerprint import fingerprint
from hotlap.engine.graph import Unfit, shape_of
from hotlap.engine.recording import NotRecordedError
from hotlap.engine.watch import Watch
from hotlap.script.call_eager import EagerCall, Original
from hotlap.script.call_graphs import CallGraph, Recording, Replayed
from hotlap.script.call_passage import generator_of, passed
from hotlap.script.call_refusals import why_not_captured
from hotlap.script.call_traces import Untouched, note_recorded, reads_dropout_state
from hotlap.script.call_trees import looked_at, marks

MOST_LANES = 2
"""Calls that may wait for their backward pass at a time and are replays: a GAN's of real and of made-up samples."""
MOST_SURPRISES = 3
"""Replays that had to be made again, since the script did with their outputs what it had not done before."""
MOST_UNUSED = 16
"""Calls that are looked at in vain, since none of them is differentiated."""


class Lanes:
    """Memory to record and replay in. In one lane a call has to be differentiated before the next is made."""

    def __init__(self, make_recorder: Callable[[], Recording]) -> None:
        self._make_recorder = make_recorder
        self._recorders: list[Recording] = []
        self._turns: list[weakref.ref[Replayed] | None] = []

    def free(self) -> int | None:
        """The number of a lane in which no call waits for its backward pass; None where all of them do."""
        for number, turn in enumerate(self._turns):
            waiting = turn() if turn is not None else None
            if waiting is None or waiting.done:
                return number
        return len(self._turns) if len(self._turns) < MOST_LANES else None

    def recorder(self, lane: int) -> Recording:
        """What records in a lane."""
        if lane == len(self._recorders):
            self._recorders.append(self._make_recorder())
            self._turns.append(None)
        return self._recorders[lane]

    def take(self, lane: int, turn: Replayed) -> None:
        """Have a call wait in a lane."""
        self._turns[lane] = weakref.ref(turn)


class Habits:
    """What the script does with the outputs of one kind of call, seen while they are made eagerly."""

    def __init__(self) -> None:
        self._calls = 0
        self.differentiated = 0
        """Calls whose outputs got gradients."""
        self.used: tuple[int, ...] = ()
        """Which outputs of the last one got them."""
        self.kept = False
        """Whether a backward pass kept its graph."""
        self.refused: str | None = None
        """Why it is not to be recorded."""

    @property
    def are_known(self) -> bool:
        """Whether enough calls were seen."""
        return self.differentiated >= WARM_UPDATES or self._calls > MOST_UNUSED

    def watch(self, outputs: Any) -> Any:
        """The outputs of a call, looked at for what becomes of them."""
        self._calls += 1
        if self._calls > MOST_UNUSED and not self.differentiated:
            self.refused = "its outputs are not differentiated"
        passes: dict[int, set[int]] = {}

        def came(number: int, _: Tensor) -> None:
            this = torch._C._current_graph_task_id()
            if not passes:
                self.differentiated += 1
            passes.setdefault(this, set()).add(number)
            self.used = tuple(sorted(passes[this]))
            self.kept |= torch._C._autograd._get_current_graph_task_keep_graph()
            if len(passes) > 1:
                self.refused = "its outputs are differentiated more than once"
            if torch.is_grad_enabled():
                self.refused = "its gradients are differentiated themselves"

        return looked_at(outputs, came)


class CapturedCall:
    """Makes calls by replaying; those that are new, or rare, or odd are made eagerly."""

    def __init__(self, eager: EagerCall, module: nn.Module, device: torch.device, lanes: Lanes) -> None:
        self._eager, self._module, self._device, self._lanes = eager, module, device, lanes
        self._graphs: dict[tuple[int, Hashable], CallGraph] = {}
        self._last_used: dict[tuple[int, Hashable], int] = {}
        self._habits: dict[Hashable, Habits] = {}
        self._made_for: tuple[Any, ...] = ()
        self._calls = 0
        self._is_warm = False
        self._in_vain = 0
        self._surprises = 0
        self._drawn = (0, 0)
        self._firsts = 0
        self._given_up: str | None = None

    @property
    def firsts(self) -> int:
        """Calls that were no replay of what had been recorded before, where there may be one yet."""
        return self._firsts + self._eager.firsts

    @property
    def given_up(self) -> str | None:
        """Why nothing is captured, or not in the precision asked for, once that is known."""
        return self._given_up or self._eager.given_up

    @property
    def recorded(self) -> int:
        """How many graphs are held."""
        return len(self._graphs)

    def __call__(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call that is to be differentiated."""
        if self.given_up is not None:
            return self._eager(original, args, kwargs)
        self._calls += 1
        try:
            key = self._key(args, kwargs)
        except Unfit as error:
            self._give_up(_words(error))
            return self._eager(original, args, kwargs)
        self._check_validity()
        lane = self._lanes.free()
        if lane is None:
            return self._eager(original, args, kwargs)
        graph = self._graphs.get((lane, key))
        if graph is not None and not graph.standing.are_in_place:
            self.forget()
            graph = None
        if graph is None:
            habits = self._habits_of(key)
            if not habits.are_known:
                self._firsts += 1
                return self._run_eagerly(original, args, kwargs, habits)
            graph = self._recorded_if_it_may(lane, key, original, args, kwargs, habits)
            if graph is None:
                return self._eager(original, args, kwargs)
        self._last_used[lane, key] = self._calls
        turn = Replayed(
            graph,
            tensors_in((args, kwargs)),
            surprised=functools.partial(self._surprised, lane, key),
        )
        self._lanes.take(lane, turn)
        return passed(turn)

    def plainly(self, original: Original, args: Any, kwargs: Any) -> Any:
        """As `EagerCall.plainly`."""
        return self._eager.plainly(original, args, kwargs)

    def prepare(self, original: Original, args: Any, kwargs: Any, used: Sequence[int]) -> None:
        """Have such a call recorded, whose outputs of these numbers get gradients. Raises NotRecordedError."""
        self._eager.prepare(original, args, kwargs, used)
        if self.given_up is not None:
            raise NotRecordedError(self.given_up)
        self._check_validity()
        try:
            key = self._key(args, kwargs)
        except Unfit as error:
            raise NotRecordedError(_words(error)) from None
        lane = self._lanes.free()
        if lane is None:
            raise NotRecordedError("calls of the script's wait for their backward pass")
        graph = self._graphs.get((lane, key))
        if graph is None or graph.used != tuple(used):
            habits = Habits()
            habits.used = tuple(used)
            self._recorded(lane, key, original, args, kwargs, habits)

    def forget(self) -> None:
        """Drop all that was recorded."""
        self._graphs.clear()
        self._last_used.clear()
        self._habits.clear()

    def _give_up(self, reason: str) -> None:
        self.forget()
        self._given_up = reason

    def _key(self, args: Any, kwargs: Any) -> Hashable:
        """What tells calls apart. Raises Unfit where one cannot be recorded."""
        given = (args, kwargs)
        tensors = tensors_in(given)
        for tensor in tensors:
            if tensor.device != self._device:
                # It would be read by the host, which nobody sees: lengths, for one.
                raise Unfit(f"an argument lies on {tensor.device}")
            if type(tensor) not in (Tensor, nn.Parameter):
                raise Unfit(f"an argument is a {type(tensor).__name__}")
        kind = self._device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return shape_of(given), tuple(tensor.requires_grad for tensor in tensors), autocast

    def _check_validity(self) -> None:
        """Drop what was recorded for other layers, modes, places in memory or settings."""
        made_for = fingerprint([self._module])
        if made_for != self._made_for:
            self.forget()
            self._made_for = made_for
        elif self._was_set_back():
            self.forget()

    def _was_set_back(self) -> bool:
        """Whether the generator was, where recurrent layers drop: their masks then come from other memory."""
        if self._device.type != "cuda" or not reads_dropout_state(self._module):
            return False
        generator = generator_of(self._device)
        (seed, offset), self._drawn = self._drawn, (generator.initial_seed(), generator.get_offset())
        return seed != self._drawn[0] or offset > self._drawn[1]

    def _habits_of(self, key: Hashable) -> Habits:
        self._in_vain = 0 if key in self._habits else self._in_vain + 1
        if self._in_vain > PATIENCE:
            self._give_up("there is always something new: no shape of arguments comes again while all else stays")
        return self._habits.setdefault(key, Habits())

    def _recorded_if_it_may(
        self, lane: int, key: Hashable, original: Original, args: Any, kwargs: Any, habits: Habits
    ) -> CallGraph | None:
        if habits.refused is not None:
            if not self._graphs:
                self._give_up(habits.refused)
            return None
        if not self._has_place():
            return None
        self._firsts += 1
        try:
            return self._recorded(lane, key, original, args, kwargs, habits)
        except NotRecordedError as error:
            self._give_up(f"it cannot be recorded: {error}")
            return None

    def _has_place(self) -> bool:
        """Whether one more may be recorded, in the place of one that was not used for long if need be."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        oldest = min(self._last_used, key=self._last_used.__getitem__)
        if self._calls - self._last_used[oldest] <= PATIENCE:
            return False
        del self._graphs[oldest], self._last_used[oldest]
        return True

    def _run_eagerly(self, original: Original, args: Any, kwargs: Any, habits: Habits) -> Any:
        """Looking on, but for the very first time: libraries wait for the device while they set themselves up."""
        if not self._is_warm:
            outputs = self._eager(original, args, kwargs)
            self._is_warm = True
        else:
            given = (args, kwargs)
            before = shape_of(given), marks(tensors_in(given))
            with Watch([self._module], self._device) as watch:
                outputs = self._eager(original, args, kwargs)
            same = before == (shape_of(given), marks(tensors_in(given)))
            reason = watch.reason or (None if same else "it changes its arguments in place")
            if reason is not None and self._given_up is None:
                self._give_up(reason)
        return habits.watch(outputs)

    def _recorded(
        self, lane: int, key: Hashable, original: Original, args: Any, kwargs: Any, habits: Habits
    ) -> CallGraph:
        reason = why_not_captured(self._module, self._device)
        if reason is not None:
            raise NotRecordedError(reason)
        recorder = self._lanes.recorder(lane)
        note_recorded(self._module)
        with Untouched(self._module, self._device):
            graph = CallGraph(
                functools.partial(self._eager.computed, original),
                self._module,
                self._device,
                (args, kwargs),
                used=habits.used,
                kept=habits.kept,
                switches=self._eager.switches,
                scale=self._eager.scale,
                recorder=recorder,
            )
        self._graphs[lane, key] = graph
        self._last_used[lane, key] = self._calls
        return graph

    def _surprised(self, lane: int, key: Hashable) -> None:
        """Told that a call had to be made again; what the script does with such calls is to be seen anew."""
        self._graphs.pop((lane, key), None)
        self._last_used.pop((lane, key), None)
        self._habits.pop(key, None)
        self._surprises += 1
        if self._surprises > MOST_SURPRISES:
            self._give_up("the script does this with its outputs now, and then that")


def _words(error: Unfit) -> str:
    return str(error) or "its arguments are more than tensors and plain values"
