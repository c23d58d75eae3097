"""A session watches one script from its first line to its last, makes its training faster, and reports the result."""

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
from hotlap.core.terminal import logger
from hotlap.core.torch_private import frame_callback, or_none
from hotlap.core.tricks import DECODED_ONCE, FORWARD_PIECES, REPLAYED_CLIPPING, SHORT_STEP
from hotlap.engine.capture.recording import is_recording
from hotlap.engine.step import is_out_of_memory
from hotlap.monitor.sampler import Sampler
from hotlap.script.advice import AttentionAdvice, Waits
from hotlap.script.calls.call import ModuleCall
from hotlap.script.feed.decoded_once import DecodedOnce, decoded_once
from hotlap.script.feed.device_copies import DeviceCopies
from hotlap.script.feed.feeds import Iterate
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.hangs import ScriptHangs
from hotlap.script.idle import WHY as COMPILES
from hotlap.script.idle import CompileWatch, IdleCounter, TrainingSummary, is_inner
from hotlap.script.live import LiveScript, Standing
from hotlap.script.lookout import Lookout
from hotlap.script.loop_finder import BackwardPasses, Loop, LoopFinder, ManualUpdates
from hotlap.script.out_of_memory import ForwardRescue
from hotlap.script.out_of_memory import advice as out_of_memory_advice
from hotlap.script.patches import Patches, untraced
from hotlap.script.report import Report
from hotlap.script.run_length import RunLength
from hotlap.script.running import without_text
from hotlap.script.training import ScriptTraining
from hotlap.script.tuning import ScriptTuning
from hotlap.script.update.clipping import Clipping, clipping_patches
from hotlap.script.update.updates import Shortcuts
from hotlap.tuner.budget import Length

log = logger(__name__)

BEFORE, AFTER, CALLS, PASSES = "before", "after", "Module.__call__", "Tensor.backward"
CREATING = ("__init__", "__setstate__")
"""Methods that create an optimizer."""
MOST_FAULTS = 3
"""Trainings in which hotlap may fail before it leaves the rest of the script alone."""
OTHER_STEPS = 2
"""Consecutive steps of an optimizer outside the loop, after which hotlap assumes that another loop has begun."""
LOOK_SHARE = 0.002
"""Share of the time that hotlap may spend on looking at the script's loops while it tries nothing."""
WATCHED_STEPS = 32
"""Steps during which hotlap looks for waits for the GPU, once the plan is settled."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asks of hotlap for one script."""

    name: str
    """The script's name, as messages and the run folder show it."""
    plan: str | Callable[[ScriptTraining], str] | None = None
    """`auto` (None), `max`, a plan file or a run folder, or a function that names one of these once the training is
    found. `off` never starts a session."""
    out: Path | None = None
    """The run folder; None: a new one under `runs/`."""
    tune_s: float | None = None
    """Most seconds that tuning may cost."""
    without: Sequence[str] = ()
    """Names of the tricks in `core.tricks` to leave out."""
    as_json: bool = False
    """Print the report as JSON."""
    words: Sequence[str] = ()
    """The words after `python` that run the script again; empty where there are none."""
    report: bool = False
    """Write `report.html` into the run folder at the end."""
    torch_s: float | None = None
    """Seconds in which this process imported torch, if it only runs the script."""


class Session:
    """Watches the training of this process while open, makes it faster, and reports at the end.

    No method raises: after a fault of hotlap, the script continues as without hotlap.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._patches = Patches()
        self._report = Report(settings)
        self._proxies: WeakKeyDictionary[DataLoader[Any], LoaderProxy] = WeakKeyDictionary()
        self._finder: LoopFinder | None = LoopFinder()
        self._backward_passes, self._watches_passes = BackwardPasses(), False
        self._run_length = RunLength()
        self._tuning: ScriptTuning | None = None
        self._device_copies: DeviceCopies | None = None
        self._attention_advice = AttentionAdvice()
        self._waits: Waits | None = None
        self._watched_steps, self._watched_from = 0, 0.0
        self._next_look = 0.0
        self._advice: list[str] = []
        self._other_steps = 0
        self._calls: dict[int, ModuleCall] = {}
        self._shortcuts, self._clipping_patches = Shortcuts(self._replay_step), Patches()
        self._open = False
        self._compile_watch = CompileWatch(self._before_compile, self._before_compiled_step)
        self._idle: IdleCounter | None = None
        self._decoded: DecodedOnce | None = None
        self._earlier: WeakKeyDictionary[Optimizer, IdleCounter | TrainingSummary] = WeakKeyDictionary()
        """Trainings that the script left for another one, by the optimizer whose steps count."""
        self._faults = 0
        self._sampler: Sampler | None = None
        self._live: LiveScript | None = None
        self._lookout = Lookout()
        self._hangs = ScriptHangs(self._patches)
        self._length = Length(0, known=False)
        """What the tuner was last told of how long the training is."""
        self._own_work = _OwnWork(self._fault)
        self._rescue = ForwardRescue(lambda: self._is_ours, self._on_out_of_memory)
        self._home = (os.getpid(), threading.get_ident())

    # --- from the first line to the last -----------------------------------------------------

    def start(self) -> None:
        self._home = (os.getpid(), threading.get_ident())
        self._original_iter = DataLoader.__iter__
        self._with_text = without_text([__file__])
        self._open = True
        self._patches.put(DataLoader, "__iter__", self._patched_iter)
        if self._compile_watch.can_be_watched():
            self._compile_watch.watch()
        else:
            for name in CREATING:
                self._patches.put(Optimizer, name, self._patched_init)
        for hook in (Session._before_step, Session._after_step):
            untraced(hook)
        self._patches.hooked(BEFORE, register_optimizer_step_pre_hook(self._before_step))
        self._patches.hooked(AFTER, register_optimizer_step_post_hook(self._after_step))
        self._patches.put(torch.Tensor, "backward", self._patched_backward)  # until an optimizer makes a step
        self._watches_passes = True
        if FORWARD_PIECES not in self.settings.without:
            self._rescue.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Restore torch, write the run folder, and print the report on stderr; once."""
        if not self._open or os.getpid() != self._home[0]:
            return
        self._open = False
        self._rescue.remove()
        if self._finder is not None:
            self._report.notes += self._advice
        if error is not None and is_out_of_memory(error):
            self._report.notes.append(out_of_memory_advice(error, self._rescue.why_not, self.settings.words))
        try:
            self._end_training()
        except Exception as fault:
            self._report.fault(fault)
        self._hangs.close()
        if self._sampler is not None:
            self._sampler.__exit__(None if error is None else type(error))
        if self._live is not None:
            self._report.conditions = [event.line for event in self._live.conditions()]
        self._patches.take_out_all()
        if self._decoded is not None:
            self._decoded.close()
        self._with_text()
        self._compile_watch.close()
        self._report.tell(error)

    @property
    def is_tuning(self) -> bool:
        """Whether hotlap has found a training, and no fault has happened since."""
        return self._tuning is not None or (self._idle is not None and self._idle.summary is not None)

    def so_far(self) -> list[str]:
        ledger = self._tuning.training.ledger if self._tuning is not None else None
        if self._idle is not None and self._idle.summary is not None:
            ledger = self._idle.summary.ledger
        return self._report.lines(ledger)

    def __enter__(self) -> Self:
        try:
            self.start()
        except Exception as error:
            self._fault(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(error)

    # --- events of torch ---------------------------------------------------------------------

    @property
    def _is_ours(self) -> bool:
        """Whether hotlap may act here: in the process and thread of the training, outside hotlap's own work, and while
        the script records no CUDA graph of its own."""
        is_here = self._open and not self._own_work.depth and self._home == (os.getpid(), threading.get_ident())
        return is_here and not is_recording()

    def _patched_iter(self, own: Iterate) -> Iterate:
        def iterated(loader: DataLoader[Any]) -> Iterator[Any]:
            proxy = begun = None
            try:
                if self._is_ours and not (self._idle is not None and self._idle.is_for_all):
                    proxy = self._proxy_of(loader)
                    begun = proxy.begin(loader)
                    self._begin_pictures(loader, proxy)
            except Exception as error:
                self._fault(error)
                proxy = None
            if begun is not None:
                return begun
            # Called here and not deeper: worker processes inherit all frames below them on the stack.
            made = own(loader)
            return made if proxy is None else proxy.stand_in(loader, made)

        return iterated

    def _proxy_of(self, loader: DataLoader[Any]) -> LoaderProxy:
        if loader not in self._proxies:
            started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            device = torch.device("cuda", torch.cuda.current_device()) if started else torch.device("cpu")
            proxy = LoaderProxy(
                loader, device=device, original_iter=self._original_iter, device_copies=self._device_copies_on(device)
            )
            proxy.on_batch = functools.partial(self._on_batch, proxy)
            proxy.on_begin = functools.partial(self._on_epoch_begin, proxy)
            proxy.on_end = functools.partial(self._on_epoch_end, proxy)
            proxy.on_fault = self._fault
            proxy.on_change = functools.partial(self._on_data_change, proxy)
            self._proxies[loader] = proxy
            self._watch_for_hangs(device)
        return self._proxies[loader]

    def _watch_for_hangs(self, device: torch.device) -> None:
        if self.settings.torch_s is not None:  # a notebook waits for its user
            self._hangs.begin(on_gpu=device.type == "cuda")

    def _device_copies_on(self, device: torch.device) -> DeviceCopies | None:
        if device.type == "cuda" and self._device_copies is None:
            self._device_copies = DeviceCopies(device)
            self._device_copies.on_fault = self._fault
        return self._device_copies

    def _begin_pictures(self, loader: DataLoader[Any], proxy: LoaderProxy) -> None:
        """An epoch begins, and its workers are about to start: remember pictures from when they may come again."""
        if self._decoded is None and DECODED_ONCE not in self.settings.without:
            self._decoded = decoded_once()
        if self._decoded is not None and not self._decoded.is_over:
            updates = self._run_length.updates() if self._run_length.known else None
            has_more = updates is not None and proxy.length is not None and updates > proxy.length
            samples = None if proxy.length is None else proxy.length * (proxy.batch_size or 1)
            self._decoded.begin_epoch(loader, samples, has_more=has_more)

    def _on_batch(self, proxy: LoaderProxy, seconds: float) -> None:
        if self._idle is not None or (self._tuning is not None and self._tuning.ignores(proxy)):
            return
        with self._own_work:
            if self._finder is not None:
                self._finder.batch_given(proxy)
            elif self._tuning is not None:
                self._tuning.batch_given(proxy, seconds)

    def _on_epoch_begin(self, proxy: LoaderProxy) -> None:
        if self._idle is not None:
            with self._own_work:
                self._note_epoch(self._idle, proxy)
            return
        with self._own_work:
            if self._tuning is None or proxy in self._tuning.training.proxies:
                if self._tuning is not None:
                    self._run_length.stepped(self._tuning.training.steps)  # skipped steps do not reach it
                self._run_length.began_epoch(proxy.length, sys._getframe(1))
            if self._tuning is not None:
                self._tuning.epoch_began(proxy)

    def _note_epoch(self, idle: IdleCounter, proxy: LoaderProxy) -> None:
        """A loader begins an epoch while hotlap is idle: look at its loops, unless that happened shortly before."""
        tuning, began = self._tuning, time.perf_counter()
        if tuning is None or proxy not in tuning.training.proxies:
            return
        self._run_length.stepped(tuning.training.steps + idle.steps)
        if began < self._next_look:
            self._run_length.repeated_epoch()
            return
        self._run_length.began_epoch(proxy.length, sys._getframe(2))
        ended = time.perf_counter()
        self._next_look = ended + (ended - began) / LOOK_SHARE

    def _on_epoch_end(self, proxy: LoaderProxy) -> None:
        if self._hangs.is_watching and self._length.known:
            now = self._standing()
            if now is not None and now.updates >= self._length.updates:
                self._hangs.rest()
        if self._idle is not None:
            return
        with self._own_work:
            if self._tuning is not None:
                self._tuning.epoch_ended(proxy)

    def _on_data_change(self, proxy: LoaderProxy, feed: Feed, why: str) -> None:
        with self._own_work:
            if self._tuning is not None:
                self._tuning.data_changed(proxy, feed, why)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The hook before a step: returns arguments that make torch's step do nothing, or None."""
        if self._watches_passes:
            self._stop_watching_passes()
        if self._idle is not None or is_inner(optimizer):
            return None
        if self._tuning is not None and self._is_ours:
            with self._own_work:
                return self._tuning.training.updates.before_step(optimizer, args, kwargs)
        return None

    def _replay_step(self, optimizer: Optimizer) -> bool:
        """Try to make a step of the script by a replay, and report it as a step; False if nothing was done."""
        is_replayed = False
        if self._tuning is not None and self._is_ours:
            with self._own_work:
                is_replayed = self._tuning.training.updates.replayed(optimizer)
        if is_replayed:
            self._after_step(optimizer, (), {})
        return is_replayed

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._watches_passes and not isinstance(optimizer, ManualUpdates):
            self._stop_watching_passes()
        idle = self._idle
        if idle is not None and idle.counts(optimizer):
            self._other_steps = 0
            if idle.last >= self._lookout.due_s and self._is_ours:
                self._look()
            return
        if is_inner(optimizer):
            return
        is_ours = self._is_ours
        with self._own_work:
            if self._tuning is not None:
                self._tuning.training.updates.after_step(optimizer)
            if is_ours:
                self._on_step(optimizer)
                if time.perf_counter() >= self._lookout.due_s:
                    self._look()
        # Only this method changes the hooks before a step: they must not change while torch iterates over them.
        if self._idle is not None:
            self._patches.take_out(BEFORE)
        elif not self._patches.has(BEFORE) and self._patches.has(AFTER):
            self._patches.hooked(BEFORE, register_optimizer_step_pre_hook(self._before_step))

    def _look(self) -> None:
        """Between two steps, every few seconds."""
        with self._own_work:
            self._lookout.look()
            standing = self._standing()
            if standing is None:
                return
            self._hangs.stepped(standing.updates)
            line = self._lookout.memory_line(
                standing.updates,
                filled_at=self._run_length.first_epoch_ends,
                is_steady=not standing.is_tuning,
                may_watch=standing.plan.execution.mode == "eager" and not self._compile_watch.has_begun,
            )
            if line is not None:
                summary = self._idle.summary_before if self._idle is not None else None
                (self._advice if summary is None else summary.notes).append(line)

    def _patched_backward(self, own: Callable[..., None]) -> Callable[..., None]:
        depth = 0  # hooks on gradients may call backward themselves

        @functools.wraps(own)
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            try:
                own(tensor, *args, **kwargs)
            finally:
                depth -= 1
            if not depth:
                self._on_backward(tensor)

        return untraced(backward, beneath=False)

    def _on_backward(self, loss: torch.Tensor | None = None) -> None:
        """A backward pass has ended, and no optimizer has made a step yet. `loss` is None after a replay."""
        if not self._watches_passes or not self._is_ours:
            return
        self._watch_compiling()  # no new optimizer triggers this here
        try:
            training = self._backward_passes.passed(loss)
        except Exception as error:
            self._fault(error)
            self._stop_watching_passes()
            return
        if training is not None:
            self._after_step(training, (), {})
        elif self._backward_passes.are_in_vain:
            self._stop_watching_passes()

    def _stop_watching_passes(self) -> None:
        """Stop watching backward passes: an optimizer makes the steps of this script, or nothing does."""
        if not self._watches_passes or not self._is_ours:
            return
        self._watches_passes = False
        self._patches.take_out(PASSES)
        tuning, idle, finder = self._tuning, self._idle, self._finder
        found = tuning.training.optimizers if tuning is not None else idle.optimizers if idle is not None else []
        if any(isinstance(one, ManualUpdates) for one in (*found, *(finder.optimizers if finder is not None else ()))):
            with self._own_work:
                self._end_training()
                self._finder, self._run_length, self._other_steps = LoopFinder(), RunLength(), 0

    def _clipping(self) -> Clipping | None:
        return self._tuning.training.updates.clipping if self._tuning is not None and self._is_ours else None

    # --- from steps to plans -----------------------------------------------------------------

    def _on_step(self, optimizer: Optimizer) -> None:
        if self._finder is not None:
            self._watch_calls()
            loop = self._finder.stepped(optimizer)
            if loop is not None:
                self._start_training(self._backward_passes.settled(loop))
            return
        tuning, idle = self._tuning, self._idle
        if tuning is not None and idle is None and not self._compile_watch.has_begun and tuning.skips_tuner(optimizer):
            self._other_steps = 0
            return
        if tuning is None or optimizer not in tuning.training.optimizers:
            self._other_steps += 1
            if self._other_steps >= OTHER_STEPS:
                self._switch_to(optimizer)
            return
        self._other_steps, self._idle = 0, None
        if idle is not None:
            tuning.count_idle_updates(idle.steps, idle.last)
        if optimizer is tuning.training.optimizer:
            served = tuning.training.proxies[0].served if tuning.training.proxies else None
            if isinstance(optimizer, ManualUpdates) and served is None and optimizer.rhythm > 1:
                served = optimizer.passes
            self._run_length.stepped(tuning.training.steps + 1, served)
        if self._compile_watch.has_begun:
            tuning.training.keep_calls_as_they_are(COMPILES)
            if tuning.changes_calls:
                tuning.count_step(optimizer)
                tuning.training.write_down("hotlap", "chosen", COMPILES)
                self._begin_idle(tuning)
                return
        tuning.stepped(optimizer)
        self._watch_waits(tuning)
        if tuning.has_nothing_to_do and not self._is_watching_waits(tuning):
            self._begin_idle(tuning)
            return
        if tuning.idle_updates > 1 and not self._is_watching_waits(tuning):
            self._remove_patches(tuning.training.calls)
            self._idle = IdleCounter(tuning.training.optimizers, most=tuning.idle_updates)
            return
        if tuning.looks_at_calls:
            self._watch_calls()
        else:
            self._patches.take_out(CALLS)
        self._install_shortcuts(tuning.training)

    def _switch_to(self, optimizer: Optimizer) -> None:
        """The script now trains with another optimizer: a new one, or one of an earlier training."""
        self._end_training()
        earlier, steps = self._earlier.get(optimizer), self._other_steps
        if isinstance(earlier, IdleCounter):
            self._idle = earlier
            earlier.go_on(steps)
        else:
            self._finder, self._run_length = LoopFinder({optimizer: steps}), RunLength()
            if FORWARD_PIECES not in self.settings.without and not self._compile_watch.has_begun:
                self._rescue.watch_all()

    def _start_training(self, loop: Loop) -> None:
        """The loop is known: begin to tune it."""
        self._finder, self._other_steps = None, 0
        self._idle = IdleCounter(loop.optimizers)  # in case what follows fails
        faults = self._advice
        self._advice = [*faults, *self._attention_advice.advice()]
        earlier = self._earlier.get(loop.optimizers[0])
        ledger = earlier.ledger if isinstance(earlier, TrainingSummary) else Ledger()
        training = ScriptTraining(loop, loop.loaders, ledger, self.settings.without)
        training.before += earlier.updates if isinstance(earlier, TrainingSummary) else 0
        if self._compile_watch.has_begun:
            training.keep_calls_as_they_are(COMPILES)
        if isinstance(training.optimizer, ManualUpdates):
            training.loss_replay.on_pass = self._on_backward
        if not training.proxies:
            self._run_length.began_steps(sys._getframe(1))
        for proxy in training.proxies:  # hotlap may have seen it before the script chose its device
            proxy.device, proxy.device_copies = training.device, self._device_copies_on(training.device)
        for fault in faults:
            training.write_down("out of memory", "fault", fault)
        self._calls = {id(call.module): call for call in training.calls}
        asked = self.settings.plan
        try:
            plan = asked(training) if callable(asked) else asked
            self._tuning = ScriptTuning(training, plan=plan, tune_s=self.settings.tune_s, length=self._expected_length)
        except Exception:
            training.close()
            raise
        if self._decoded is not None and not training.uses(DECODED_ONCE):  # a plan file leaves it out
            self._decoded.close()
        self._rescue.watch(loop.modules if training.uses(FORWARD_PIECES) and not self._compile_watch.has_begun else ())
        self._idle = None
        self._lookout.begin(training.device)
        self._watch_for_hangs(training.device)
        self._begin_samples(training.device)

    def _begin_samples(self, device: torch.device) -> None:
        """Sample beside the script if the user has named a folder for its run; by default hotlap leaves no thread."""
        if self.settings.out is None or self._sampler is not None:
            return
        try:
            folder = self._report.folder().path
            live = LiveScript(self.settings.name, folder, device, self._standing)
            self._sampler, self._live = Sampler(folder, live.read, live.state), live
            self._sampler.__enter__()
        except (HotlapError, OSError) as error:
            log.info("the script is not sampled: %s", first_line(error))

    def _standing(self) -> Standing | None:
        """How the training stands, for the thread of the sampler: it changes nothing."""
        tuning, idle = self._tuning, self._idle
        summary = idle.summary_before if idle is not None else None
        if tuning is not None:
            training, steps = tuning.training, idle.steps if idle is not None else 0
            updates = training.before + training.steps + steps
            return Standing(updates, self._length, training.plan, training.ledger, tuning.is_searching)
        if idle is None or summary is None:
            return None
        return Standing(summary.updates + idle.steps, self._length, summary.plan, summary.ledger, False)

    def _begin_idle(self, tuning: ScriptTuning) -> None:
        """Nothing is left to do for this training: release it, and only count its steps."""
        tuning.close()
        self._tuning, summary = None, tuning.summary()
        summary.notes, self._advice = [*summary.notes, *self._advice], []
        self._idle = IdleCounter(tuning.training.optimizers, summary)
        self._remove_patches()

    def _expected_length(self) -> Length:
        steps = self._tuning.training.steps if self._tuning is not None else 0
        updates = self._run_length.updates()
        known = updates is not None
        self._length = Length(updates if updates is not None else 2 * steps, final=False, known=known)
        return self._length

    def _end_training(self) -> None:
        tuning, self._tuning = self._tuning, None
        idle, self._idle = self._idle, None
        self._lookout.end()
        try:
            self._remove_patches()
            if tuning is not None:
                if idle is not None:
                    tuning.count_idle_updates(idle.steps, idle.last)
                tuning.close()
        finally:
            if idle is not None and idle.summary is not None:
                self._remember(idle, idle.summary, idle.optimizers)
            if tuning is not None:
                summary = tuning.summary()
                self._remember(summary, summary, tuning.training.optimizers)
            self._waits, self._watched_steps, self._advice = None, 0, []

    def _remember(
        self, earlier: IdleCounter | TrainingSummary, summary: TrainingSummary, optimizers: Sequence[Optimizer]
    ) -> None:
        self._earlier.update(dict.fromkeys(optimizers[:1], earlier))
        if self._decoded is not None:
            self._decoded.write_down(summary.ledger, summary.plan)
        if (hang := self._hangs.write_down(summary.ledger, summary.plan)) is not None:
            summary.notes.append(hang)
        self._report.add_training(summary, self._advice)

    def _remove_patches(self, calls: Sequence[ModuleCall] = ()) -> None:
        """Remove all patches of torch, except those for loaders and the hooks on steps.

        `calls` stay known for later.
        """
        self._calls = {id(call.module): call for call in calls}
        self._remove_patches_of_steps()
        if self._device_copies is not None:
            self._device_copies.remove()

    def _remove_patches_of_steps(self) -> None:
        self._patches.take_out(CALLS)
        self._shortcuts.take_out()
        self._clipping_patches.take_out_all()
        if self._waits is not None:
            self._waits.remove()

    def _install_shortcuts(self, training: ScriptTraining) -> None:
        """Replace what torch does around steps and clipping, as the plan in force requires."""
        is_captured = training.updates.clipping is not None
        if is_captured and training.uses(SHORT_STEP):
            self._shortcuts.put(training.optimizers)
        else:
            self._shortcuts.take_out()
        if is_captured and training.uses(REPLAYED_CLIPPING):
            for name, make in clipping_patches(self._clipping):
                self._clipping_patches.put(clip_grad, name, make)
        else:
            self._clipping_patches.take_out_all()

    def _watch_waits(self, tuning: ScriptTuning) -> None:
        if not self._is_watching_waits(tuning):
            return
        if self._waits is None:
            self._waits = Waits()
            self._waits.install()
            self._watched_from = time.perf_counter()
        self._watched_steps += 1
        tuning.report_next_step()
        self._waits.stepped()
        if self._watched_steps > WATCHED_STEPS:
            self._waits.remove()
            self._advice += self._waits.lines((time.perf_counter() - self._watched_from) / WATCHED_STEPS)

    def _is_watching_waits(self, tuning: ScriptTuning) -> bool:
        is_settled = tuning.training.device.type == "cuda" and not tuning.is_searching
        return is_settled and self._watched_steps <= WATCHED_STEPS and not self._compile_watch.has_begun

    # --- torch.compile -----------------------------------------------------------------------

    def _patched_init(self, own: Callable[..., None]) -> Callable[..., None]:
        """Creating an optimizer imports torch's compiler: from here on hotlap can watch it."""

        @functools.wraps(own)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            self._watch_compiling()

        return made

    def _watch_compiling(self) -> None:
        """Begin to watch torch's compiler if it is imported and not watched yet."""
        if not self._compile_watch.can_be_watched() or not self._patches.has(f"{Optimizer.__name__}.{CREATING[0]}"):
            return
        with self._own_work:
            for name in CREATING:
                self._patches.take_out(f"{Optimizer.__name__}.{name}")
            self._compile_watch.watch(is_late=True)

    def _before_compile(self) -> None:
        """torch is about to compile code of the script: remove the patches first."""
        with self._own_work:
            self._rescue.remove()
            self._remove_patches_of_steps()
            if self._tuning is not None:
                self._tuning.training.remove_patches()

    def _before_compiled_step(self) -> None:
        """torch is about to compile the step of an optimizer, and would compile hooks with it: remove them."""
        if self._patches.has(AFTER):
            self._stop_watching_passes()
            self._patches.take_out(BEFORE)
            self._patches.take_out(AFTER)
            self._report.fault(HotlapError("the script compiles its optimizer's step, which hotlap leaves alone"))

    # --- module calls ------------------------------------------------------------------------

    def _watch_calls(self) -> None:
        if self._patches.has(CALLS) or self._compile_watch.has_begun:
            return
        self._patches.put(nn.Module, "__call__", self._patched_call)

    def _patched_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        depth = [0]
        # Returns None except inside compiled functions.
        compiled_by = or_none(frame_callback) or (lambda: None)

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
                    self._finder.module_called(module)
                depth[0] += 1
                try:
                    outputs = original(module, *args, **kwargs)
                finally:
                    depth[0] -= 1
                if is_trained:
                    self._attention_advice.see(outputs)
                return outputs
            return original(module, *args, **kwargs)

        # `torch.compile(module)` keeps the function it finds here, and compiles what that function calls.
        return untraced(called, beneath=False)

    def _on_out_of_memory(self, change: str) -> None:
        """A forward pass ran out of memory, and hotlap has made it again."""
        tuning, idle = self._tuning, self._idle
        if tuning is not None:
            step = tuning.training.before + tuning.training.steps + (idle.steps if idle is not None else 0)
        elif idle is not None and idle.summary is not None:
            step = idle.summary.updates + idle.steps
        else:
            step = self._finder.steps if self._finder is not None else 0
        line = f"out of memory at step {step:,}: {change}"
        self._advice.append(line)
        if tuning is not None:
            tuning.training.write_down("out of memory", "fault", line)

    # --- faults ------------------------------------------------------------------------------

    def _fault(self, error: Exception) -> None:
        """hotlap failed: write the fault down, and let this training continue without hotlap."""
        tuning = self._tuning
        self._report.fault(error)
        self._rescue.remove()
        self._faults += not isinstance(error, HotlapError)
        optimizers = self._idle.optimizers if self._idle is not None else []
        if self._finder is not None:
            optimizers = self._finder.optimizers
        if tuning is not None:
            optimizers = tuning.training.optimizers
            if not isinstance(error, HotlapError):
                tuning.training.write_down("hotlap", "fault", first_line(error))
        try:
            self._end_training()
        except Exception as another:
            self._report.fault(another)
        self._other_steps = 0
        if self._faults >= MOST_FAULTS:
            self._finder, self._idle = None, IdleCounter(None)
        elif optimizers:
            self._finder, self._idle = None, IdleCounter(optimizers)


class _OwnWork(threading.local):
    """Inside, this thread works for hotlap: its calls are not the script's, and no exception reaches the script."""

    depth = 0

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self._on_fault = on_fault

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self.depth -= 1
        if isinstance(error, Exception):
            self._on_fault(error)
            return True
        return False
