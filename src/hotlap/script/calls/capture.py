"""Calls made by replaying what was recorded of them, with the numbers of eager ones."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.tricks import COUNTED_NORMS, GRADIENTS_IN_PLACE, REPLAYED_EVALUATION, REWIRED_LAYERS
from hotlap.data.sources import tensors_in
from hotlap.engine.assists.rewiring import rewire
from hotlap.engine.capture.captured_step import MOST_GRAPHS, PATIENCE, WARM_UPDATES, BatchError, shape_of
from hotlap.engine.capture.fingerprint import QuickCheck, fingerprint
from hotlap.engine.capture.recording import NotRecordedError, Watch
from hotlap.script.calls.eager import EagerCall, Original
from hotlap.script.calls.endings import SEEN, Endings
from hotlap.script.calls.evaluations import Evaluations
from hotlap.script.calls.gradient_rooms import GradientRooms
from hotlap.script.calls.graphs import CallGraph, Ending, Recording, Replayed
from hotlap.script.calls.passage import StandIns, passed
from hotlap.script.calls.refusals import why_not_captured
from hotlap.script.calls.traces import Drawn, Untouched, drops_in_recurrence, generator_of, note_recorded
from hotlap.script.calls.trees import looked_at, marks

MOST_LANES = 2
"""Calls that may wait for their backward pass at a time and are replays: a GAN's of real and of made-up samples."""
MOST_CHANGES = 3
"""Eager calls in a row in which a module changes what it remembers: one that keeps masks of the last length does so
where another length comes, and where the first one comes back."""
MOST_SURPRISES = 3
"""Replays that had to be made again, since the script did with their outputs what it had not done before."""


class Lanes:
    """Memory to record and replay in. In one lane a call has to be differentiated before the next is made."""

    def __init__(self, make_recorder: Callable[[], Recording]) -> None:
        self.make_recorder = make_recorder
        """Makes one more, with memory of its own beside the lanes."""
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
            self._recorders.append(self.make_recorder())
            self._turns.append(None)
        return self._recorders[lane]

    def take(self, lane: int, turn: Replayed) -> None:
        """Have a call wait in a lane."""
        self._turns[lane] = weakref.ref(turn)


@dataclass
class Recordings:
    """What was recorded of a module's calls, and seen of them, in one state that the module was in."""

    made_for: tuple[Any, ...] = ()
    """Its fingerprint then."""
    glance: QuickCheck | None = None
    """Tells whether it is in that state still."""
    graphs: dict[tuple[int, Hashable], CallGraph] = field(default_factory=dict)
    """By lane and kind of call."""
    habits: dict[Hashable, Habits] = field(default_factory=dict)
    """By kind of call."""
    drawn: Drawn | None = None
    """How far the generator had drawn, where recurrent layers drop: see `was_set_back`."""

    def still_hold(self) -> bool:
        """Whether the module is in that state still, as far as a glance tells."""
        return self.glance is not None and self.glance.still_holds()

    def was_set_back(self) -> bool:
        """Whether the generator was since this was asked: masks of recurrent layers then come from other memory."""
        if self.drawn is None:
            return False
        before, self.drawn = self.drawn, self.drawn.now()
        return self.drawn.was_set_since(before)

    def are_of(self, module: nn.Module) -> bool:
        """Whether they hold for a module that was touched: then they are known to, from now on."""
        made_for = fingerprint([module])
        if made_for != self.made_for or not all(graph.standing.are_in_place for graph in self.graphs.values()):
            return False
        self.glance = QuickCheck([module])
        return True


class CapturedCall:
    """Makes calls by replaying; those that are new, or rare, or odd are made eagerly."""

    def __init__(
        self,
        eager: EagerCall,
        module: nn.Module,
        device: torch.device,
        lanes: Lanes,
        endings: Endings | None = None,
        *,
        without: Collection[str] = (),
    ) -> None:
        """`endings` follows what replays give to the script; `without` names the tricks to leave out."""
        self._eager, self._module, self._device, self._lanes = eager, module, device, lanes
        self._endings = endings
        self._key = functools.partial(_key_of, device)
        self._adapted = rewire(module) if REWIRED_LAYERS not in without else None
        self._counts_norms = COUNTED_NORMS not in without
        self._evaluations = Evaluations(eager, module, device, self._key, lanes.make_recorder)
        self._now = Recordings()
        self._before: Recordings | None = None
        self._rooms: GradientRooms | None = None
        self._lends = GRADIENTS_IN_PLACE not in without
        self._replays_evaluations = REPLAYED_EVALUATION not in without
        self._calls = 0
        self._is_warm = False
        self._in_vain = 0
        self._surprises = 0
        self._changes = 0
        self._warmup_steps = 0
        self._given_up: str | None = None

    @property
    def warmup_steps(self) -> int:
        """Calls that were no replay of what had been recorded before, where there may be one yet."""
        return self._warmup_steps + self._eager.warmup_steps

    @property
    def given_up(self) -> str | None:
        """Why nothing is captured, or not in the precision asked for, once that is known."""
        return self._given_up or self._eager.given_up

    @property
    def recorded(self) -> int:
        """How many graphs are held."""
        return len(self._now.graphs)

    def __call__(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call that is to be differentiated."""
        if self.given_up is not None:
            return self._eager(original, args, kwargs)
        self._calls += 1
        try:
            key, tensors = self._key(args, kwargs)
        except BatchError as error:
            self._give_up(_words(error))
            return self._eager(original, args, kwargs)
        self._check_validity()
        if self._rooms is not None and not self._rooms.pay:
            self._lends, self._rooms = False, None
            self._drop()
        lane = self._lanes.free()
        if lane is None:
            return self._eager(original, args, kwargs)
        graph = self._now.graphs.get((lane, key))
        if graph is not None:
            self._in_vain = 0
        else:
            habits = self._habits_of(key)
            if not habits.are_known:
                self._warmup_steps += 1
                return self._run_eagerly(original, args, kwargs, habits)
            graph = self._recorded_if_it_may(lane, key, original, args, kwargs, habits)
            if graph is None:
                return self._eager(original, args, kwargs)
        if graph.wants_ending(SEEN):
            graph = self._with_ending(graph, lane, key, original, args, kwargs)
        graph.last_used = self._calls
        turn = Replayed(graph, tensors, functools.partial(self._surprised, lane, key))
        self._lanes.take(lane, turn)
        outputs = passed(turn)
        if self._endings is not None:
            self._endings.gave(outputs, turn)
        return outputs

    def plainly(self, original: Original, args: Any, kwargs: Any) -> Any:
        """As `EagerCall.plainly`; evaluations without gradients are replayed, too, once they come often."""
        trains = torch.is_grad_enabled() or self._module.training
        if trains or self.given_up is not None or not self._replays_evaluations:
            return self._eager.plainly(original, args, kwargs)
        return self._evaluations(original, args, kwargs)

    def prepare(self, original: Original, args: Any, kwargs: Any, used: Sequence[int]) -> None:
        """Have such a call recorded, whose outputs of these numbers get gradients. Raises NotRecordedError."""
        self._eager.prepare(original, args, kwargs, used)
        if self.given_up is not None:
            raise NotRecordedError(self.given_up)
        self._check_validity(for_trial=True)
        try:
            key, _ = self._key(args, kwargs)
        except BatchError as error:
            raise NotRecordedError(_words(error)) from None
        lane = self._lanes.free()
        if lane is None:
            raise NotRecordedError("calls of the script's wait for their backward pass")
        graph = self._now.graphs.get((lane, key))
        if graph is None or graph.used != tuple(used):
            habits = Habits()
            habits.used = tuple(used)
            self._recorded(lane, key, original, args, kwargs, habits)

    def forget(self) -> None:
        """Drop all that was recorded."""
        self._drop()
        self._evaluations.forget()

    def _drop(self) -> None:
        """Drop what was recorded of calls that train."""
        self._now, self._before = Recordings(self._now.made_for, self._now.glance), None

    def _give_up(self, reason: str) -> None:
        self.forget()
        self._given_up = reason

    def _check_validity(self, *, for_trial: bool = False) -> None:
        """Drop what was recorded for other layers, modes, places in memory or settings.

        What a module is changed to for a trial is not for long (it may drop nothing meanwhile): what was recorded
        before is kept until it is changed again.
        """
        if not self._now.still_hold():
            before, self._before = self._before, None
            if before is not None and before.still_hold():
                self._now = before
            elif not self._now.are_of(self._module):
                self._before = self._now if for_trial else None
                self._now = Recordings(fingerprint([self._module]), QuickCheck([self._module]))
        if self._now.was_set_back():
            self._drop()

    def _habits_of(self, key: Hashable) -> Habits:
        self._in_vain = 0 if key in self._now.habits else self._in_vain + 1
        if self._in_vain > PATIENCE:
            self._give_up("there is always something new: no shape of arguments comes again while all else stays")
        return self._now.habits.setdefault(key, Habits())

    def _recorded_if_it_may(
        self, lane: int, key: Hashable, original: Original, args: Any, kwargs: Any, habits: Habits
    ) -> CallGraph | None:
        if habits.refused is not None:
            if not self._now.graphs:
                self._give_up(habits.refused)
            return None
        if not self._has_place():
            return None
        self._warmup_steps += 1
        try:
            return self._recorded(lane, key, original, args, kwargs, habits)
        except NotRecordedError as error:
            self._give_up(f"it cannot be recorded: {error}")
            return None

    def _has_place(self) -> bool:
        """Whether one more may be recorded, in the place of one that was not used for long if need be."""
        if len(self._now.graphs) < MOST_GRAPHS:
            return True
        oldest = min(self._now.graphs, key=lambda key: self._now.graphs[key].last_used)
        if self._calls - self._now.graphs[oldest].last_used <= PATIENCE:
            return False
        del self._now.graphs[oldest]
        return True

    def _run_eagerly(self, original: Original, args: Any, kwargs: Any, habits: Habits) -> Any:
        """Looking on, but for the very first time: libraries wait for the device while they set themselves up.

        cuDNN does it whenever the generator was set, if recurrent layers drop: only the rehearsal looks on there.
        """
        original = self._fit_to_record(original)
        if not self._is_warm or drops_in_recurrence(self._module, self._device):
            outputs = self._eager(original, args, kwargs)
            self._is_warm = True
        else:
            given = (args, kwargs)
            before = shape_of(given), marks(tensors_in(given))
            with Watch([self._module], self._device) as watch:
                outputs = self._eager(original, args, kwargs)
            same = before == (shape_of(given), marks(tensors_in(given)))
            self._changes = self._changes + 1 if watch.changed else 0
            reason = watch.reason if self._changes in (0, MOST_CHANGES) else None
            reason = reason or (None if same else "it changes its arguments in place")
            if reason is not None and self._given_up is None:
                self._give_up(reason)
        return habits.watch(outputs)

    def _with_ending(
        self, graph: CallGraph, lane: int, key: Hashable, original: Original, args: Any, kwargs: Any
    ) -> CallGraph:
        """The graph recorded anew, with the loss that the script makes of its output; else the graph as it is."""
        habits, ending = Habits(), graph.wanted
        habits.used, habits.kept = graph.used, graph.kept
        self._warmup_steps += 1
        try:
            made = self._recorded(lane, key, original, args, kwargs, habits, ending)
        except NotRecordedError:
            made = self._now.graphs[lane, key] = graph
        if made.ending is None:
            made.leave_ending()
        return made

    def _recorded(
        self,
        lane: int,
        key: Hashable,
        original: Original,
        args: Any,
        kwargs: Any,
        habits: Habits,
        ending: Ending | None = None,
    ) -> CallGraph:
        reason = why_not_captured(self._module, self._device)
        if reason is not None:
            raise NotRecordedError(reason)
        recorder, original = self._lanes.recorder(lane), self._fit_to_record(original)
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
                rooms=self._rooms_now(),
                ending=ending,
                counts_norms=self._counts_norms,
            )
            if fingerprint([self._module]) != self._now.made_for:
                raise NotRecordedError("it changes what it remembers as it is called")
            if drops_in_recurrence(self._module, self._device):
                note_recorded(graph)
                self._now.drawn = Drawn(generator_of(self._device))
        self._now.graphs[lane, key] = graph
        graph.last_used = self._calls
        return graph

    def _rooms_now(self) -> GradientRooms | None:
        """Where gradients are left for the script; None where it holds on to them."""
        parameters = StandIns(self._module).parameters
        if self._lends and (self._rooms is None or not self._rooms.are_for(parameters)):
            self._rooms = GradientRooms(parameters)
        return self._rooms

    def _fit_to_record(self, original: Original) -> Original:
        return original if self._adapted is None else self._adapted.during(original)

    def _surprised(self, lane: int, key: Hashable) -> None:
        """Told that a call had to be made again; what the script does with such calls is to be seen anew."""
        self._now.graphs.pop((lane, key), None)
        self._now.habits.pop(key, None)
        self._surprises += 1
        if self._surprises > MOST_SURPRISES:
            self._give_up("the script does this with its outputs now, and then that")


def _key_of(device: torch.device, args: Any, kwargs: Any) -> tuple[Hashable, list[Tensor]]:
    """What tells calls apart, and the tensors in this one. Raises BatchError where it cannot be recorded."""
    values = [*args, *kwargs.values()] if kwargs else args
    tensors = [value for value in values if isinstance(value, Tensor)]
    shape: Hashable = tuple(kwargs)
    if len(tensors) != len(values):
        tensors, shape = tensors_in((args, kwargs)), shape_of((args, kwargs))
    facts = []
    for tensor in tensors:
        if tensor.device != device:
            # It would be read by the host, which nobody sees: lengths, for one.
            raise BatchError(f"an argument lies on {tensor.device}")
        if type(tensor) not in (Tensor, nn.Parameter):
            raise BatchError(f"an argument is a {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise BatchError
        facts.append((tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad))
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return (shape, tuple(facts), autocast), tensors


def _words(error: BatchError) -> str:
    return str(error) or "its arguments are more than tensors and plain values"


# --- what a script does with the outputs of a module's calls ---------------------------------------------


MOST_UNUSED = 16
"""Calls that are looked at in vain, since none of them is differentiated."""


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
