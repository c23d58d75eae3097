"""A job's rig for trials: real updates with batches of any size, after which the job is as before.

`opened` gives a `Bench`, the rig with what hotlap measures on it. `JobTrials` tries other sizes and other ways on it.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap import machine
from hotlap.core.console import SilentConsole
from hotlap.core.errors import TrainingError, first_line
from hotlap.core.job import Job
from hotlap.core.plan import Plan
from hotlap.core.terminal import Say, silent
from hotlap.data.bad_samples import Thinned
from hotlap.data.batches import Batch, to_device
from hotlap.data.dataset import OrderedDataset, training_dataset
from hotlap.data.sources import tensors_in
from hotlap.engine.capture.recording import release_cublas_workspaces
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import Modes, Randomness
from hotlap.engine.step import Window, is_out_of_memory, let_go_of_frames
from hotlap.fitting.task import OFF, set_up
from hotlap.kit.probe import ProbeResult
from hotlap.kit.samples import longest_first
from hotlap.kit.search import Trial
from hotlap.kit.update_watch import KINDS, UpdateWatch
from hotlap.machine.cuda import usable_bytes
from hotlap.machine.limits import read_memory
from hotlap.machine.prediction import Work
from hotlap.monitor.growing_memory import GrowingMemory, GrowthWatch
from hotlap.monitor.live_tensors import LiveTensors
from hotlap.monitor.savings import Saving, least_batch, model_facts
from hotlap.monitor.work import count_work

WARM, BLOCKS, BLOCK_S = 3, 5, 0.04
"""Updates before timing; timed blocks, of which the median counts; least seconds of a block."""
ORDINARY = 4
"""Updates to average over where samples differ in length."""
PIECES = 16
"""Most pieces of an update. With more, the update itself hardly counts, and a try takes longer."""


class Bench:
    """A rig that makes updates with batches of any size."""

    def __init__(self, job: Job, dataset: OrderedDataset, rig: Rig, kept: JobState) -> None:
        self.job, self.dataset, self.rig, self._kept = job, dataset, rig, kept
        self.device = rig.device
        self.longest = longest_first(dataset.source)
        self.room_bytes = room_on(self.device)

    @property
    def memory_ends(self) -> bool:
        """Whether too large a batch raises an error; on the CPU the system takes memory from other processes first."""
        return self.device.type == "cuda"

    @property
    def where(self) -> str:
        """The name of the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "the CPU"

    @property
    def rest_bytes(self) -> int:
        """The memory of weights, gradients and optimizer state, which no batch changes."""
        return rest_of(trained_tensors(self.rig), self.rig.optimizer)

    @property
    def most(self) -> int:
        """The largest batch that the data fills."""
        return len(self.dataset.source)

    @property
    def least(self) -> int:
        """The smallest batch that may train."""
        return least_batch(self.rig.modules)

    def batch(self, size: int) -> Batch:
        """A batch of so many samples, the longest of the dataset."""
        source, chosen = self.dataset.source, self.longest.order[:size]
        if source.why_not_gather() is None:
            return source.gather(torch.from_numpy(chosen))
        batch = source.fetch(chosen.tolist(), self.job.seed, 0)
        return batch.batch if isinstance(batch, Thinned) else batch

    def window(self, size: int, pieces: int = 1) -> Window:
        """One update in so many pieces of so many samples."""
        batch = self.batch(size)
        return Window([batch] * pieces, [size] * pieces)

    def trains(self, window: Window, *, updates: int = WARM) -> str | None:
        """Make some real updates; returns None, or why they do not fit in memory.

        The updates begin as a training does, so that earlier tries do not change what fits.
        """
        self.rig.optimizer.state.clear()

        def make_updates() -> None:
            self._place_anew()
            self._kept.put_weights_back()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            for _ in range(updates):
                self.rig.step(window)
            self.rig.wait()

        return self.why_full(make_updates)

    def why_full(self, work: Callable[[], None]) -> str | None:
        """Do some work; returns None, or why it does not fit in memory."""
        try:
            work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            why = first_line(error)
            let_go_of_frames(error)
            self.rig.optimizer.state.clear()  # some of it may be missing
            self.tidy()
            return why
        return None

    def step_s(self, *windows: Window) -> float:
        """Seconds an update with each of these in turn: the median of several blocks.

        A single batch is on the device already; several may not fit there, and come one by one.
        """
        if len(windows) == 1:
            windows = (self._at_hand(windows[0]),)
        found = []
        for _ in range(BLOCKS):
            begun, made = time.perf_counter(), 0
            while not made or time.perf_counter() - begun < BLOCK_S:
                for window in windows:
                    self.rig.advance(window)
                    made += 1
                    if made % 8 == 0:
                        self.rig.wait()  # else the host runs ahead of the clock
            self.rig.wait()
            found.append((time.perf_counter() - begun) / made)
        return sorted(found)[len(found) // 2]

    def _at_hand(self, window: Window) -> Window:
        if window.is_held:
            return window
        there = {id(piece): to_device(piece, self.device) for piece in window.pieces}
        return dataclasses.replace(window, pieces=[there[id(piece)] for piece in window.pieces])

    @property
    def peak_so_far(self) -> tuple[int, int]:
        """The peaks of tensors and of torch's allocator since `trains` began; 0 on the CPU."""
        if self.device.type != "cuda":
            return 0, 0
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    def peak_bytes(self, window: Window) -> tuple[int, int]:
        """The peaks of tensors and of torch's allocator in one update; on the CPU both are counted from tensors."""
        if self.device.type == "cuda":
            self.tidy()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.rig.step(window)
            self.rig.wait()
            return self.peak_so_far
        counted = LiveTensors(self.device)
        self.count(counted, window)
        with counted:
            self.rig.step(window)
        return counted.peak_bytes, counted.peak_bytes

    def count(self, live: LiveTensors, window: Window) -> None:
        """Count what there is before an update, by kind; its batch if that is on the device already."""
        live.know((buffer for module in self.rig.modules for buffer in module.buffers()), "parameters")
        count_training(live, trained_tensors(self.rig), self.rig.optimizer)
        live.know((tensor for piece in window.pieces for tensor in tensors_in(piece)), "batch")

    def _place_anew(self) -> None:
        """Free all memory before the weights move in: otherwise they may split it into pieces."""
        self.tidy()
        if self.device.type == "cuda":
            for module in self.rig.modules:
                module.to("cpu")
            release_cublas_workspaces()
            self.tidy()
            for module in self.rig.modules:
                module.to(self.device)

    def tidy(self) -> None:
        """Free gradients and all unused memory."""
        for parameter in trained_tensors(self.rig):
            parameter.grad = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


class JobTrials:
    """Tries a job in this process; see `Trials`."""

    def __init__(self, bench: Bench, say: Say = silent) -> None:
        self._bench, self._rig, self._say = bench, bench.rig, say

    @cached_property
    def _window(self) -> Window:
        """An update of the job as it is."""
        return self._bench.window(min(self._bench.dataset.batch_size, self._bench.most), self._bench.job.accumulate)

    def of_size(self, size: int, timed: bool) -> Trial:
        """Make real updates of the effective batch in pieces of this size, or of one larger piece."""
        bench = self._bench
        effective = bench.job.effective_batch or bench.dataset.batch_size
        pieces = min(PIECES, max(1, -(-effective // size)))
        window = bench.window(size, pieces)
        times_s: list[float] = []
        # A size that has trained a few times may still fail later, once memory is fragmented.
        why_not = bench.trains(window)
        if why_not is None and timed:
            why_not = bench.why_full(lambda: times_s.append(bench.step_s(window)))
        if why_not is not None:
            return Trial(size=size, why_not=why_not)
        rest, peaks = bench.rest_bytes, [bench.peak_so_far]
        # With idle memory given back before, an update takes less. A training does not do that, so this may fail.
        why_not = bench.why_full(lambda: peaks.append(bench.peak_bytes(window)))
        if why_not is not None and not bench.memory_ends:
            return Trial(size=size, why_not=why_not)
        speed = size * pieces / times_s[0] if timed else None
        peak, taken = peaks[-1]
        return Trial(size=size, samples_per_s=speed, peak_bytes=peak, taken_bytes=taken, rest_bytes=rest)

    def unchanged(self, *, grows: bool = True) -> ProbeResult:
        """Watch updates of the job as it is. Raises TrainingError if they do not fit.

        Without `grows` it does not look for memory that grows, which takes several updates.
        """
        bench, rig, size, samples = self._bench, self._rig, self._window.sizes[0], sum(self._window.sizes)
        self._say(f"memory     updates of {samples:,} samples, {size:,} at once")
        why_not = bench.trains(self._window)
        if why_not is not None:
            raise TrainingError(
                f"an update with {size:,} samples at once does not fit: {why_not}; find what fits: hotlap batch"
            )
        peak, taken = bench.peak_bytes(self._window)
        step_s = bench.step_s(self._window)
        watch = self._watched()
        live, held = watch.live, self._grows() if grows else []
        for one in held:
            self._say(f"memory     grows: {one}")
        return ProbeResult(
            laps=[[step_s, samples]],
            samples_an_update=samples,
            batch_size=size,
            device=str(rig.device),
            peak_bytes=peak,
            taken_bytes=taken,
            room_bytes=bench.room_bytes,
            account={
                **watch.account,
                "kinds": {kind: live.at_peak.get(kind, 0) for kind in KINDS},
                "layers": {layer: size for layer, size in live.layers_at_peak.items() if size},
                "held": [dataclasses.asdict(one) for one in held],
            },
            model=dataclasses.asdict(model_facts(rig.model, self._window.pieces[0], rig.device)),
        )

    def ordinary(self) -> tuple[Work, float]:
        """The work of an update in the job's own order, and the seconds it takes here. Follows `unchanged`."""
        bench, rig = self._bench, self._rig
        updates = min(ORDINARY, rig.windows_here) if bench.longest.varies else 1
        windows = list(rig.look(rig.plan, range(updates)))
        coming = iter(windows)
        work = count_work(lambda: rig.step(next(coming)), updates)
        rig.wait()
        return work, bench.step_s(*windows)

    def _live(self, *, lines: bool = False) -> LiveTensors:
        """Counts tensors before an update, with its batch if that is on the device already."""
        self._bench.tidy()
        live = LiveTensors(self._rig.device, lines=lines)
        live.know_libraries()
        self._bench.count(live, self._window)
        return live

    def _watched(self) -> UpdateWatch:
        """The watch of a whole update."""
        live = self._live()
        live.forget_peak()
        with UpdateWatch(live, trained_tensors(self._rig), self._rig.modules) as watch:
            self._rig.step(self._window)
            self._rig.wait()
        return watch

    def _grows(self) -> list[GrowingMemory]:
        turns = GrowthWatch(self._live(lines=True))
        with UpdateWatch(turns.live, trained_tensors(self._rig), self._rig.modules):
            while not turns.are_done:
                self._rig.step(self._window)
                self._rig.wait()
                turns.end()
        return turns.growth()

    def in_pieces(self, size: int) -> Saving:
        """Updates of the same samples, so many at once."""
        plan, pieces = self._rig.plan.but(micro_batch=size), -(-sum(self._window.sizes) // size)
        tried = self._tried(plan, self._bench.window(size, pieces))
        return dataclasses.replace(tried, changes="; ".join(self._rig.cautions(plan)))

    def checkpointed(self, blocks: int) -> Saving:
        """Updates with checkpointed blocks."""
        return self._tried(self._rig.plan.but(checkpoint=blocks), self._window)

    def in_precision(self, precision: str) -> Saving:
        """Updates under autocast."""
        return self._tried(self._rig.plan.but(precision=precision), self._window)

    def _tried(self, plan: Plan, window: Window) -> Saving:
        """Peak and time of real updates under a plan."""
        before = self._rig.plan
        why_not = self._rig.supports(plan)
        if why_not is not None:
            return Saving(why_not=why_not)
        self._rig.use(plan, outcome="measured")
        try:
            why_not = self._bench.trains(window)
            if why_not is not None:
                return Saving(why_not=why_not)
            return Saving(peak_bytes=self._bench.peak_bytes(window)[0], step_s=self._bench.step_s(window))
        finally:
            self._rig.use(before, outcome="measured")


@contextmanager
def opened(job: Job) -> Iterator[Bench]:
    """A bench for the job; afterwards weights, optimizer, modes, randomness and device are as before."""
    device = machine.choose_device(job.device)
    dataset = training_dataset(job, workers=machine.workers_wanted(), on_gpu=device.type == "cuda")
    kept = JobState(job, device)
    try:
        # A schedule may refuse more updates than the job has.
        try:
            task = set_up(dataclasses.replace(job, schedule=None), dataset, OFF, device, SilentConsole(), save_every=0)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TrainingError(f"the model itself does not fit: {first_line(error)}; use a smaller one") from None
        if isinstance(task.rig.optimizer, torch.optim.LBFGS):
            raise TrainingError(
                "LBFGS calls the model any number of times in an update, so hotlap cannot compare its steps"
            )
        try:
            yield Bench(job, dataset, task.rig, kept)
        finally:
            task.rig.restore_layout()
            task.rig.close()
            task.rig.optimizer.state.clear()  # otherwise it stays on the device as long as the bench
    finally:
        kept.put_back()


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Inside, the garbage collector skips older objects: those of libraries take long to search."""
    if gc.get_freeze_count():  # the caller does so already
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class JobState:
    """The job as it was, on the host: so the device has as much room as in the training itself."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._modules = [one for one in (job.model, job.loss) if isinstance(one, nn.Module)]
        self._places = [{tensor.device for tensor in _weights(module)} for module in self._modules]
        self._weights = [(tensor, tensor.detach().cpu().clone()) for one in self._modules for tensor in _weights(one)]
        self._grads = [(p, p.grad, p.requires_grad) for module in self._modules for p in module.parameters()]
        self._optimizer = job.optimizer if isinstance(job.optimizer, Optimizer) else None
        self._state = copy.deepcopy(self._optimizer.state_dict()) if self._optimizer is not None else None
        self._modes, self._randomness = Modes(self._modules), Randomness(device)

    def put_weights_back(self) -> None:
        """Restore weights and buffers, on whatever device they are."""
        with torch.no_grad():
            for tensor, value in self._weights:
                tensor.copy_(value)

    def put_back(self) -> None:
        """Restore everything."""
        for module, places in zip(self._modules, self._places, strict=True):
            if len(places) == 1:
                module.to(next(iter(places)))
        self.put_weights_back()
        for parameter, grad, flag in self._grads:
            parameter.requires_grad_(flag)
            parameter.grad = grad
        if self._optimizer is not None and self._state is not None:
            self._optimizer.load_state_dict(self._state)
        self._modes.restore()
        self._randomness.restore()


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def trained_tensors(rig: Rig) -> list[Tensor]:
    """All tensors that may have a gradient."""
    mine = [p for group in rig.optimizer.param_groups for p in group["params"]]
    every = (*mine, *(p for module in rig.modules for p in module.parameters()))
    return list({id(p): p for p in every}.values())


def count_training(live: LiveTensors, weights: Sequence[Tensor], optimizer: Optimizer) -> None:
    """Count weights, their gradients and the optimizer's state under their kinds."""
    live.know(weights, "parameters")
    live.know((p.grad for p in weights), "gradients")
    live.know(_state_of(optimizer), "optimizer")


def _state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def rest_of(weights: Sequence[Tensor], optimizer: Optimizer) -> int:
    """The memory of weights, gradients and optimizer state."""
    gradients = (p for p in weights if p.requires_grad)
    return sum(one.nbytes for part in (weights, gradients, _state_of(optimizer)) for one in part)


def room_on(device: torch.device) -> int:
    """Bytes that this process may take in total; on the CPU, free memory."""
    if device.type != "cuda":
        return read_memory().free_bytes
    free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    return min(usable_bytes(device), free + held)
