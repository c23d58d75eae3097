"""Training from JPEG files, against the batch at hand and against Lightning."""

from __future__ import annotations

import importlib
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hotlap
from benchmarks.kit.rows import Options, Row, wait
from benchmarks.kit.trainings import resnet18
from hotlap import Rig
from hotlap.core.units import show_rate, show_seconds
from hotlap.data.pictures import decode_square, decoded
from hotlap.machine.limits import read_cpu
from hotlap.moves import everything

LEAST_LIMIT, LEAST_GAIN = 0.9, 2.5


class Files(Dataset[tuple[Tensor, int]]):
    """JPEG files as most people read them: decoded whenever they are asked for."""

    def __init__(self, paths: list[Path], side: int) -> None:
        self._paths, self._side = paths, side

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(decode_square(self._paths[index].read_bytes(), self._side)), index % 10


class Scaled(nn.Module):
    """A network that takes pixels from 0 to 255."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, pixels: Tensor) -> Tensor:
        """A score for each class."""
        scores: Tensor = self.body(pixels.float().div(255).sub(0.5))
        return scores


def jpeg_rows(options: Options) -> Iterator[Row]:
    """Files decoded once and trained on, against the batch at hand and against Lightning."""
    side, count = (32, 96) if options.quick else (224, options.files)
    seconds = 0.5 if options.quick else 6.0
    with tempfile.TemporaryDirectory() as folder:
        paths = written(Path(folder), count, side)
        begun = time.perf_counter()
        pictures = decoded(paths, size=side, cache=False)
        took = time.perf_counter() - begun
        seen = f"{count:,} in {show_seconds(took)}: {show_rate(count / took)} files/s"
        yield Row(part="jpeg", what="decoded once", seen=seen, kept=not pictures.broken)
        target = torch.arange(count) % 10
        ours, limit, plan = ours_and_limit((pictures.pixels, target), options, seconds)
        told = f"{show_rate(ours)} of {show_rate(limit)} samples/s ({plan})"
        yield Row(
            part="jpeg", what="against the batch at hand", seen=told, kept=ours >= LEAST_LIMIT * limit or options.quick
        )
        cores = read_cpu().cores
        theirs = {
            n: lightning_rate(Files(paths, side), n, options, seconds)
            for n in sorted({0, 2, 4, 8, 12, cores})
            if n <= cores
        }
        if any(rate is None for rate in theirs.values()):
            yield Row(part="jpeg", what="against Lightning", seen="lightning is not installed", kept=options.quick)
            return
        best = max(theirs, key=lambda n: theirs[n] or 0.0)
        rate = theirs[best] or 1.0
        told = f"{ours / rate:.3g}x: {show_rate(ours)} against {show_rate(rate)} samples/s with {best} workers"
        yield Row(part="jpeg", what="against Lightning", seen=told, kept=ours >= LEAST_GAIN * rate or options.quick)


def written(folder: Path, count: int, side: int) -> list[Path]:
    """JPEG files of soft random pictures, about as large as photographs of that size are."""
    return list(hotlap.parallel_map(partial(one_written, folder, side), range(count), progress=False))


def one_written(folder: Path, side: int, number: int) -> Path:
    """The picture of a number."""
    image = importlib.import_module("PIL.Image")
    coarse = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    path = folder / f"{number:06}.jpg"
    image.fromarray(coarse).resize((side, side), image.Resampling.BICUBIC).save(path, quality=90)
    return path


def ours_and_limit(data: tuple[Tensor, Tensor], options: Options, seconds: float) -> tuple[float, float, str]:
    """Samples a second of hotlap at batch 32 under all that the machine can do, and with one batch again and again."""
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss()
    rig = Rig(Scaled(resnet18(options.quick)), lambda p: torch.optim.AdamW(p), loss, device=options.device)
    windows = rig.feed(data, batch_size=32, epochs=10**6, drop_last=True)
    next(windows)
    rig.use(everything(rig).plan)
    ours = rate_of(rig, lambda: next(windows), seconds)
    batch = tuple(column[:32].to(rig.device) for column in data)
    limit = rate_of(rig, lambda: batch, seconds)
    plan = str(rig.plan)
    rig.close()
    return ours, limit, plan


def rate_of(rig: Rig, bring: Callable[[], Any], seconds: float) -> float:
    """Samples a second, once steps are at their pace."""
    for _ in range(20):
        rig.advance(bring())
    rig.wait()
    begun, before = time.perf_counter(), rig.samples
    while time.perf_counter() - begun < seconds:
        for _ in range(8):
            rig.advance(bring())
        rig.wait()
    return (rig.samples - before) / (time.perf_counter() - begun)


def lightning_rate(dataset: Files, workers: int, options: Options, seconds: float) -> float | None:
    """Samples a second of a Lightning Trainer at batch 32 in bf16; None where it is not installed."""
    try:
        pl = importlib.import_module("lightning.pytorch")
    except ImportError:
        return None
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    device = torch.device(options.device)
    found: list[float] = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        """The model with its step."""

        def __init__(self) -> None:
            super().__init__()
            self.model = Scaled(resnet18(options.quick))

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters())

    class Clock(pl.Callback):  # type: ignore[misc, name-defined]
        """Times from the second round of the workers on."""

        def __init__(self) -> None:
            super().__init__()
            self._steps, self._begun = 0, 0.0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self._steps += 1
            if self._steps == 2 * workers + 4:
                wait(device)
                self._begun = time.perf_counter()
            elif self._begun and time.perf_counter() - self._begun > seconds:
                wait(device)
                found.append(32 * (self._steps - 2 * workers - 4) / (time.perf_counter() - self._begun))
                trainer.should_stop = True
                self._begun = 0.0

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            max_epochs=1000,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Clock()],
            default_root_dir=folder,
        )
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=32, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )  # fmt: skip
        trainer.fit(Module(), loader)
    return found[0] if found else 0.0
