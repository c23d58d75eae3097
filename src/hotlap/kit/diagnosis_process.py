"""A diagnosis of a script from inside: this process runs it, watches some of its updates, and ends it.

`python -m hotlap.kit.diagnosis_process SETTINGS train.py args`, as `probe_process`. Its stages:

1. `times`: updates as they are, with samples of the lines that take the time
2. `calls`: every call of torch, and waits for the GPU
3. `grows`: tensors that stay from update to update
4. `narrows`: updates of a float64 training, in float64 and in float32 in turn
5. `evaluates`: updates as they are, until an evaluation is over; left out if there was one

At the end the model's passes are timed in other ways. Nothing runs on after that.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hotlap.data.batches import Batch
from hotlap.data.sources import tensors_in
from hotlap.fitting.lost_workers import is_lost
from hotlap.kit import other_ways
from hotlap.kit.call_watch import CallWatch
from hotlap.kit.in_float32 import InFloat32
from hotlap.kit.line_sampler import FEEDING, OWN, LineSampler, users_frame, users_line
from hotlap.kit.observed import EvaluationSeen, LineCost, Observed, Pair, place
from hotlap.kit.probe import ProbeRequest
from hotlap.kit.probe_process import NUMBER, WARM, ScriptWatch, main
from hotlap.machine.limits import read_cpu
from hotlap.machine.problems import Severity
from hotlap.machine.variables import variable_problems
from hotlap.monitor.first_epoch import FirstEpoch
from hotlap.monitor.growing_memory import GrowthWatch
from hotlap.script.advice import Waits
from hotlap.script.run_length import RunLength

TIMED_S, TIMED_SHARE, TIMED, MOST_TIMED = 2.0, 0.1, 20, 2_000
"""Seconds to time, but at most this share of the diagnosis; least and most updates to time."""
CALLS_S, CALLS, MOST_CALLS = 0.3, 6, 30
LEAST_OWN = 0.02
"""The share of an update from which on a line of the user counts."""
FIRST = 10
"""Updates that an epoch's length is expected from."""
LATE, LEAST_LATE_S = 0.2, 5.0
"""The part of the time for a diagnosis, and seconds, beyond it after which the process ends wherever the script is."""
LEAST_TIMED = 3
"""Updates that are timed even if the time is over."""
NARROWED_S = 3.0
"""Seconds to try float32 for."""
LEAST_SHARE = 0.5
"""The part of the time for a diagnosis that is left after the first update, however late that comes."""
STAGES = ("warm", "times", "calls", "grows", "narrows", "evaluates", "")


class DiagnosisWatch(ScriptWatch):
    """Watches a script for what is wrong with it."""

    def __init__(self, request: ProbeRequest, report: Path, name: str) -> None:
        super().__init__(request, report, name)
        self._observed = Observed()
        self._sampler = LineSampler(threading.get_ident())
        self._calls, self._waits = CallWatch(), Waits()
        self._length = RunLength()
        self._stage = "warm"
        self._staged_at, self._until = 0.0, float("inf")
        self._times: list[float] = []
        self._fed: list[tuple[float, float]] = []
        """Since the last update: when the training asked for a batch, and how long it waited."""
        self._fed_s, self._is_fed = 0.0, False
        self._asked_at = 0.0
        self._rss = 0
        self._timed_s = min(TIMED_S, TIMED_SHARE * (request.diagnose_s or 0.0))
        self._loader_places: dict[int, str] = {}
        self._number = -1
        """The loader of the last batch."""
        self._stepping: set[int] = set()
        """Loaders of the last batch before an update."""
        self._epochs = self._epoch_at = 0
        """Epochs begun, and batches given before this one."""
        self._before_at = 0.0
        self._inputs: dict[str, tuple[nn.Module, Any, Any]] = {}
        """Model and inputs of the last call in training, and in an evaluation that records a graph."""
        self._evaluation = _Evaluation()
        self._narrow: InFloat32 | None = None
        self._has_ended = self._is_written = False

    def __enter__(self) -> None:
        super().__enter__()
        self._patches.hooked("model", register_module_forward_pre_hook(self._called))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stage == "narrows" and isinstance(error, Exception):
            kind = error = at = None  # the script may not bear the change
        self._has_ended = error is None or isinstance(error, SystemExit)
        if error is not None and is_lost(error):
            self._note_lost_workers()
        self._leave_stage()
        super().__exit__(kind, error, at)

    # --- the script's loaders ----------------------------------------------------------------------

    def _made(self, original: Callable[..., None]) -> Callable[..., None]:
        made = super()._made(original)

        @functools.wraps(original)
        def placed(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            made(loader, *args, **kwargs)
            line = users_line(sys._getframe(1))
            if line is not None:
                self._loader_places.setdefault(vars(loader)[NUMBER], place(*line))

        return placed

    def _iterated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        iterated = super()._iterated(original)

        @functools.wraps(original)
        def begun(loader: DataLoader[Any]) -> Any:
            number, asked = vars(loader).get(NUMBER, -1), time.perf_counter()
            if torch.is_grad_enabled() and number in self._stepping:
                self._evaluation_is_over(asked)
            if torch.is_grad_enabled() and (not self._stepping or number in self._stepping):
                self._length.stepped(self.seen.updates)
                self._epochs, self._epoch_at = self._epochs + 1, self._served[number]
                with suppress(TypeError):  # it may have no length
                    self._length.began_epoch(len(loader), sys._getframe(1))
                    self._observed.epoch_updates = len(loader)
            iterator = iterated(loader)
            self._fed.append((asked, time.perf_counter() - asked))  # workers start here
            return iterator

        return begun

    def _given(self, original: Callable[..., Any]) -> Callable[..., Any]:
        given = super()._given(original)

        @functools.wraps(original)
        def noted(iterator: Any) -> Any:
            is_outer, self._calls.pauses = not self._is_giving, True
            if is_outer:
                self._asked_at = time.perf_counter()
            try:
                return given(iterator)
            except Exception as error:
                if is_lost(error):
                    self._note_lost_workers()
                raise
            finally:
                self._calls.pauses = self._evaluation.is_on
                if is_outer:
                    self._number = getattr(iterator, NUMBER, -1)

        return noted

    def _note_lost_workers(self) -> None:
        self._observed.lost_workers = True
        with suppress(ValueError):  # in another thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error in the report, too

    def _note(self, batch: Batch, seconds: float) -> None:
        self._fed.append((self._asked_at, seconds))

    # --- its calls of models -----------------------------------------------------------------------

    def _watch_models(self) -> None:
        self._patches.take_out("model")  # the hook takes time
        for number, model in enumerate(self._modules):
            begins = model.register_forward_pre_hook(self._call_begins, with_kwargs=True)
            self._patches.hooked(f"call {number}", begins)
            ends = model.register_forward_hook(self._call_ends, with_kwargs=True)
            self._patches.hooked(f"call ended {number}", ends)

    def _call_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        is_other = bool(self._stepping) and self._number not in self._stepping
        if model.training and torch.is_grad_enabled() and not is_other:
            self._evaluation_is_over(self._asked_at)
            return
        if not self._evaluation.is_on and not self._evaluation.trains:
            self._evaluation.begin(self._stepped_at, self._stage)
            self._sampler.pauses = self._calls.pauses = True
        self._evaluation.called_at, self._evaluation.worked_at = time.perf_counter(), self._work_clock()

    def _call_ends(self, model: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        one = self._evaluation
        if not one.is_on:
            self._inputs["training"] = model, args, kwargs
            return
        self._wait()
        one.ended_at = time.perf_counter()
        kept = [tensor for tensor in _tensors_of(outputs) if tensor.requires_grad]
        if not torch.is_grad_enabled() or not kept:
            return
        one.with_grad_s += 0.0 if one.is_distorted else one.ended_at - one.called_at
        one.mode = "train" if model.training else "eval"
        size = sum(tensor.numel() for tensor in tensors_in((*args, *kwargs.values())))
        if size > one.largest:  # the last batch may be short
            one.largest, one.works = size, []
            self._inputs["evaluation"] = model, args, kwargs
        if size == one.largest and not one.is_distorted:
            one.works.append(self._work_clock() - one.worked_at)
        if not one.where:
            line = users_line(sys._getframe(1))
            one.where = place(*line) if line is not None else ""
        kept[0].register_hook(self._went_back)  # type: ignore[no-untyped-call]

    def _work_clock(self) -> float:
        """On the CPU without the time in which this thread waits for a core, as calls are timed without gradients."""
        return time.perf_counter() if self._on_gpu else time.thread_time()

    def _went_back(self, gradient: Tensor) -> None:
        """A backward pass follows such a call: it is a part of the training, in whatever mode."""
        self._evaluation.trains = True
        self._evaluation.leave()
        self._inputs.pop("evaluation", None)
        self._sampler.pauses = self._calls.pauses = False

    def _evaluation_is_over(self, at: float) -> None:
        if self._evaluation.is_on:
            self._evaluation.end(max(at, self._evaluation.ended_at), self.seen.updates)
            self._sampler.pauses = self._calls.pauses = False

    # --- its updates -------------------------------------------------------------------------------

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._steps(optimizer, args, kwargs)
        self._evaluation_is_over(self._evaluation.ended_at)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._before_at = self._stepped_at  # the base sets it anew
        super()._stepped(optimizer, args, kwargs)

    def _goes_on(self) -> None:
        """After an update: go through the stages."""
        now, updates = time.perf_counter(), self.seen.updates
        self._stepping.add(self._number)
        paused_s, self._evaluation.last_s = self._evaluation.last_s, 0.0
        fed_s = sum(spent for asked, spent in self._fed if asked >= self._evaluation.over_at)
        self._is_fed = bool(self._fed)
        self._fed.clear()
        if updates == 1:
            self._begin_time()
        elif self._stage == "times":
            self._times.append(now - self._before_at - paused_s)
            self._fed_s += fed_s
        elif self._stage == "calls":
            self._calls.update_ends()
            self._waits.stepped()
        elif self._stage == "grows" and self._turns is not None:
            self._wait()
            self._turns.end()
        elif self._stage == "narrows" and self._narrow is not None:
            self._wait()
            self._narrow.update_took(time.perf_counter() - self._before_at - paused_s)
        if self._is_done():
            self._next()
        self._stepped_at = time.perf_counter()  # what hotlap did here is no part of the next update

    def _begin_time(self) -> None:
        assert self._request.diagnose_s is not None
        most_s = self._request.diagnose_s
        self._observed.begun_s = max(0.0, time.time() - psutil.Process().create_time())
        left_s = max(LEAST_SHARE * most_s, most_s - self._observed.begun_s)
        self._until = time.monotonic() + left_s
        timer = threading.Timer(left_s + max(LEAST_LATE_S, LATE * most_s), self._end_late)
        timer.daemon = True
        timer.start()

    def _is_done(self) -> bool:
        """Whether the current stage is over."""
        spent_s = time.perf_counter() - self._staged_at
        if self._stage == "warm":
            return self.seen.updates >= WARM
        if time.monotonic() > self._until:
            return self._stage != "times" or len(self._times) >= LEAST_TIMED
        if self._stage == "times":
            count = len(self._times)
            if count == TIMED:
                self._note_length()
            is_third = 3 * self.seen.updates > (self._observed.total_updates or math.inf)  # leave some for later stages
            return count >= MOST_TIMED or (count >= TIMED and (spent_s >= self._timed_s or is_third))
        if self._stage == "calls":
            return self._calls.updates >= (CALLS if spent_s >= CALLS_S else MOST_CALLS)
        if self._stage == "grows":
            return self._turns is not None and self._turns.are_done
        if self._stage == "narrows":
            return self._narrow is None or self._narrow.is_done or spent_s >= NARROWED_S
        return self._evaluation.count > 0 or not self._evaluates_soon()

    def _evaluates_soon(self) -> bool:
        """Whether an evaluation may come within the time that is left: after this epoch, unless earlier had none."""
        length, main = self._observed.epoch_updates, self._main
        if length is None or main < 0 or (self._epochs > 1 and not self._evaluation.was_there):
            return False
        left = max(1, length - (self._served[main] - self._epoch_at))
        step_s = sum(self._times) / max(1, len(self._times))
        return left * step_s < self._until - time.monotonic()

    def _next(self) -> None:
        """Leave the current stage, and begin the next one that is worth it."""
        self._leave_stage()
        if time.monotonic() > self._until and self._stage != "warm":
            self._end()
        self._stage = STAGES[STAGES.index(self._stage) + 1]
        if self._stage == "times":
            self._watch_models()
            if not self._is_fed:  # what a loader gave before the training is no part of it
                self._length, self._observed.epoch_updates = RunLength(), None
                self._length.began_steps(sys._getframe(1))
            loop = users_frame(sys._getframe(1))
            self._sampler.loop = loop.f_code if loop is not None else None
            self._wait()
            self._rss = psutil.Process().memory_info().rss
            self._sampler.start()
        elif self._stage == "calls":
            self._calls.__enter__()  # type: ignore[no-untyped-call]
            if self._on_gpu:
                self._waits.install()
        elif self._stage == "grows":
            self._turns = GrowthWatch(self._open_watch(lines=True), graphs_every=2)
        elif self._stage == "narrows" and self._optimizer is not None:
            models = [one for one in self._modules if any(True for _ in one.parameters())]
            self._narrow = InFloat32(models, self._optimizer) if InFloat32.applies(models) else None
        self._staged_at = time.perf_counter()
        if not self._stage:
            self._end()
        if self._stage in ("narrows", "evaluates") and self._is_done():
            self._next()

    def _leave_stage(self) -> None:
        observed = self._observed
        if self._stage == "times":
            self._sampler.stop()
            self._wait()
            grown = psutil.Process().memory_info().rss - self._rss
            observed.updates = len(self._times)
            observed.rss_an_update = grown / max(1, observed.updates)
            self._note_length()
        elif self._stage == "calls":
            self._calls.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._waits.remove()
        elif self._stage == "grows" and self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
            if self._turns is not None and self._turns.are_done:
                here = f"{Path.cwd()}/"
                observed.held = [asdict(replace(one, line=one.line.removeprefix(here))) for one in self._turns.growth()]
                observed.graph_steps = self._turns.graph_steps
                observed.graph_holder = self._turns.graph_holder() if observed.graph_steps else ""
        elif self._stage == "narrows" and self._narrow is not None:
            self._narrow.leave()
            observed.wide_updates, self._narrow = self._narrow.pair(), None

    def _note_length(self) -> None:
        """How many updates the training makes, as far as the script shows it."""
        self._length.stepped(self.seen.updates, self._served[self._main] - self._epoch_at if self._is_fed else None)
        self._observed.total_updates = self._length.updates() if self._length.known else None

    def _end_late(self) -> None:
        """In a thread: end the process in the middle of an update or an evaluation."""
        if self._is_written:
            return  # the main thread is about to end it
        self._inputs.clear()
        with suppress(RuntimeError):  # the script may change a dictionary meanwhile
            self._write()
        os._exit(0)

    # --- the report --------------------------------------------------------------------------------

    def _write(self) -> None:
        if not self._is_written:
            self._is_written = True
            self._sampler.stop()
            self._patches.take_out_all()
            self._observe()
        super()._write()

    def _observe(self) -> None:
        seen, observed = self.seen, self._observed
        count = len(self._times)
        if count:
            observed.step_s, observed.feeding_s = sum(self._times) / count, self._fed_s / count
            seen.laps, seen.lap_updates = [[sum(self._times), count * self._samples_an_update]], [count]
        if self._has_ended:
            observed.total_updates = seen.updates
        observed.ended, observed.unseen = self._has_ended, list(self._unseen())
        observed.loader_at = self._loader_places.get(self._main, "")
        self._observe_epoch()
        self._observe_lines(max(1, count))
        observed.copies, observed.retained = self._calls.copies(), self._calls.retained()
        observed.waits = list(self._lines_that_wait())
        problems = variable_problems(os.environ, read_cpu().cores)
        observed.variables = [one.what for one in problems if one.severity == Severity.SLOWS and one.key != "workers"]
        if seen.error is None:
            self._try_other_ways()
        observed.evaluation = self._evaluation.seen(self._without_gradients())
        seen.diagnosis = asdict(observed)

    def _lines_that_wait(self) -> Iterator[LineCost]:
        """Lines that wait for the GPU, with the calls that serve the reading alone."""
        seen, step_s = set[tuple[str, int]](), self._observed.step_s
        for file, line, shown, times, cost_s in self._waits.costs(step_s):
            reading_s = self._calls.readings_at(file, line) if (file, line) not in seen else 0.0
            seen.add((file, line))
            yield LineCost(where=place(file, line), what=shown, update_s=min(step_s, cost_s + reading_s), times=times)

    def _unseen(self) -> Iterator[str]:
        """What there was no time to look for."""
        if self._calls.updates < CALLS:
            yield "copies and waits"
        if self._turns is None or not self._turns.are_done:
            yield "memory that grows"
        is_first = self._observed.epoch_updates is not None and self._epochs <= 1
        if is_first and not self._has_ended and not self._evaluation.was_there:
            yield "evaluations"

    def _observe_epoch(self) -> None:
        """Compare the first epoch with its first updates, if it was timed as a whole."""
        length, times = self._observed.epoch_updates, self._times
        if length is None or not 3 * FIRST <= length <= len(times):
            return
        expected_s, took_s = length * sum(times[:FIRST]) / FIRST, sum(times[:length])
        first = FirstEpoch(expected_s=expected_s, steps_s=took_s, feeding_s=self._fed_s * length / len(times))
        self._observed.first_epoch, self._observed.slower_s = first.problems(), max(0.0, took_s - expected_s)

    def _observe_lines(self, count: int) -> None:
        sampler, observed = self._sampler, self._observed
        observed.sampler_share = sampler.spent_s / sampler.watched_s if sampler.watched_s else 0.0
        fed = [(spent, one) for one, spent in sampler.seconds.items() if one.part == FEEDING]
        if fed:
            _, most = max(fed, key=lambda row: row[0])
            observed.feeding_at = place(most.file, most.line)
        for one, spent in sampler.seconds.items():
            update_s = spent / count
            if one.part != OWN or update_s < LEAST_OWN * observed.step_s:
                continue
            # An operator or a method of a tensor leaves no frame of torch: its calls say how long it computes.
            if self._calls.updates and self._calls.seconds_at(one.file, one.line) < update_s / 2:
                caller = place(*one.caller) if one.caller is not None else ""
                what, where = sampler.through[one], place(one.file, one.line)
                observed.own.append(LineCost(where=where, what=what, update_s=update_s, caller=caller))
        observed.own.sort(key=lambda line: -line.update_s)

    def _try_other_ways(self) -> None:
        if "training" not in self._inputs:
            return
        model, args, kwargs = self._inputs["training"]
        dtypes = {p.dtype for p in model.parameters()}
        with suppress(Exception):  # a model may be anything
            if torch.float64 in dtypes:
                self._observed.wide = other_ways.in_float32(model, args, kwargs)
        has_gpu = torch.cuda.is_available()
        with suppress(Exception):
            if has_gpu and not self._on_gpu:
                self._observed.on_cpu = other_ways.on_gpu(model, args, kwargs)
        is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()
        if has_gpu and self._on_gpu and not is_one_of_many:
            used = {p.device for p in model.parameters()}
            self._observed.gpus = torch.cuda.device_count() if len(used) == 1 else 0

    def _without_gradients(self) -> Pair | None:
        if "evaluation" not in self._inputs:
            return None
        with suppress(Exception):
            return other_ways.without_gradients(*self._inputs["evaluation"])
        return None


class _Evaluation:
    """The evaluations so far."""

    def __init__(self) -> None:
        self.is_on = self.trains = self.is_distorted = False
        self.count = 0
        self.over_at = self.last_s = self.called_at = self.ended_at = 0.0
        """When the last one was over, and its seconds until the update after it."""
        self.with_grad_s, self.where, self.mode = 0.0, "", "eval"
        self.largest, self.worked_at = 0, 0.0
        self.works: list[float] = []
        """Seconds of each call with the largest batch that records a graph."""
        self._began_at, self._seconds = 0.0, 0.0
        self._at: list[int] = []
        """Updates made before each."""

    @property
    def was_there(self) -> bool:
        """Whether there was one, be it while calls were watched."""
        return bool(self._at)

    def begin(self, at: float, stage: str) -> None:
        self.is_on, self._began_at, self.ended_at = True, at, at
        self.is_distorted = stage in ("calls", "grows", "narrows")

    def leave(self) -> None:
        """It was no evaluation."""
        self.is_on, self.with_grad_s, self.where = False, 0.0, ""

    def end(self, at: float, updates: int) -> None:
        self.is_on, self.over_at, self.last_s = False, at, at - self._began_at
        self._at.append(updates)
        if not self.is_distorted:
            self.count += 1
            self._seconds += self.last_s

    def seen(self, calls: Pair | None) -> EvaluationSeen | None:
        if not self.count:
            return None
        spans = [after - before for before, after in zip(self._at, self._at[1:], strict=False)]
        return EvaluationSeen(
            seconds=self._seconds / self.count,
            every=sum(spans) / len(spans) if spans else self._at[0],
            with_grad_s=self.with_grad_s / self.count,
            where=self.where,
            mode=self.mode,
            calls=replace(calls, now_s=median(self.works)) if calls is not None and self.works else calls,
        )


def _tensors_of(outputs: Any) -> list[Tensor]:
    return tensors_in(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs)


if __name__ == "__main__":
    main(DiagnosisWatch)
