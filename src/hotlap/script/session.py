"""One script under hotlap, from before its first line to after its last."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hotlap.core.errors import HotlapError, first_line
from hotlap.core.ledger import Ledger
from hotlap.core.plan import Feed
from hotlap.core.tricks import REPLAYED_CLIPPING, SHORT_STEP
from hotlap.script.advise import Attending, Waits
from hotlap.script.calls.call import Call
from hotlap.script.feed.feeds import Iterate
from hotlap.script.feed.sending import Sending
from hotlap.script.feed.serving import Serving
from hotlap.script.find.finder import ByHand, Finder, Loop, Passes
from hotlap.script.find.horizon import Horizon
from hotlap.script.frames import without_text
from hotlap.script.patches import Patches, untraced
from hotlap.script.resting import WHY as COMPILES
from hotlap.script.resting import Compiling, Rest, Trained, is_inner
from hotlap.script.steering import Steering
from hotlap.script.streams import is_capturing
from hotlap.script.telling import Teller
from hotlap.script.training import ScriptTraining
from hotlap.script.update.clipping import NORM, SCALE, Clipping, stand_ins
from hotlap.script.update.updates import Shortcuts
from hotlap.tuner.budget import Length

BEFORE, AFTER, CALLS, PASSES = "before", "after", "Module.__call__", "Tensor.backward"
MAKING = ("__init__", "__setstate__")
"""Methods of optimizers by which there is one more."""
MOST_FAULTS = 3
"""Trainings that may break hotlap before it leaves the rest of the script alone."""
STRANGE = 2
"""Steps in a row of an optimizer that is no part of the loop, after which another loop has begun."""
LOOKING = 0.002
"""Of the time, what looking at the loops of the script may take while nothing is tried."""
LOOKED = 32
"""Steps during which waits for the device are looked for, once the plan is settled."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asks of hotlap for one script."""

    name: str
    """Of the script, as words and the run folder show it."""
    plan: str | Callable[[ScriptTraining], str] | None = None
    """`auto` (None), `max`, a plan file or a run folder, or what names one of these once the training is found; `off`
    never comes here."""
    out: Path | None = None
    """The run folder; None: a fresh one under `runs/`."""
    tune_s: float | None = None
    """What tuning may cost at most, in seconds."""
    without: Sequence[str] = ()
    """Tricks to leave out, by their names in `core.tricks`."""
    as_json: bool = False
    """Tell the table at the end as JSON."""
    is_alone: bool = False
    """Whether the process does nothing but run the script."""


class Session:
    """Watches the training of this process while it is open, makes it faster, and tells at its end what it did.

    Nothing in here raises: where something goes wrong, the script goes on as it would without hotlap.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._patches = Patches()
        is_fixed = settings.plan not in (None, "auto")
        self._teller = Teller(
            name=settings.name,
            out=settings.out,
            as_json=settings.as_json,
            is_fixed=is_fixed,
            is_alone=settings.is_alone,
        )
        self._servings: WeakKeyDictionary[DataLoader[Any], Serving] = WeakKeyDictionary()
        self._finder: Finder | None = Finder()
        self._passes, self._counts_passes = Passes(), False
        self._horizon = Horizon()
        self._steering: Steering | None = None
        self._sending: Sending | None = None
        self._attending = Attending()
        self._waits: Waits | None = None
        self._looked, self._looked_from = 0, 0.0
        self._looks_from = 0.0
        self._advice: list[str] = []
        self._strange = 0
        self._calls: dict[int, Call] = {}
        self._shortcuts = Shortcuts(self._replayed)
        self._inside = False
        self._open = False
        self._compiling = Compiling(self._compiles, self._compiles_a_step)
        self._rest: Rest | None = None
        self._earlier: WeakKeyDictionary[Optimizer, Rest | Trained] = WeakKeyDictionary()
        """Trainings that were left for another, by the optimizer whose steps are counted."""
        self._faults = 0
        self._guard = _Safely(self)
        self._home = (os.getpid(), threading.get_ident())

    # --- from the first line to the last ---------------------------------------------------------

    def start(self) -> None:
        """Watch from here on."""
        self._home = (os.getpid(), threading.get_ident())
        self._original_iter = DataLoader.__iter__
        self._with_text = without_text([__file__])
        self._open = True
        self._patches.put(DataLoader, "__iter__", self._iterating)
        if self._compiling.can_be_watched():
            self._compiling.watch()
        else:
            for name in MAKING:
                self._patches.put(Optimizer, name, self._making)
        for hook in (Session._before_step, Session._after_step):
            untraced(hook)
        self._patches.hooked(BEFORE, register_optimizer_step_pre_hook(self._before_step))
        self._patches.hooked(AFTER, register_optimizer_step_post_hook(self._after_step))
        self._patches.put(torch.Tensor, "backward", self._passing)  # until an optimizer makes a step
        self._counts_passes = True

    def stop(self, error: BaseException | None = None) -> None:
        """Take everything back, write the run folder, and tell on stderr what was found; once."""
        if not self._open or os.getpid() != self._home[0]:
            return
        self._open = False
        try:
            self._end_training()
        except Exception as fault:
            self._teller.fault(fault)
        self._patches.take_out_all()
        self._with_text()
        self._compiling.close()
        self._teller.tell(error)

    @property
    def is_steering(self) -> bool:
        """Whether a training has been found, and nothing has gone wrong since."""
        return self._steering is not None or (self._rest is not None and self._rest.trained is not None)

    def so_far(self) -> list[str]:
        """Where it stands, in lines for people."""
        ledger = self._steering.training.ledger if self._steering is not None else None
        if self._rest is not None and self._rest.trained is not None:
            ledger = self._rest.trained.ledger
        return self._teller.lines(ledger)

    def __enter__(self) -> Self:
        try:
            self.start()
        except Exception as error:
            self._fault(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(error)

    # --- what torch tells ------------------------------------------------------------------------

    @property
    def _is_ours(self) -> bool:
        """Whether this is the process and the thread of the training, not inside of what hotlap itself does, and not
        recorded into a graph of the script's own, in which nothing of hotlap may be."""
        is_here = self._open and not self._inside and self._home == (os.getpid(), threading.get_ident())
        return is_here and not is_capturing()

    def _iterating(self, own: Iterate) -> Iterate:
        def iterated(loader: DataLoader[Any]) -> Iterator[Any]:
            serving = begun = None
            try:
                if self._is_ours and not (self._rest is not None and self._rest.is_for_all):
                    serving = self._serving_of(loader)
                    begun = serving.begin(loader)
            except Exception as error:
                self._fault(error)
                serving = None
            if begun is not None:
                return begun
            # From here, not from within: workers have all frames beneath them on their stack.
            made = own(loader)
            return made if serving is None else serving.stand_in(loader, made)

        return iterated

    def _serving_of(self, loader: DataLoader[Any]) -> Serving:
        if loader not in self._servings:
            started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = torch.device("cuda", torch.cuda.current_device()) if started else torch.device("cpu")
            serving = Serving(
                loader, device=device, original_iter=self._original_iter, sending=self._sending_to(device)
            )
            serving.on_batch = functools.partial(self._served, serving)
            serving.on_begin = functools.partial(self._begun, serving)
            serving.on_end = functools.partial(self._ended, serving)
            serving.on_fault = self._fault
            serving.on_change = functools.partial(self._changed, serving)
            self._servings[loader] = serving
        return self._servings[loader]

    def _sending_to(self, device: torch.device) -> Sending | None:
        if device.type == "cuda" and self._sending is None:
            self._sending = Sending(device)
            self._sending.on_fault = self._fault
        return self._sending

    def _served(self, serving: Serving, seconds: float) -> None:
        if self._rest is not None or (self._steering is not None and self._steering.hears_nothing_of(serving)):
            return
        with self._safely():
            if self._finder is not None:
                self._finder.served(serving)
            elif self._steering is not None:
                self._steering.served(serving, seconds)

    def _begun(self, serving: Serving) -> None:
        if self._rest is not None:
            with self._safely():
                self._note_epoch(self._rest, serving)
            return
        with self._safely():
            if self._steering is None or serving in self._steering.training.servings:
                if self._steering is not None:
                    self._horizon.stepped(self._steering.training.steps)  # which it may have dozed through
                self._horizon.began_epoch(serving.length, sys._getframe(1))
            if self._steering is not None:
                self._inside = True
                try:
                    self._steering.begun(serving)
                finally:
                    self._inside = False

    def _note_epoch(self, rest: Rest, serving: Serving) -> None:
        """A loader begins an epoch while nothing is done: look at its loops, unless that was done shortly before."""
        steering, began = self._steering, time.perf_counter()
        if steering is None or serving not in steering.training.servings:
            return
        self._horizon.stepped(steering.training.steps + rest.steps)
        if began < self._looks_from:
            self._horizon.went_on()
            return
        self._horizon.began_epoch(serving.length, sys._getframe(2))
        ended = time.perf_counter()
        self._looks_from = ended + (ended - began) / LOOKING

    def _ended(self, serving: Serving) -> None:
        if self._rest is not None:
            return
        with self._safely():
            if self._steering is not None:
                self._steering.ended(serving)

    def _changed(self, serving: Serving, feed: Feed, why: str) -> None:
        with self._safely():
            if self._steering is not None:
                self._steering.changed(serving, feed, why)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """What hooks before a step give: the arguments of a step that has nothing left to do, or None."""
        if self._counts_passes:
            self._leave_passes()
        if self._rest is not None or is_inner(optimizer):
            return None
        with self._safely():
            if self._steering is not None and self._is_ours:
                self._inside = True
                try:
                    return self._steering.training.updates.before_step(optimizer, args, kwargs)
                finally:
                    self._inside = False
        return None

    def _replayed(self, optimizer: Optimizer) -> bool:
        """Whether a step of the script's could be made by a replay; then it is made, and has been told of."""
        made = False
        with self._safely():
            if self._steering is not None and self._is_ours:
                self._inside = True
                try:
                    made = self._steering.training.updates.replayed(optimizer)
                finally:
                    self._inside = False
        if made:
            self._after_step(optimizer, (), {})
        return made

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._counts_passes and not isinstance(optimizer, ByHand):
            self._leave_passes()
        rest = self._rest
        if rest is not None and rest.counts(optimizer):
            self._strange = 0
            return
        if is_inner(optimizer):
            return
        with self._safely():
            if self._steering is not None:
                self._steering.training.updates.after_step(optimizer)
            if self._is_ours:
                self._inside = True
                try:
                    self._stepped(optimizer)
                finally:
                    self._inside = False
        # Hooks before a step are put in and taken out here alone: where torch goes through them, they must not change.
        if self._rest is not None:
            self._patches.take_out(BEFORE)
        elif not self._patches.has(BEFORE) and self._patches.has(AFTER):
            self._patches.hooked(BEFORE, register_optimizer_step_pre_hook(self._before_step))

    def _passing(self, own: Callable[..., None]) -> Callable[..., None]:
        depth = 0  # hooks on gradients may go backward themselves

        @functools.wraps(own)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            try:
                own(tensor, *args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                self._passed(tensor)

        return untraced(backward, beneath=False)

    def _passed(self, loss: torch.Tensor | None = None) -> None:
        """A backward pass has ended, from `loss` unless it was replayed; no optimizer has made a step yet."""
        if not self._counts_passes or not self._is_ours:
            return
        self._watch_compiling()  # no optimizer is made that would tell
        try:
            one = self._passes.passed(loss)
        except Exception as error:
            self._fault(error)
            self._leave_passes()
            return
        if one is not None:
            self._after_step(one, (), {})
        elif self._passes.are_in_vain:
            self._leave_passes()

    def _leave_passes(self) -> None:
        """Look at backward passes no more: an optimizer makes the steps of this script, or none are made."""
        if not self._counts_passes or not self._is_ours:
            return
        self._counts_passes = False
        self._patches.take_out(PASSES)
        steering, rest, finder = self._steering, self._rest, self._finder
        found = steering.training.optimizers if steering is not None else rest.optimizers if rest is not None else []
        if any(isinstance(one, ByHand) for one in (*found, *(finder.optimizers if finder is not None else ()))):
            with self._safely():
                self._end_training()
                self._finder, self._horizon, self._strange = Finder(), Horizon(), 0

    def _clipping(self) -> Clipping | None:
        return self._steering.training.updates.clipping if self._steering is not None and self._is_ours else None

    # --- what comes of it ------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._finder is not None:
            self._watch_calls()
            loop = self._finder.stepped(optimizer)
            if loop is not None:
                self._take_up(self._passes.settled(loop))
            return
        steering, rest = self._steering, self._rest
        if steering is not None and rest is None and not self._compiling.has_begun and steering.dozes(optimizer):
            self._strange = 0
            return
        if steering is None or optimizer not in steering.training.optimizers:
            self._strange += 1
            if self._strange >= STRANGE:
                self._turn_to(optimizer)
            return
        self._strange, self._rest = 0, None
        if rest is not None:
            steering.slept(rest.steps, rest.last)
        if optimizer is steering.training.optimizer:
            served = steering.training.servings[0].served if steering.training.servings else None
            if isinstance(optimizer, ByHand) and served is None and optimizer.rhythm > 1:
                served = optimizer.passes
            self._horizon.stepped(steering.training.steps + 1, served)
        if self._compiling.has_begun:
            steering.training.leave_calls(COMPILES)
            if steering.changes_calls:
                steering.counted(optimizer)
                steering.training.write_down("hotlap", "chosen", COMPILES)
                self._begin_rest(steering)
                return
        steering.stepped(optimizer)
        self._look_for_waits(steering)
        if steering.has_nothing_to_do and not self._looks_for_waits(steering):
            self._begin_rest(steering)
            return
        if steering.idle_updates > 1 and not self._looks_for_waits(steering):
            self._leave_torch(steering.training.calls)
            self._rest = Rest(steering.training.optimizers, most=steering.idle_updates)
            return
        if steering.looks_at_calls:
            self._watch_calls()
        else:
            self._patches.take_out(CALLS)
        self._put_shortcuts(steering.training)

    def _turn_to(self, optimizer: Optimizer) -> None:
        """The script trains with another optimizer now: a new one, or one that it comes back to."""
        self._end_training()
        earlier, steps = self._earlier.get(optimizer), self._strange
        if isinstance(earlier, Rest):
            self._rest = earlier
            earlier.go_on(steps)
        else:
            self._finder, self._horizon = Finder({optimizer: steps}), Horizon()

    def _take_up(self, loop: Loop) -> None:
        """The loop is known: steer it."""
        self._finder, self._strange = None, 0
        self._rest = Rest(loop.optimizers)  # until all is well
        self._advice = self._attending.advice()
        earlier = self._earlier.get(loop.optimizers[0])
        ledger = earlier.ledger if isinstance(earlier, Trained) else Ledger()
        training = ScriptTraining(loop, loop.loaders, ledger, self.settings.without)
        training.before += earlier.updates if isinstance(earlier, Trained) else 0
        if self._compiling.has_begun:
            training.leave_calls(COMPILES)
        if isinstance(training.optimizer, ByHand):
            training.endings.on_pass = self._passed
        if not training.servings:
            self._horizon.began_steps(sys._getframe(1))
        for serving in training.servings:  # it may have been seen before the script chose its device
            serving.device, serving.sending = training.device, self._sending_to(training.device)
        self._calls = {id(call.module): call for call in training.calls}
        asked = self.settings.plan
        try:
            plan = asked(training) if callable(asked) else asked
            self._steering = Steering(training, plan=plan, tune_s=self.settings.tune_s, length=self._length)
        except Exception:
            training.close()
            raise
        self._rest = None

    def _begin_rest(self, steering: Steering) -> None:
        """Nothing more will be done for this training: let go of it, and only count its steps."""
        steering.close()
        self._steering, trained = None, steering.trained()
        trained.notes, self._advice = [*trained.notes, *self._advice], []
        self._rest = Rest(steering.training.optimizers, trained)
        self._leave_torch()

    def _length(self) -> Length:
        steps = self._steering.training.steps if self._steering is not None else 0
        updates = self._horizon.updates()
        return Length(updates if updates is not None else 2 * steps, final=False)

    def _end_training(self) -> None:
        steering, self._steering = self._steering, None
        rest, self._rest = self._rest, None
        try:
            self._leave_torch()
            if steering is not None:
                if rest is not None:
                    steering.slept(rest.steps, rest.last)
                steering.close()
        finally:
            if rest is not None and rest.trained is not None:
                self._left(rest, rest.trained, rest.optimizers)
            if steering is not None:
                trained = steering.trained()
                self._left(trained, trained, steering.training.optimizers)
            self._waits, self._looked, self._advice = None, 0, []

    def _left(self, earlier: Rest | Trained, trained: Trained, optimizers: Sequence[Optimizer]) -> None:
        self._earlier.update(dict.fromkeys(optimizers[:1], earlier))
        self._teller.trained(trained, self._advice)

    def _leave_torch(self, calls: Sequence[Call] = ()) -> None:
        """Take out all that stands in for something of torch's, but for loaders and what hears of steps.

        `calls` are still known, for later.
        """
        self._calls = {id(call.module): call for call in calls}
        self._patches.take_out(CALLS)
        self._take_out_shortcuts()
        if self._waits is not None:
            self._waits.remove()
        if self._sending is not None:
            self._sending.remove()

    def _put_shortcuts(self, training: ScriptTraining) -> None:
        """Stand in for what torch does around steps and clippings, as far as the plan in force has it."""
        is_captured = training.updates.clipping is not None
        if is_captured and training.may(SHORT_STEP):
            self._shortcuts.put(training.optimizers)
        else:
            self._shortcuts.take_out()
        if is_captured and training.may(REPLAYED_CLIPPING):
            for name, make in stand_ins(self._clipping):
                self._patches.put(clip_grad, name, make)
        else:
            self._take_out_clipping()

    def _take_out_shortcuts(self) -> None:
        self._shortcuts.take_out()
        self._take_out_clipping()

    def _take_out_clipping(self) -> None:
        for name in (NORM, SCALE):
            self._patches.take_out(f"{clip_grad.__name__}.{name}")

    def _look_for_waits(self, steering: Steering) -> None:
        if not self._looks_for_waits(steering):
            return
        if self._waits is None:
            self._waits = Waits()
            self._waits.install()
            self._looked_from = time.perf_counter()
        self._looked += 1
        steering.stay_awake()
        self._waits.stepped()
        if self._looked > LOOKED:
            self._waits.remove()
            self._advice += self._waits.lines((time.perf_counter() - self._looked_from) / LOOKED)

    def _looks_for_waits(self, steering: Steering) -> bool:
        is_settled = steering.training.device.type == "cuda" and not steering.is_searching
        return is_settled and self._looked <= LOOKED and not self._compiling.has_begun

    # --- what the script compiles ----------------------------------------------------------------

    def _making(self, own: Callable[..., None]) -> Callable[..., None]:
        """Making an optimizer has imported what compiles: from here on it can be watched."""

        @functools.wraps(own)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            self._watch_compiling()

        return made

    def _watch_compiling(self) -> None:
        """Watch what compiles from here on, where it is there by now and is not watched yet."""
        if not self._compiling.can_be_watched() or not self._patches.has(f"{Optimizer.__name__}.{MAKING[0]}"):
            return
        with self._safely():
            for name in MAKING:
                self._patches.take_out(f"{Optimizer.__name__}.{name}")
            self._compiling.watch(is_late=True)

    def _compiles(self) -> None:
        """torch is about to compile something of the script's: be gone by then."""
        with self._safely():
            self._patches.take_out(CALLS)
            self._take_out_shortcuts()
            if self._waits is not None:
                self._waits.remove()
            if self._steering is not None:
                self._steering.training.stand_back()

    def _compiles_a_step(self) -> None:
        """torch is about to compile the step of an optimizer, and would compile hooks with it."""
        if self._patches.has(AFTER):
            self._leave_passes()
            self._patches.take_out(BEFORE)
            self._patches.take_out(AFTER)
            self._teller.fault(HotlapError("it compiles the step of its optimizer, which hotlap leaves alone"))

    # --- calls of modules ------------------------------------------------------------------------

    def _watch_calls(self) -> None:
        if self._patches.has(CALLS) or self._compiling.has_begun:
            return
        self._patches.put(nn.Module, "__call__", self._calling)

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        depth = [0]
        # None but inside of compiled functions.
        compiled_by = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)

        def called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if compiled_by() is not None:
                return original(module, *args, **kwargs)
            call = self._calls.get(id(module))
            if call is not None:
                if self._is_ours:
                    return call(functools.partial(original, module), args, kwargs)
            elif self._finder is not None and not depth[0] and self._is_ours:
                is_trained = module.training and torch.is_grad_enabled()
                if is_trained:
                    self._finder.called(module)
                depth[0] += 1
                try:
                    outputs = original(module, *args, **kwargs)
                finally:
                    depth[0] -= 1
                if is_trained:
                    self._attending.see(outputs)
                return outputs
            return original(module, *args, **kwargs)

        # `torch.compile(module)` keeps what it finds here, and compiles what that calls.
        return untraced(called, beneath=False)

    # --- what goes wrong -------------------------------------------------------------------------

    def _safely(self) -> _Safely:
        return self._guard

    def _fault(self, error: Exception) -> None:
        """Something in hotlap went wrong: write it down, and let this training go on without hotlap."""
        steering = self._steering
        self._teller.fault(error)
        self._faults += not isinstance(error, HotlapError)
        optimizers = self._rest.optimizers if self._rest is not None else []
        if self._finder is not None:
            optimizers = self._finder.optimizers
        if steering is not None:
            optimizers = steering.training.optimizers
            if not isinstance(error, HotlapError):
                steering.training.write_down("hotlap", "fault", first_line(error))
        try:
            self._end_training()
        except Exception as another:
            self._teller.fault(another)
        self._strange = 0
        if self._faults >= MOST_FAULTS:
            self._finder, self._rest = None, Rest(None)
        elif optimizers:
            self._finder, self._rest = None, Rest(optimizers)


class _Safely:
    """Inside, whatever goes wrong is a fault of hotlap's, and never the script's."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self._session._fault(error)
            return True
        return False
