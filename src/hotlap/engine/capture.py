"""A step recorded once as a CUDA graph and replayed: the same kernels, launched at once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hotlap.data.resident import Rows
from hotlap.engine.fingerprint import Glance, StateGlance, fingerprint, places_in
from hotlap.engine.graph import Left, StepGraph, signature
from hotlap.engine.norms import NormCounts
from hotlap.engine.optimizers import frozen_hyperparameters
from hotlap.engine.rates import Rates
from hotlap.engine.recording import NotRecordedError, Recorder
from hotlap.engine.step import EagerStep, Window
from hotlap.engine.watch import Watch, stranger_in

WARM_UPDATES = 3
"""Updates that run eagerly before anything is recorded: libraries set up their workspaces, the optimizer its state."""
MOST_GRAPHS = 16
"""Shapes that are recorded at a time; one more takes the place of the one not used for longest."""
PATIENCE = 200
"""Windows in a row that are all new, by their shape or by what the model holds, before capturing is given up."""
BLINKS = 3
"""Quick looks in a row that saw something touched where nothing was, before they are left."""
MOST_AHEAD = 8
"""Replays that may be launched and not yet done."""


class CapturedStep:
    """Makes updates by replaying what it recorded; shapes that are new or rare run eagerly, with the same numbers.

    Recorded is the whole update, or, where the optimizer cannot be (`why_split`), all but its step. `note` is told
    why nothing, or less than the whole, is recorded. What comes before a recording, and the recording, run inside
    `attention`, and inside the `overlap` of the eager step.
    """

    def __init__(
        self,
        eager: EagerStep,
        *,
        device: torch.device,
        recorder: Recorder,
        left: Left,
        why_split: str | None,
        attention: AbstractContextManager[None],
        note: Callable[[str], None],
    ) -> None:
        self._eager, self._device, self._attention, self._note = eager, device, attention, note
        self._overlap: AbstractContextManager[None] = eager.overlap or nullcontext()
        self.split = why_split is not None or eager.waits
        if self.split:
            self._note(f"the optimizer's step stays outside the capture: {why_split or 'it waits for the device'}")
        self._modules = eager.modules
        self._graphs: dict[Hashable, StepGraph] = {}
        self._made_for: tuple[Any, ...] = ()
        self._glance: tuple[Any, ...] | None = None
        self._blinks = 0
        self._frozen: tuple[Any, ...] = ()
        self._restless = 0
        self._seen: Counter[Hashable] = Counter()
        self._warm = False
        self._in_vain = 0
        self._unfit_told = self._full_told = False
        self._recorder, self._left = recorder, left
        self._norms = NormCounts(self._modules)
        self._behind: deque[torch.cuda.Event] = deque()
        self.firsts = 0
        """Windows that were no replay of what had been recorded before, where there may be one yet."""
        self.given_up: str | None = None
        """Why nothing is captured, once that is known."""

    @property
    def rates(self) -> Rates | None:
        """Where the learning rates are read."""
        return self._eager.rates

    @property
    def recorded(self) -> int:
        """How many shapes are recorded."""
        return len(self._graphs)

    def __call__(self, window: Window) -> Tensor:
        """Make the window's updates; the loss of the last, which the next call overwrites."""
        if self.given_up is not None:
            return self._eager(window)
        if self.split and window.updates > 1:
            for number in range(window.updates):
                loss = self(window.update(number))
            return loss
        self._check_validity()
        if not self._graphs:
            # The widest first: what is recorded after it finds room in the memory that it has let go of.
            window = window.widest()
        key = signature(window)
        if key is None:
            if not self._unfit_told:
                self._unfit_told = True
                self._note("batches that hold more than tensors and plain values run eagerly")
            return self._eager(window)
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._in_vain = 0
        else:
            self.firsts += 1
            self._in_vain = 0 if key in self._seen else self._in_vain + 1
            self._seen[key] += window.updates
            if self._seen[key] - window.updates < (self._eager.warm_later if self._graphs else WARM_UPDATES):
                return self._run_eagerly(window, key)
            graph = self._recorded(window, key)
            if graph is None:
                return self._eager(window)
            self._make_place()
        self._graphs[key] = graph  # the last one is the one used last
        return self._replay(graph, window)

    def _make_place(self) -> None:
        if len(self._graphs) < MOST_GRAPHS:
            return
        del self._graphs[next(iter(self._graphs))]
        if not self._full_told:
            self._full_told = True
            self._note(f"there are more than {MOST_GRAPHS} shapes of batches: some are recorded again and again")

    def kept(self, loss: Tensor) -> Tensor:
        """A loss that the next call does not overwrite."""
        return loss.to(self._left.loss_dtype, copy=True) if loss is self._left.loss else loss

    def forget(self) -> None:
        """Drop all that was recorded: the memory it was made for is no longer the training's."""
        self._graphs.clear()
        self._seen.clear()
        if self._eager.overlap is not None:
            self._eager.overlap.forget()

    def _check_validity(self) -> None:
        """Drop what was recorded for other layers, modes, places in memory or settings of the optimizer."""
        eager = self._eager
        if not self._is_untouched():
            made_for = (*fingerprint(self._modules, eager.functions), *map(id, eager.parameters()))
            if not self.split:
                made_for += tuple(places_in(list(eager.optimizer.state.values())))
            if made_for != self._made_for:
                self.forget()
                self._made_for, self._blinks = made_for, 0
            if self._blinks < BLINKS:
                self._blinks += 1
                self._look()
        frozen = () if self.split else frozen_hyperparameters(eager.optimizer)
        if frozen != self._frozen:
            self._restless = self._restless + 1 if self._frozen else 0
            self.forget()
            self._frozen = frozen
            if self._restless == 3:
                self.split = True
                self._note("the optimizer's step stays outside the capture: settings other than its rate keep changing")
        else:
            self._restless = 0

    def _look(self) -> None:
        """Note what is to be looked at again before the next replay, in a part of the time that all of it takes."""
        eager = self._eager
        state = None if self.split else StateGlance(eager.optimizer)
        self._glance = (Glance(self._modules), fingerprint((), eager.functions), eager.parameters(), state)

    def _is_untouched(self) -> bool:
        """Whether nothing was touched that recorded steps were made for; if not, they may still hold."""
        if self._glance is None:
            return False
        glance, functions, parameters, state = self._glance
        eager, self._glance = self._eager, None
        if (
            glance.still_holds()
            and fingerprint((), eager.functions) == functions
            and eager.parameters() is parameters
            and (state is None or self.split or state.still_holds())
        ):
            self._glance, self._blinks = (glance, functions, parameters, state), 0
            return True
        return False

    def _run_eagerly(self, window: Window, key: Hashable) -> Tensor:
        """As a capture would run it: on the stream that captures, watched, so that its first times tell what is wrong.

        The very first update is not watched: libraries wait for the device while they set themselves up.
        """
        with self._recorder.aside(), self._attention, self._overlap:
            for number in range(window.updates):
                one = window.update(number)
                if not self._warm:
                    loss = self._eager.one(one)
                    self._warm = True
                    continue
                loss = self._watched(one, key)
        if self._in_vain > PATIENCE and self.given_up is None:
            self._give_up("there is always something new: no shape of batch comes again while all else stays")
        return loss

    def _watched(self, one: Window, key: Hashable) -> Tensor:
        strangers: list[str | None] = []
        self._eager.look = lambda loss: strangers.append(stranger_in(loss, self._eager.parameters()))
        try:
            with Watch(self._modules, self._device) as watch, self._norms.watched(key):
                made = self._eager.one(one)
        finally:
            self._eager.look = None
        reason = watch.reason or next(filter(None, strangers), None)
        if reason is not None and self.given_up is None:
            self._give_up(reason)
        return made

    def _give_up(self, reason: str) -> None:
        self.forget()
        self.given_up = reason
        self._note(f"runs eagerly, since {reason}")

    def _recorded(self, window: Window, key: Hashable) -> StepGraph | None:
        try:
            norms = self._norms.settled(key)
            with self._attention, self._overlap:
                return StepGraph(self._eager, window, self._left, self._recorder, norms, whole=not self.split)
        except NotRecordedError as error:
            self._eager.optimizer.zero_grad(set_to_none=True)
            self._give_up(f"it cannot be recorded: {error}")
            return None

    def _replay(self, graph: StepGraph, window: Window) -> Tensor:
        first = window.pieces[0]
        if isinstance(first, Rows):
            # (that its epoch is not over, `signature` has seen)
            if first.start != self._left.expected:
                self._left.place.fill_(first.start)
            self._left.expected = first.start + window.samples
        # Launching a replay takes so little that the host would run seconds ahead: a signal, or a checkpoint, would
        # have to wait for all of it.
        event = self._behind.popleft() if len(self._behind) == MOST_AHEAD else None
        if event is None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        else:
            event.synchronize()
        loss = graph.replay(window)
        event.record(torch.cuda.current_stream(self._device))
        self._behind.append(event)
        return loss
