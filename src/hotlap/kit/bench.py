"""A job's rig for trials: real updates with batches of any size, after which the job is as before."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap import machine
from hotlap.core.console import SilentConsole
from hotlap.core.errors import TrainingError, first_line
from hotlap.core.job import Job
from hotlap.core.torch_private import BatchNormBase, clear_cublas_workspaces
from hotlap.data.batches import Batch, to_device
from hotlap.data.dataset import OrderedDataset, training_dataset
from hotlap.data.sources import tensors_in
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import Modes, Randomness
from hotlap.engine.step import Window, is_out_of_memory
from hotlap.fitting.task import OFF, set_up
from hotlap.kit.samples import longest_first
from hotlap.kit.tensor_memory import LiveTensors
from hotlap.machine.cuda import usable_bytes
from hotlap.machine.limits import read_memory

WARM, BLOCKS, BLOCK_S = 3, 5, 0.04
"""Updates before timing; timed blocks, of which the median counts; least seconds of a block."""


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
        """The smallest batch that may train: a batch norm cannot train on one sample."""
        layers = [layer for module in self.rig.modules for layer in module.modules()]
        return 1 + any(isinstance(layer, BatchNormBase) and layer.training for layer in layers)

    def batch(self, size: int) -> Batch:
        """A batch of so many samples, the longest of the dataset."""
        source, chosen = self.dataset.source, self.longest.order[:size]
        if source.why_not_gather() is None:
            return source.gather(torch.from_numpy(chosen))
        return source.fetch(chosen.tolist(), self.job.seed, 0)

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
            if not is_out_of_memory(error) and not isinstance(error, MemoryError) and not _is_cpu_full(error):
                raise
            why = first_line(error)
            _let_go_of_frames(error)
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
        count_training(counted, self.rig)
        counted.know((tensor for piece in window.pieces for tensor in tensors_in(piece)), "batch")
        with counted:
            self.rig.step(window)
        return counted.peak_bytes, counted.peak_bytes

    def _place_anew(self) -> None:
        """Free all memory before the weights move in: otherwise they may split it into pieces."""
        self.tidy()
        if self.device.type == "cuda":
            for module in self.rig.modules:
                module.to("cpu")
            clear_cublas_workspaces()  # made again where they are needed
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
        self._places = [{tensor.device for tensor in _weights(one)} for one in self._modules]
        self._weights = [(tensor, tensor.detach().cpu().clone()) for one in self._modules for tensor in _weights(one)]
        self._grads = [(p, p.grad, p.requires_grad) for one in self._modules for p in one.parameters()]
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


def count_training(counted: LiveTensors, rig: Rig) -> None:
    """Count the rig's weights, gradients and optimizer state under their kinds."""
    counted.know(trained_tensors(rig), "parameters")
    counted.know((buffer for module in rig.modules for buffer in module.buffers()), "parameters")
    counted.know((p.grad for p in trained_tensors(rig)), "gradients")
    counted.know(state_of(rig.optimizer), "optimizer")


def state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def rest_of(weights: Sequence[Tensor], optimizer: Optimizer) -> int:
    """The memory of weights, gradients and optimizer state."""
    gradients = (p for p in weights if p.requires_grad)
    return sum(one.nbytes for part in (weights, gradients, state_of(optimizer)) for one in part)


def room_on(device: torch.device) -> int:
    """Bytes that this process may take in total; on the CPU, free memory."""
    if device.type != "cuda":
        return read_memory().free_bytes
    free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    return min(usable_bytes(device), free + held)


def _is_cpu_full(error: BaseException) -> bool:
    """Whether torch found no memory on the host, for which it has no error class."""
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error)


def _let_go_of_frames(error: BaseException | None) -> None:
    """Clear the frames of an error, which hold activations."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
