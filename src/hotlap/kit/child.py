"""A look at somebody's script from inside: it is run in this process, watched for some updates, and ended.

`python -m hotlap.kit.child SETTINGS train.py args`. One of its DataLoaders may be made otherwise than it says; nothing
else is changed. What was seen is written to a file.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hotlap.data.batches import count_samples
from hotlap.fitting.rescue import is_out_of_memory
from hotlap.kit.bench import rest_of, room_on, state_of
from hotlap.kit.growing import Turns
from hotlap.kit.lengths import LongestFirst, longest_in
from hotlap.kit.live import LiveTensors
from hotlap.kit.transforms import costs_of
from hotlap.kit.watching import Watch
from hotlap.machine.kernels import first_line
from hotlap.script.patches import Patches
from hotlap.script.running import Target, run
from hotlap.store.files import write_text

WARM = 3
"""Updates before anything is timed: the first has no state of the optimizer's yet."""

LAP_ROUNDS = 8
"""Batches of each worker in a lap at least: they come in bursts, and two of each may have been ready before it."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be looked at."""

    loader: int | None = None
    """Which of its loaders is to be made otherwise, by the order in which they are made."""
    change: dict[str, Any] = field(default_factory=dict)
    """Arguments of that loader in place of the script's own."""
    laps: int = 5
    lap_s: float = 0.1
    longest: bool = False
    """Whether every batch of that loader is to hold the longest samples of its dataset."""
    counts: bool = False
    """Whether the memory of one update is looked at."""
    lengths: bool = False
    """Whether it is looked whether the samples of the training's dataset differ in length."""
    transforms: bool = False
    """Whether the transforms of its dataset are timed."""
    watches: bool = False
    """Whether it is looked for memory that grows in more updates; without, nor at kinds and layers."""


@dataclass(kw_only=True)
class Seen:
    """What was."""

    updates: int = 0
    laps: list[list[float]] = field(default_factory=list)
    """Seconds and samples of each lap."""
    samples_an_update: int = 0
    first_batch_s: float | None = None
    """From asking the loader for an iterator to its first batch."""
    loader: int | None = None
    """Which of its loaders brings the training's batches."""
    batch_size: int | None = None
    """Of that one; None where a batch sampler decides it."""
    why_fixed: str | None = None
    """Why its batch size cannot be set."""
    workers: int = 0
    pinned: bool = False
    samples: int | None = None
    """In its dataset."""
    longest: str | None = None
    """What is known of the lengths of its samples, in words; None where they were not looked at."""
    varies: bool = False
    """Whether these differ."""
    transforms: list[tuple[str, float]] = field(default_factory=list)
    """What each takes for a sample, in seconds."""
    device: str = "cpu"
    peak_bytes: int = 0
    taken_bytes: int = 0
    rest_bytes: int = 0
    """What weights, gradients and the optimizer's state take, however large the batch."""
    room_bytes: int = 0
    account: dict[str, Any] = field(default_factory=dict)
    """Where memory goes, where that was asked for."""
    out_of_memory: str | None = None
    error: str | None = None


class Visitor:
    """Watches a script while it trains, and ends it once enough was seen."""

    def __init__(self, wish: Wish, report: Path) -> None:
        self._wish, self._report, self.seen = wish, report, Seen()
        self._patches = Patches()
        self._loaders: list[DataLoader[Any]] = []
        self._number: dict[int, int] = {}
        self._optimizer: Optimizer | None = None
        self._served: Counter[int] = Counter()
        self._samples = self._samples_before = 0
        self._sizes: Counter[int] = Counter()
        """How many updates had so many samples."""
        self._lap: tuple[float, int] | None = None
        self._watch: Watch | None = None
        self._turns: Turns | None = None
        self._modules: list[nn.Module] = []
        self._asked: dict[int, float] = {}
        self._first_s: dict[int, float] = {}
        self._stepped_at = 0.0
        self._paused_at: float | None = None
        """When an evaluation began that has not ended."""
        self._paused_s, self._lap_updates = 0.0, 0

    def __enter__(self) -> None:
        put = self._patches.put
        put(DataLoader, "__init__", self._made(DataLoader.__init__))
        put(DataLoader, "_get_iterator", self._iterated(DataLoader._get_iterator))
        put(_BaseDataLoaderIter, "__next__", self._given(_BaseDataLoaderIter.__next__))
        if self._wish.watches:
            self._patches.hooked("model", register_module_forward_pre_hook(self._called))
        self._patches.hooked("steps", register_optimizer_step_pre_hook(self._steps))
        self._patches.hooked("step", register_optimizer_step_post_hook(self._stepped))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The script has ended by itself, or by an error."""
        self._patches.take_out_all()
        if error is not None and not isinstance(error, SystemExit):
            line = first_line(error) if isinstance(error, Exception) else "it was interrupted"
            is_full = isinstance(error, MemoryError) or is_out_of_memory(error)
            self.seen.out_of_memory = line if is_full else None
            self.seen.error = None if is_full else f"{type(error).__name__}: {line}"
        self._write()

    # --- the script's loaders ----------------------------------------------------------------------

    def _made(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def made(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            number = len(self._loaders)
            self._loaders.append(loader)
            self._number[id(loader)] = number
            if number == self._wish.loader:
                given = signature.bind(loader, *args, **kwargs)
                changed = _changed({k: v for k, v in given.arguments.items() if k != "self"}, self._wish.change)
                args, kwargs = (), self._with_longest(changed) if self._wish.longest else changed
            original(loader, *args, **kwargs)

        return made

    def _with_longest(self, given: dict[str, Any]) -> dict[str, Any]:
        """A loader's arguments with the longest samples in every batch."""
        longest = longest_in(given["dataset"])
        if longest is None:
            return given
        return {**given, "sampler": LongestFirst(longest.order, given.get("batch_size", 1)), "shuffle": False}

    def _iterated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterated(loader: DataLoader[Any]) -> Any:
            number = self._number.get(id(loader), -1)
            self._asked.setdefault(number, time.perf_counter())
            iterator = original(loader)
            iterator._hotlap_number = number
            return iterator

        return iterated

    def _given(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def given(iterator: Any) -> Any:
            self._pause(not torch.is_grad_enabled())
            batch = original(iterator)
            number = getattr(iterator, "_hotlap_number", -1)
            if number not in self._first_s and number in self._asked:
                self._first_s[number] = time.perf_counter() - self._asked[number]
            if torch.is_grad_enabled():  # else it is an evaluation's
                self._served[number] += 1
                self._samples += count_samples(batch) or 0
            return batch

        return given

    def _pause(self, evaluates: bool) -> None:
        """Told whether the next batch is an evaluation's, whose time is no part of a lap."""
        if evaluates and self._paused_at is None:
            self._paused_at = self._stepped_at
        elif not evaluates and self._paused_at is not None:
            self._paused_s += time.perf_counter() - self._paused_at
            self._paused_at = None

    def _called(self, module: nn.Module, inputs: Any) -> None:
        """Told that a module is called; those that lie in none of the others are the script's models."""
        if module not in self._modules and not any(module in set(one.modules()) for one in self._modules):
            self._modules.append(module)

    # --- its updates -------------------------------------------------------------------------------

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch is not None:
            self._watch.update_begins()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Told that an optimizer has made an update; the first one's count."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if self._watch is not None:
            self._watch.update_ends()
        if optimizer is not self._optimizer:
            return
        seen, self._stepped_at = self.seen, time.perf_counter()
        seen.updates += 1
        self._sizes[self._samples - self._samples_before] += 1
        self._samples_before = self._samples
        if self._watch is not None:
            self._count_ends()
        elif seen.updates == WARM:
            self._begin()
        elif seen.updates > WARM and self._lap is not None:
            began, samples = self._lap
            # A lap ends with the device's work done: to look at the clock before would flatter it.
            self._lap_updates += 1
            spent_s = time.perf_counter() - began - self._paused_s
            workers = self._workers
            is_round = self._lap_updates >= LAP_ROUNDS * workers and self._lap_updates % max(1, workers) == 0
            if spent_s >= self._wish.lap_s and is_round:
                self._wait()
                seen.laps.append([time.perf_counter() - began - self._paused_s, self._samples - samples])
                self._begin()
            if len(seen.laps) >= self._wish.laps:
                self._lap = None
                self._count_begins() if self._wish.counts else self._end()

    def _begin(self) -> None:
        self._wait()
        if self._on_gpu and not self.seen.laps:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._paused_s, self._lap_updates = 0.0, 0
        self._lap = (time.perf_counter(), self._samples)

    def _count_begins(self) -> None:
        """On a GPU torch has kept account all along; on the CPU, or where it is asked for, operations are looked at."""
        if self._optimizer is None or (self._on_gpu and not self._wish.watches):
            self._end()
        if self._on_gpu:
            self.seen.peak_bytes, self.seen.taken_bytes = self._peaks()
        self._open_watch(lines=False)

    def _open_watch(self, *, lines: bool) -> LiveTensors:
        optimizer = self._optimizer
        assert optimizer is not None
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        live = LiveTensors(weights[0].device, lines=lines)
        live.know(weights, "parameters")
        live.know((p.grad for p in weights), "gradients")
        live.know(state_of(optimizer), "optimizer")
        live.forget_peak()
        self._watch = Watch(live, weights, self._modules, sees_updates=False).__enter__()
        return live

    def _count_ends(self) -> None:
        """An update was looked at; after the first one it is looked for memory that grows."""
        watch = self._watch
        assert watch is not None
        live = watch.live
        if not self.seen.account:
            if not self._on_gpu:
                self.seen.peak_bytes = self.seen.taken_bytes = live.peak_bytes
            self.seen.account = {
                "peak_bytes": live.peak_bytes,
                "kinds": live.at_peak,
                "layers": live.layers_at_peak,
                "course": live.course,
                "held": [],
            }
            watch.__exit__(None, None, None)
            if not self._wish.watches:
                self._end()
            self._turns = Turns(self._open_watch(lines=True))
        elif self._turns is not None:
            self._wait()
            self._turns.end()
            if self._turns.are_done:
                watch.__exit__(None, None, None)
                self.seen.account["held"] = [asdict(one) for one in self._turns.growth()]
                self._end()

    def _peaks(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    @property
    def _on_gpu(self) -> bool:
        if self._optimizer is None:
            return False
        return any(p.is_cuda for group in self._optimizer.param_groups for p in group["params"])

    @property
    def _workers(self) -> int:
        """Of the loader that brings the training's batches."""
        number = max(self._served, key=lambda one: self._served[one], default=-1)
        return self._loaders[number].num_workers if number >= 0 else 0

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _end(self) -> None:
        """Enough was seen. The script is not to clean up, save or evaluate: the process ends here."""
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
        seen.samples_an_update = max(self._sizes, key=lambda size: self._sizes[size], default=0)
        self._say_loader(seen)
        if self._on_gpu:
            device = torch.device("cuda", torch.cuda.current_device())
            seen.device, seen.room_bytes = str(device), room_on(device)
            if not seen.peak_bytes:
                seen.peak_bytes, seen.taken_bytes = self._peaks()
        else:
            seen.room_bytes = room_on(torch.device("cpu"))
        write_text(self._report, json.dumps(asdict(seen)))

    def _say_loader(self, seen: Seen) -> None:
        number = max(self._served, key=lambda one: self._served[one], default=-1)
        if number < 0:
            seen.why_fixed = "its batches do not come from a DataLoader"
            return
        loader = self._loaders[number]
        seen.first_batch_s, seen.workers = self._first_s.get(number), loader.num_workers
        seen.pinned = bool(loader.pin_memory)
        seen.loader, seen.batch_size = number, loader.batch_size
        try:
            seen.samples = len(loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            seen.samples = None
        if self._wish.lengths:
            self._say_lengths(seen, loader)
        if self._wish.transforms:
            seen.transforms = [(one.name, one.sample_s) for one in costs_of(loader.dataset)]
        if loader.batch_size is None:
            sampler = loader.batch_sampler
            # Accelerate, for one, makes a loader of the batches of another.
            first = next(
                (n for n, one in enumerate(self._loaders) if one.batch_sampler is sampler and n < number), None
            )
            if first is not None and type(sampler) is BatchSampler:
                seen.loader, seen.batch_size = first, sampler.batch_size
            else:
                seen.why_fixed = f"a {type(sampler).__name__} makes its batches"

    def _say_lengths(self, seen: Seen, loader: DataLoader[Any]) -> None:
        """Whether its batches can be made of the longest samples. A sampler of the script's own is left to it."""
        if type(loader.sampler) not in (RandomSampler, SequentialSampler, LongestFirst):
            return
        try:
            longest = longest_in(loader.dataset)
        except Exception as error:  # somebody's dataset, asked for samples that the script may never ask for
            why = type(error).__name__
            seen.longest = f"batches are those that came first: the lengths of samples cannot be read ({why})"
            return
        if longest is not None:
            seen.longest, seen.varies = longest.words, longest.varies


def _changed(given: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A loader's arguments with some in their place; those that go with workers alone leave with them."""
    given = {**given, **given.pop("kwargs", {}), **change}
    if not given.get("num_workers"):
        for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
            given.pop(name, None)
    return given


def main() -> None:
    """Look at the script that the command line names."""
    settings = json.loads(sys.argv[1])
    words = sys.argv[2:]
    report = Path(settings.pop("report"))
    is_module = words[0] == "-m"
    target = Target(args=words[2:], module=words[1]) if is_module else Target(args=words[1:], path=words[0])
    sys.exit(abs(run(target, Visitor(Wish(**settings), report))))


if __name__ == "__main__":
    main()
