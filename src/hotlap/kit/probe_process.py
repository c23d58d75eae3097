"""A probe of a script from inside: this process runs the script, watches some of its updates, and ends it.

`python -m hotlap.kit.probe_process SETTINGS train.py args`. The request names what to change; nothing else changes.
The process writes what it has seen to a file. `PlanProbe` runs the script under a plan of hotlap.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hotlap.core.errors import HotlapError, first_line
from hotlap.core.plan import Feed, Numerics, Plan
from hotlap.core.torch_private import LoaderIterator
from hotlap.data.background_fetch import end_with
from hotlap.data.batches import Batch, count_samples, map_tensors
from hotlap.engine.blocks import Checkpointing, checkpointed_blocks
from hotlap.engine.precision import precision_context
from hotlap.engine.step import is_out_of_memory
from hotlap.kit.bench import count_training, rest_of, room_on
from hotlap.kit.probe import FEEDS, LAP_ROUNDS, ProbeRequest, ProbeResult
from hotlap.kit.samples import LongestSampler, costs_of, longest_in
from hotlap.kit.update_watch import UpdateWatch
from hotlap.kit.working_copy import WriteGuard
from hotlap.monitor.growing_memory import GrowthWatch
from hotlap.monitor.live_tensors import LiveTensors, is_users_file
from hotlap.monitor.savings import model_facts
from hotlap.monitor.work import WorkCount
from hotlap.script.calls.eager import why_not_changed
from hotlap.script.feed.epoch import EpochIterator
from hotlap.script.patches import Patches
from hotlap.script.running import Target, run
from hotlap.script.session import WATCHED_STEPS, Session, Settings
from hotlap.script.training import ScriptTraining
from hotlap.store.cache import default_root
from hotlap.store.files import save_plan, write_text

WARM = 3
"""Updates before timing: the first has no optimizer state yet."""
MOST_SHORT = 3
"""Most updates to skip before memory is counted: short ones at the end of an epoch, and those after an evaluation."""

SAVES: tuple[tuple[Any, str], ...] = (
    (torch, "save"),
    (vars(torch.jit).get("RecursiveScriptModule"), "save"),
    (safetensors.torch, "serialize_file"),
)
"""Functions that save weights past Python."""
WORKERS_OWN = "Original Traceback (most recent call last):"
"""With this torch begins the message of an error in a loader's worker."""
NUMBER = "_hotlap_number"
"""The attribute that numbers loaders and their iterators, in the order in which the first of each is made."""


class ScriptWatch:
    """Watches a script while it trains, and ends it after that."""

    def __init__(self, request: ProbeRequest, report: Path, name: str) -> None:
        self._request, self._report, self.seen = request, report, ProbeResult()
        self.guard = WriteGuard(report.parent, default_root())
        self._plan_probe = PlanProbe(name, request, report.parent) if request.has_plan else None
        self._patches = Patches(in_forks=True)  # forks of the script may save files, too
        self._makers: dict[Hashable, int] = {}
        self._loaders: dict[int, DataLoader[Any]] = {}
        """The last loader of each number."""
        self._optimizer: Optimizer | None = None
        self._served: Counter[int] = Counter()
        self._samples: Counter[int] = Counter()
        """By the number of their loader, as in the fields below."""
        self._samples_before: Counter[int] = Counter()
        self._samples_last: dict[int, int] = {}
        """Samples of the last update."""
        self._sizes: dict[int, Counter[int]] = defaultdict(Counter)
        """Counts of updates by their number of samples."""
        self._lap: tuple[float, Counter[int]] | None = None
        self._watch: UpdateWatch | None = None
        self._turns: GrowthWatch | None = None
        self._work: WorkCount | None = None
        self._counted = 0
        """Updates whose work was counted."""
        self._modules: list[nn.Module] = []
        self._sample: Batch | None = None
        """A batch of the training, without its values."""
        self._is_giving = False
        self._asked: dict[int, float] = {}
        self._first_s: dict[int, float] = {}
        self._stepped_at = 0.0
        self._paused_at: float | None = None
        """When the current evaluation began; None outside of one."""
        self._paused_s, self._lap_updates = 0.0, 0
        self._left_out = 0

    def __enter__(self) -> None:
        put = self._patches.put
        for owner, name in SAVES:
            if hasattr(owner, name):  # TorchScript may be off
                put(owner, name, self.guard.before_saving)
        put(DataLoader, "__init__", self._made)
        put(DataLoader, "_get_iterator", self._iterated)
        put(LoaderIterator, "__next__", self._given)
        if self._plan_probe is not None:
            self._plan_probe.start()
            put(EpochIterator, "__next__", self._given)
        if self._request.keeps_gradients:
            for kind in (Optimizer, nn.Module):
                put(kind, "zero_grad", _in_place)
        if self._request.without:
            put(os._Environ, "__setitem__", self._set_unless_left_out)
        if self._request.watches or self._request.checkpoint:
            self._patches.hooked("model", register_module_forward_pre_hook(self._called))
        self._patches.hooked("steps", register_optimizer_step_pre_hook(self._steps))
        self._patches.hooked("step", register_optimizer_step_post_hook(self._stepped))

        if self._request.begins_s is not None:
            timer = threading.Timer(self._request.begins_s, self._look_whether_it_trains)
            timer.daemon = True
            timer.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Report a script that has ended by itself, or by an error."""
        self._patches.take_out_all()
        if error is not None and not isinstance(error, SystemExit):
            line = _line_of(error) if isinstance(error, Exception) else "it was interrupted"
            is_full = is_out_of_memory(error)
            own = [frame for frame in traceback.extract_tb(at) if is_users_file(frame.filename)]
            self.seen.out_of_memory = line if is_full else None
            kind_of = "" if isinstance(error, HotlapError) else f"{type(error).__name__}: "  # its message is complete
            self.seen.error = None if is_full else f"{kind_of}{line}{_place_of(error, own)}"
            self.seen.trace = "".join([*traceback.format_list(own), *_lines_of(error)]).rstrip()
        self._write()

    def _set_unless_left_out(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def put(environment: Any, name: str, value: str) -> None:
            if name not in self._request.without:
                original(environment, name, value)

        return put

    def _look_whether_it_trains(self) -> None:
        """In a thread: end the probe if there is no update yet."""
        if self.seen.updates:
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        own = [one for one in traceback.extract_stack(frame) if is_users_file(one.filename)]
        self.seen.late = f"{Path(own[-1].filename).name}:{own[-1].lineno}: {own[-1].line}" if own else "its start"
        write_text(self._report, json.dumps(asdict(self.seen), ensure_ascii=False))
        os._exit(1)

    # --- the script's loaders ----------------------------------------------------------------------

    def _made(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def made(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            given = signature.bind(loader, *args, **kwargs).arguments
            number = self._makers.setdefault(maker_of(given["dataset"]), len(self._makers))
            self._loaders[number] = loader
            vars(loader)[NUMBER] = number  # copies have it, too
            if number == self._request.loader:
                changed = with_change({k: v for k, v in given.items() if k != "self"}, self._request.change)
                args, kwargs = (), with_longest(changed) if self._request.longest else changed
            original(loader, *args, **kwargs)

        return made

    def _iterated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterated(loader: DataLoader[Any]) -> Any:
            number = vars(loader).get(NUMBER, -1)
            self._asked.setdefault(number, time.perf_counter())
            iterator = original(loader)
            vars(iterator)[NUMBER] = number
            return iterator

        return iterated

    def _given(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def given(iterator: Any) -> Any:
            if self._is_giving:  # for another iterator, which gives the script its batches
                return original(iterator)
            self._pause(not torch.is_grad_enabled())
            asked, self._is_giving = time.perf_counter(), True
            try:
                batch = original(iterator)
            finally:
                self._is_giving = False
            number = getattr(iterator, NUMBER, -1)
            if number not in self._first_s and number in self._asked:
                self._first_s[number] = time.perf_counter() - self._asked[number]
            if torch.is_grad_enabled():  # otherwise the batch is for an evaluation
                self._served[number] += 1
                self._samples[number] += count_samples(batch) or 0
                self._note(batch, time.perf_counter() - asked)
            return batch

        return given

    def _note(self, batch: Batch, seconds: float) -> None:
        """Note a batch of the training, and how long the training has waited for it."""
        if self._plan_probe is not None:
            self._plan_probe.gave(seconds)
        if self._request.watches and self._sample is None:
            with suppress(Exception):  # a batch may be anything
                self._sample = map_tensors(batch, lambda tensor: tensor.to("meta"))

    def _pause(self, evaluates: bool) -> None:
        """Stop the clock of the lap during an evaluation, and do not count its work."""
        if evaluates and self._paused_at is None:
            self._paused_at = self._stepped_at
        elif not evaluates and self._paused_at is not None:
            self._paused_s += time.perf_counter() - self._paused_at
            self._paused_at = None
        if self._work is not None:
            self._work.is_paused = self._paused_at is not None

    def _called(self, module: nn.Module, inputs: Any) -> None:
        """Note a called module; those inside of no other are the script's models."""
        if module not in self._modules and not any(module in set(one.modules()) for one in self._modules):
            self._modules.append(module)

    # --- its updates -------------------------------------------------------------------------------

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.update_begins()
        if self._work is not None:
            self._work.step_begins(optimizer)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note an update of an optimizer; only those of the first count."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if self._watch is not None:
            self._watch.update_ends()
        if self._work is not None:
            self._work.step_ends(optimizer)
        if optimizer is not self._optimizer:
            return
        seen, self._stepped_at = self.seen, time.perf_counter()
        seen.updates += 1
        self._samples_last = {one: count - self._samples_before[one] for one, count in self._samples.items()}
        for one, count in self._samples_last.items():
            self._sizes[one][count] += 1
        self._samples_before = self._samples.copy()
        if self._plan_probe is not None:
            self._plan_probe.stepped()
            if self._plan_probe.why_given_up() is not None:
                self._end()
        if self._request.checkpoint and seen.updates == 1:
            self._checkpoint()
        self._goes_on()

    def _goes_on(self) -> None:
        """After an update: warm up, time laps, then count memory or work."""
        if self._work is not None:
            self._work_goes_on(self._work)
        elif self._watch is not None:
            self._count_ends()
        elif self._lap is not None:
            self._lap_goes_on(*self._lap)
        elif self.seen.updates >= WARM and (self._plan_probe is None or self._plan_probe.has_settled):
            self._begin()

    def _lap_goes_on(self, began: float, samples: Counter[int]) -> None:
        """Note an update of a lap, with the time and the samples at which the lap began."""
        # The lap ends when the device is done; an earlier look at the clock would flatter it.
        self._lap_updates += 1
        spent_s = time.perf_counter() - began - self._paused_s
        workers = self._workers
        is_round = self._lap_updates >= LAP_ROUNDS * workers and self._lap_updates % max(1, workers) == 0
        if spent_s >= self._request.lap_s and is_round:
            self._wait()
            main = self._main
            made = self._samples[main] - samples[main]
            self.seen.laps.append([time.perf_counter() - began - self._paused_s, made])
            self.seen.lap_updates.append(self._lap_updates)
            self._begin()
        if len(self.seen.laps) >= self._request.laps:
            self._lap = None
            self._count_begins() if self._request.counts else self._end()

    @property
    def _model(self) -> nn.Module | None:
        """The called module with the most parameters."""
        sizes = [sum(p.numel() for p in one.parameters()) for one in self._modules]
        return self._modules[sizes.index(max(sizes))] if any(sizes) else None

    def _checkpoint(self) -> None:
        """Checkpoint the blocks of its model from here on, or end the probe with the reason."""
        model = self._model
        self.seen.why_not = "it calls no module as a whole" if model is None else why_not_changed(model)
        if model is None or self.seen.why_not is not None:
            self._end()
        Checkpointing(model, len(checkpointed_blocks(model))).__enter__()

    def _begin(self) -> None:
        self._patches.take_out("model")  # the hook takes time
        self._wait()
        if self._on_gpu and not self.seen.laps:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._paused_s, self._lap_updates = 0.0, 0
        self._lap = (time.perf_counter(), self._samples.copy())

    def _count_begins(self) -> None:
        """On a GPU read torch's own peaks; on the CPU, or if the request asks, count operations."""
        if self._optimizer is None or (self._on_gpu and not self._request.watches):
            self._end()
        if self._on_gpu:
            self.seen.peak_bytes, self.seen.taken_bytes = self._peaks()
        if self._plan_probe is not None:
            self._plan_probe.cast_here()
        self._open_watch(lines=False)

    def _open_watch(self, *, lines: bool) -> LiveTensors:
        optimizer = self._optimizer
        assert optimizer is not None
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        live = LiveTensors(weights[0].device, lines=lines)
        live.know_libraries()
        count_training(live, weights, optimizer)
        live.forget_peak()
        self._watch = UpdateWatch(live, weights, self._modules, sees_updates=False).__enter__()
        return live

    def _count_ends(self) -> None:
        """Report the counted update; after the first whole one, look for memory that grows."""
        watch = self._watch
        assert watch is not None
        live = watch.live
        if not self.seen.account:
            is_short = self._samples_last.get(self._main, 0) < self._samples_an_update
            if (is_short or watch.evaluated) and self._left_out < MOST_SHORT:
                self._left_out += 1
                watch.__exit__(None, None, None)
                self._open_watch(lines=False)
                return
            if not self._on_gpu:
                self.seen.peak_bytes = self.seen.taken_bytes = live.peak_bytes
            self.seen.account = watch.account
            watch.__exit__(None, None, None)
            if self._request.works:
                self._watch = None
                self._work = WorkCount(sees_steps=False).__enter__()
                return
            if not self._request.watches:
                self._end()
            self._turns = GrowthWatch(self._open_watch(lines=True))
        elif self._turns is not None:
            self._wait()
            self._turns.end()
            if self._turns.are_done:
                watch.__exit__(None, None, None)
                self.seen.account["held"] = [asdict(one) for one in self._turns.growth()]
                self._end()

    def _work_goes_on(self, work: WorkCount) -> None:
        """Note a counted update, and report the work after enough of them."""
        self._counted += 1
        if self._counted == self._request.works:
            work.__exit__(None, None, None)
            self.seen.work = work.work(self._counted).to_dict()
            self._end()

    def _peaks(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    @property
    def _on_gpu(self) -> bool:
        if self._optimizer is None:
            return False
        return any(p.is_cuda for group in self._optimizer.param_groups for p in group["params"])

    @property
    def _samples_an_update(self) -> int:
        """The most frequent number of samples; among several nearly as frequent, the largest."""
        sizes = self._sizes[self._main]
        most = max(sizes.values(), default=0)
        return max((size for size, count in sizes.items() if 2 * count >= most), default=0)

    @property
    def _main(self) -> int:
        """The number of the loader that brings the training's batches, the first of several; -1 without one."""
        return max(self._served, key=lambda one: self._served[one], default=-1)

    @property
    def _workers(self) -> int:
        """Workers of that loader."""
        return self._loaders[self._main].num_workers if self._main >= 0 else 0

    def _describe_loader(self) -> None:
        seen, number = self.seen, self._main
        if number < 0:
            seen.why_fixed = "its batches do not come from a DataLoader"
            return
        seen.first_batch_s = self._first_s.get(number)
        seen.other_loaders = sum(2 * count >= self._served[number] for count in self._served.values()) - 1
        describe_loader(self._loaders, number, seen)
        if self._request.lengths:
            describe_lengths(self._loaders[number], seen)
        if self._request.transforms:
            seen.transforms = [(one.name, one.sample_s) for one in costs_of(self._loaders[number].dataset)]

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _end(self) -> NoReturn:
        """Report, and end the process at once: the script does not clean up, save or evaluate."""
        self._write()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.disable()
        os._exit(0)

    def _write(self) -> None:
        seen = self.seen
        if self._optimizer is not None:
            seen.rest_bytes = rest_of(
                [p for group in self._optimizer.param_groups for p in group["params"]], self._optimizer
            )
        seen.samples_an_update = self._samples_an_update
        self._describe_loader()
        if self._plan_probe is not None:
            seen.refused, seen.first_batch_s = self._plan_probe.refused, self._plan_probe.start_s
            seen.why_not = self._plan_probe.why_not_probed()
        model = self._model
        if self._request.watches and model is not None:
            seen.model = asdict(model_facts(model, self._sample, next(model.parameters()).device))
        if self._on_gpu:
            device = torch.device("cuda", torch.cuda.current_device())
            seen.device, seen.room_bytes = str(device), room_on(device)
            if not seen.peak_bytes:
                seen.peak_bytes, seen.taken_bytes = self._peaks()
        else:
            seen.room_bytes = room_on(torch.device("cpu"))
        write_text(self._report, json.dumps(asdict(seen), ensure_ascii=False))


def _line_of(error: Exception) -> str:
    """The message; for an error in a loader's worker, with the message of the worker's error."""
    if isinstance(error, SyntaxError):
        return error.msg
    of_worker = str(error).rstrip().splitlines()[-1] if WORKERS_OWN in str(error) else ""
    return f"{first_line(error)} {of_worker}".rstrip()


def _lines_of(error: BaseException) -> list[str]:
    """The lines of the message itself, beside those of the traceback."""
    if isinstance(error, SyntaxError):
        return traceback.format_exception_only(error)[:-1]
    return [str(error).partition(WORKERS_OWN)[2].lstrip("\n")] if WORKERS_OWN in str(error) else []


def _place_of(error: BaseException, own: list[traceback.FrameSummary]) -> str:
    """Where in the user's code the error arose, in words."""
    if isinstance(error, SyntaxError):
        return f" ({Path(error.filename or '').name}:{error.lineno})"
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _in_place(original: Callable[..., None]) -> Callable[..., None]:
    """A `zero_grad` that keeps the memory of gradients."""

    @functools.wraps(original)
    def zero_grad(owner: Any, set_to_none: bool = True) -> None:
        original(owner, set_to_none=False)

    return zero_grad


# --- the script's loaders, made with other arguments ---------------------------------------------------------


def maker_of(dataset: Any) -> Hashable:
    """What tells loaders apart: the lines that make the current one, and the type and length of its dataset.

    A loader that is made anew each epoch gives the same value each time, in every process that runs the script.
    """
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti))  # a line may make several
        frame = frame.f_back
    samples = None
    with suppress(Exception):  # its class may have no length
        samples = len(dataset)
    return tuple(lines), type(dataset), samples


def with_change(given: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A loader's arguments with some replaced; without workers, arguments for workers go."""
    given = {**given, **given.pop("kwargs", {}), **change}
    if not given.get("num_workers"):
        for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
            given.pop(name, None)
    return given


def with_longest(given: dict[str, Any]) -> dict[str, Any]:
    """A loader's arguments with the longest samples in every batch."""
    longest = longest_in(given["dataset"])
    if longest is None:
        return given
    return {**given, "sampler": LongestSampler(longest.order, given.get("batch_size", 1)), "shuffle": False}


def describe_loader(loaders: Mapping[int, DataLoader[Any]], number: int, seen: ProbeResult) -> None:
    """Note the settings of the loader of this number, and whether its batch size can be set."""
    loader = loaders[number]
    seen.workers, seen.pinned = loader.num_workers, bool(loader.pin_memory)
    seen.loader, seen.batch_size = number, loader.batch_size
    seen.iterates = isinstance(loader.dataset, IterableDataset)
    try:
        seen.samples = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        seen.samples = None
    if loader.batch_size is None:
        sampler = loader.batch_sampler
        # Accelerate makes a loader from the batches of another, for instance.
        first = next((n for n, one in loaders.items() if one.batch_sampler is sampler and n < number), None)
        if first is not None and type(sampler) is BatchSampler:
            seen.loader, seen.batch_size = first, sampler.batch_size
        else:
            seen.why_fixed = f"a {type(sampler).__name__} makes its batches"


def describe_lengths(loader: DataLoader[Any], seen: ProbeResult) -> None:
    """Note the longest samples of its dataset, unless the script has its own sampler."""
    if type(loader.sampler) not in (RandomSampler, SequentialSampler, LongestSampler):
        return
    try:
        longest = longest_in(loader.dataset)
    except Exception as error:  # the script may never ask for these samples
        why = type(error).__name__
        seen.longest = f"the lengths of samples cannot be read ({why}), so batches are the first that came"
        return
    if longest is not None:
        seen.longest, seen.varies = longest.words, longest.varies


# --- the script under a plan ---------------------------------------------------------------------------------


SETTLES = 3
"""Updates under the plan before timing."""
MOST_UNFOUND = 16
"""Updates within which hotlap has to find the loop."""


class PlanProbe:
    """Runs a script under its own plan with one change, as `hotlap run --plan FILE` does; reports if it obeys."""

    def __init__(self, name: str, request: ProbeRequest, folder: Path) -> None:
        """`folder` holds the run folder, and goes with the probe."""
        self._request, self._folder = request, folder
        self._session = Session(Settings(name=name, plan=self._named, out=folder / "run"))
        self._training: ScriptTraining | None = None
        self._plan = Plan()
        self._refusal: str | None = None
        self._asked_at = 0.0
        self._held_s: float | None = None
        self._updates = self._settled = 0
        self.refused: dict[str, str] = {}
        """Feeds that hotlap cannot bring its batches by, with reasons."""
        self.start_s: float | None = None
        """Seconds until the first batch under the plan, with the time to hold data; None before that."""

    def start(self) -> None:
        """Start the session. Hooks that have to run after the session's come later."""
        self._session.start()

    def _named(self, training: ScriptTraining) -> str:
        """Give the session a plan file, once it has found the training."""
        self._asked_at, self._training = time.perf_counter(), training
        own, request = training.own, self._request
        if request.feed is not None:
            plans = {kind: own.with_feed(Feed(kind=kind)) for kind in FEEDS}
            reasons = {kind: training.supports(plan) for kind, plan in plans.items()}
            self.refused = {kind: reason for kind, reason in reasons.items() if reason is not None}
            self._plan = plans[request.feed]
        else:
            self._plan = own.but(precision=request.precision)
        self._refusal = training.supports(self._plan)
        path = self._folder / "plan.toml"
        save_plan(self._plan if self._refusal is None else own, path)
        return str(path)

    def stepped(self) -> None:
        """Note an update of the script."""
        self._updates += 1
        training = self._training
        if training is None:
            return
        if self._held_s is None:
            self._held_s = time.perf_counter() - self._asked_at
        elif not any(proxy.waiting for proxy in training.proxies):
            self._settled += 1

    def gave(self, seconds: float) -> None:
        """Note a batch of the script, and how long the script has waited for it."""
        training = self._training
        if training is None or self._held_s is None or self.start_s is not None:
            return
        if not any(proxy.waiting for proxy in training.proxies):
            self.start_s = self._held_s + seconds

    @property
    def has_settled(self) -> bool:
        """Whether the script has made some updates under the plan, so that laps are of the plan alone."""
        training = self._training
        # On a GPU a session looks for waits first, which takes time.
        looks = WATCHED_STEPS if training is not None and training.device.type == "cuda" else 0
        return self._settled >= SETTLES + looks

    def cast_here(self) -> None:
        """Cast the modules from here on: a session leaves their calls alone while operations are counted."""
        precision, training = self._request.precision, self._training
        if precision is not None and training is not None:
            numerics = Numerics(precision=precision)
            for module in training.modules:
                vars(module)["forward"] = _cast(module.forward, precision_context(numerics, training.device, [module]))

    def why_given_up(self) -> str | None:
        """Why the script does not obey, if that shows at once; None if it does, or still may."""
        if self._refusal is not None:
            return self._refusal
        if self._session.is_tuning or (self._training is None and self._updates < MOST_UNFOUND):
            return None
        return "hotlap does not find its training loop" if self._training is None else self._session.so_far()[-1]

    def why_not_probed(self) -> str | None:
        """Why the probe has not seen the script under the plan; None if it has."""
        training, plan = self._training, self._plan
        reason = self.why_given_up()
        if reason is not None:
            return reason
        if training is None or not self.has_settled:
            return "the script ended before it ran under the plan"
        # The precision of a call shows only at the call: the script may have its own autocast.
        reason = training.supports(plan) or training.given_up
        if reason is None and self._request.feed is not None:
            if any(proxy.feed != plan.feed for proxy in training.proxies):
                return "its batches still come by its own loader"
            reason = next(filter(None, (proxy.why_other(plan.feed) for proxy in training.proxies)), None)
        return reason


def _cast(forward: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """A forward pass under autocast, with outputs in the script's own precision."""

    @functools.wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with context():
            outputs = forward(*args, **kwargs)
        return map_tensors(outputs, _widened)

    return cast


def _widened(output: Tensor) -> Tensor:
    return output.float() if output.is_floating_point() and output.element_size() < 4 else output


# --- the process itself ----------------------------------------------------------------------------------


def main(kind: type[ScriptWatch] = ScriptWatch) -> None:
    """Probe the script that the command line names, by a watch of this kind."""
    if sys.platform == "linux":  # whatever the script does
        end_with(os.getppid())
    settings = json.loads(sys.argv[1])
    words = sys.argv[2:]
    report = Path(settings.pop("report"))
    is_module = words[0] == "-m"
    target = Target(args=words[2:], module=words[1]) if is_module else Target(args=words[1:], path=words[0])
    watch = kind(ProbeRequest(**settings), report, target.name)
    watch.guard.listen()
    sys.exit(abs(run(target, watch)))


if __name__ == "__main__":
    main()
