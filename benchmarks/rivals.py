"""The trainings that hotlap is held against, from the loop of the guides to the best that is written by hand.

Each is a generator: a `next` makes one or more whole optimizer steps and tells how many samples they took. All train
the same model from the same first weights with AdamW on the same batches, whole ones only, epoch after epoch without
a pause. Only `guide_after` clips gradients, as the guides do. The guides read loss and accuracy back in every step;
everybody else keeps a running loss on the device. A Lightning Trainer cannot be stepped from outside, so that
`lightning` times its own laps from within.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from benchmarks.work import Data, Normalise, Work, channels_last
from hotlap.data.order import mix

Steps = Generator[int, None, None]
"""A training: each `next` makes whole steps and tells their samples."""

WORKERS = {"guide_after": 2, "lightning": 8}
"""Loader processes of those that have any."""
WARM_REPLAYS = 3
"""Replays' worth of real steps that `by_hand` makes before it captures; its first `next` tells them too."""
GOOD_MASKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""By hand, kernels of attention, in torch's order. cuDNN's, which it would take in 16 bits, drops by masks that repeat:
see `attention_masks`."""


class UnavailableError(Exception):
    """A rival that cannot run here; its column says why and stays empty."""


# --- order and feeding ---------------------------------------------------------------------------------


def epoch_order(samples: int, batch: int, epoch: int, device: torch.device) -> Tensor:
    """The order of an epoch, whole batches only; on the CPU it is hotlap's own."""
    generator = torch.Generator(device).manual_seed(mix(0, epoch))
    return torch.randperm(samples, generator=generator, device=device)[: samples // batch * batch]


class EndlessOrder(Sampler[int]):
    """Epoch after epoch in one go, so that no loader pays for starting its workers' queues anew."""

    def __init__(self, samples: int, batch: int) -> None:
        self._samples, self._batch = samples, batch

    def __iter__(self) -> Iterator[int]:
        for epoch in itertools.count():
            yield from epoch_order(self._samples, self._batch, epoch, torch.device("cpu")).tolist()

    def __len__(self) -> int:
        return 2**40  # a Trainer asks


class ImageSamples(Dataset[tuple[Tensor, Tensor]]):
    """Images normalised one by one as they are fetched, as the guides' transforms do."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y
        self._normalise = Normalise(torch.device("cpu"))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._normalise.images(self._x[index]), self._y[index]

    def __len__(self) -> int:
        return len(self._x)


def loader_of(work: Work, data: Data, device: torch.device, workers: int = 0) -> DataLoader[Any]:
    """A DataLoader as people set it up; with workers, they persist and fetch into pinned memory."""
    dataset: Dataset[Any] = ImageSamples(data.x, data.y) if work.images else TensorDataset(data.x, data.y)
    return DataLoader(
        dataset,
        batch_size=work.batch,
        sampler=EndlessOrder(len(data.x), work.batch),
        drop_last=True,
        # Of its own: a loader draws a seed as it starts, which would move the masks of dropout.
        generator=torch.Generator(),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=workers > 0 and device.type == "cuda",
    )


# --- the guides ----------------------------------------------------------------------------------------


def guide_before(work: Work, model: nn.Module, data: Data, device: torch.device) -> Steps:
    """The loop the guides begin with: fp32, no workers, unfused AdamW, two values read back in every step."""
    model.to(device)
    optimizer = work.optimizer(model)
    running, right = 0.0, 0.0
    for x, y in loader_of(work, data, device):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        running += loss.item()
        right += (output.argmax(1) == y).float().mean().item()
        yield len(x)


def guide_after(work: Work, model: nn.Module, data: Data, device: torch.device) -> Steps:
    """The loop they end with: fp16 and a scaled loss, 2 pinned workers, clipping, still two values read back."""
    if device.type != "cuda":
        raise UnavailableError("fp16 needs a GPU")
    model.to(device)
    optimizer, scaler = work.optimizer(model), torch.amp.GradScaler(device.type)
    running, right = 0.0, 0.0
    for x, y in loader_of(work, data, device, WORKERS["guide_after"]):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.float16):
            output = model(x)
            loss = F.cross_entropy(output, y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        running += loss.item()
        right += (output.argmax(1) == y).float().mean().item()
        yield len(x)


def plain_loader(work: Work, model: nn.Module, data: Data, device: torch.device) -> Steps:
    """A loader loop that reads nothing back: what a careful person writes first."""
    model.to(device)
    optimizer = work.optimizer(model)
    running = torch.zeros((), dtype=torch.float64, device=device)
    for x, y in loader_of(work, data, device):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        running += loss.detach()
        yield len(x)


# --- by hand -------------------------------------------------------------------------------------------


class ByHand:
    """All data on the device, `replay_steps` whole steps at a time out of a static buffer of indices.

    `updates` is plain PyTorch that runs anywhere; on a GPU it is what the graph records. Nothing in it waits, and
    few kernels are small: samples of all its steps are gathered (and images normalised) at once, and their losses
    added at once. Under bf16 samples are held as bf16: autocast would round them so in the first layer.
    """

    def __init__(self, work: Work, model: nn.Module, data: Data, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._batch, self._steps = work.batch, work.replay_steps
        self._images, self._device = work.images, device
        self._precision = work.precision if on_gpu else "fp32"
        dtype = torch.bfloat16 if self._precision == "bf16" else torch.float32
        self.model = channels_last(model.to(device)) if work.images else model.to(device)
        self._optimizer = work.optimizer(model, fused=True, capturable=on_gpu)
        self._y = data.y.to(device)
        x = data.x.to(device)
        if work.images:
            # The colours of a pixel side by side, which is channels_last; gathered eight bytes at a time.
            x = x.permute(0, 2, 3, 1).contiguous()
            self._shape, self._x = x.shape[1:], x.flatten(1).view(torch.int64)
            self._normalise = Normalise(device, dtype)
        else:
            self._x = x.to(dtype)
        self.indices = torch.empty(work.replay_steps * work.batch, dtype=torch.int64, device=device)
        self.running = torch.zeros((), dtype=torch.float64, device=device)
        """Losses of all steps, added up."""

    def updates(self) -> None:
        """One step for each batch of indices in the buffer."""
        xs, ys = self._x.index_select(0, self.indices), self._y.index_select(0, self.indices)
        if self._images:
            xs = self._normalise.images(xs.view(torch.uint8).view(-1, *self._shape).permute(0, 3, 1, 2))
        losses = []
        for x, y in zip(xs.chunk(self._steps), ys.chunk(self._steps), strict=True):
            self._optimizer.zero_grad(set_to_none=True)
            with self._autocast(), sdpa_kernel(GOOD_MASKS):
                loss = F.cross_entropy(self.model(x), y)
            torch.autograd.backward(loss)
            self._optimizer.step()
            losses.append(loss.detach())
        self.running += losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def order(self) -> Iterator[Tensor]:
        """Indices for one replay after the other; what an epoch leaves over goes before the next."""
        samples, left = len(self._x), self.indices[:0]
        for epoch in itertools.count():
            order = torch.cat([left, epoch_order(samples, self._batch, epoch, self._device)])
            *whole, left = order.tensor_split(tuple(range(len(self.indices), len(order) + 1, len(self.indices))))
            yield from whole

    def captured(self, order: Iterator[Tensor]) -> Callable[[], None]:
        """`updates` as a graph, after some replays' worth of real steps on a side stream."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_REPLAYS):
                self.indices.copy_(next(order))
                self.updates()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            self.updates()
        return graph.replay

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._precision != "bf16":
            return nullcontext()
        # No weight is used twice in a step, so that keeping its bf16 copy gains nothing.
        return torch.autocast(self._device.type, dtype=torch.bfloat16, cache_enabled=False)


def by_hand(work: Work, model: nn.Module, data: Data, device: torch.device) -> Steps:
    """The best without compiling: data on the device, fused AdamW, whole steps captured as one CUDA graph.

    On the CPU the same in fp32, step by step.
    """
    hand = ByHand(work, model, data, device)
    order = hand.order()
    replay, warm = hand.updates, 0
    if device.type == "cuda":
        # What a graph has recorded stays: the switches matter while it is made.
        with switches(tf32=work.precision == "tf32", cudnn_tf32=True, benchmark=work.images):
            replay, warm = hand.captured(order), WARM_REPLAYS * len(hand.indices)
    for chosen in order:
        hand.indices.copy_(chosen)
        replay()
        yield warm + len(chosen)
        warm = 0


@contextmanager
def switches(*, tf32: bool, cudnn_tf32: bool, benchmark: bool) -> Iterator[None]:
    """TF32 in products and in cuDNN, and cuDNN's autotuning; afterwards as torch has them from the start.

    Set without being read: torch refuses to read them where somebody has used their newer names.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = cudnn_tf32
    torch.backends.cudnn.benchmark = benchmark
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = False


# --- Lightning -----------------------------------------------------------------------------------------


def lightning(
    work: Work,
    model: nn.Module,
    data: Data,
    device: torch.device,
    *,
    laps: int,
    lap_s: float,
    warm_s: float,
) -> list[tuple[int, float]]:
    """Laps of one `Trainer.fit` in bf16 with 8 workers, as (samples, seconds).

    Timed by a callback from the end of one step to the end of a later one, with a wait for the device at both, once
    it has trained for `warm_s` and each worker has brought two batches. Within a lap nothing waits. No logger, no
    checkpoints, no progress bar.
    """
    pl = _lightning()
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    workers = WORKERS["lightning"]
    found: list[tuple[int, float]] = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        """The model with its step."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.register_buffer("running", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.running += loss.detach()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.model)

    class Clock(pl.Callback):  # type: ignore[misc, name-defined]
        """Laps of whole rounds of the workers, who bring their batches in bursts."""

        def __init__(self) -> None:
            super().__init__()
            self._steps, self._begun, self._warm = 0, time.perf_counter(), False

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self._steps += 1
            least = warm_s if not self._warm else lap_s
            if self._steps % workers or time.perf_counter() - self._begun < least:
                return
            if not self._warm and self._steps < 2 * workers:
                return
            wait()
            now = time.perf_counter()
            if self._warm:
                found.append((self._steps * work.batch, now - self._begun))
            self._warm, self._steps, self._begun = True, 0, now
            trainer.should_stop = len(found) >= laps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Clock()],
        )
        trainer.fit(Module(), loader_of(work, data, device, workers))
    return found


def _lightning() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for talker in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
            logging.getLogger(talker).setLevel(logging.ERROR)
        return module
    raise UnavailableError("not installed")
