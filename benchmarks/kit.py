"""Whether the kit answers right: its batch, its memory account, its workers, and training from JPEG files.

    python -m benchmarks.kit [--only PART …] [--quick] [--device cpu|cuda] [--files 20000] [--json FILE]

- batch: under the memory of a T4, for ResNet-18 and an encoder of BERT-base's size: does the largest batch train, does
  one sample more fail, and is the fastest within 3 % of a sweep over all sizes;
- memory: does the account add up to the allocator's peak within 5 %;
- workers: for data in memory and for a slow dataset, against loops over a plain DataLoader with every count;
- jpeg: files decoded once, then samples/s of training with hotlap against the same step with its batch at hand (at
  least 0.9), and against Lightning with its best count of workers (at least 2.5x).

- catalogue: the bytes a sample of every example in `hotlap.kit.catalogue`, counted again on the CPU and compared.

Each part takes less than 10 minutes on an H200. A requirement is `kept` or `broken`; exit code 1 where one is broken.
`--quick` makes all of it small: it shows that the benchmark runs, and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hotlap
from hotlap import Job, Rig
from hotlap.core.units import MIB, show_bytes, show_rate, show_seconds
from hotlap.data.decoding import squared
from hotlap.data.pictures import decoded
from hotlap.kit import catalogue
from hotlap.kit.batch import tried
from hotlap.kit.bench import opened
from hotlap.machine.catalogue import find_gpu
from hotlap.machine.limits import read_cpu
from hotlap.moves.every import everything
from hotlap.recipes.picture_networks import NetworkPlan, made

LEAST_SPEED, LEAST_LIMIT, LEAST_GAIN, MOST_OFF = 0.97, 0.9, 2.5, 0.05
MOST_GUESSED = 0.25
"""How far what was predicted to bring memory down may be off what was measured."""
NEAR = 1.05
"""A count of workers is right whose time is within so much of the best."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One requirement and what was seen."""

    part: str
    what: str
    seen: str
    kept: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is to be run."""

    device: str
    quick: bool
    files: int


# --- what is trained -------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """An encoder over tokens of BERT-base's size, with a classifier on its mean."""

    def __init__(self, width: int = 768, heads: int = 12, blocks: int = 12, words: int = 30_522) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """A score for each class."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.head(self.blocks(self.words(tokens) + self.places(places)).mean(1))
        return scores


def resnet18(quick: bool) -> nn.Module:
    """torchvision's where it is installed, else the recipe's own of the same depth and width."""
    if not quick:
        try:
            model: nn.Module = importlib.import_module("torchvision.models").resnet18(num_classes=10)
        except ImportError:
            pass
        else:
            return model
    return made("resnet", NetworkPlan(size=32 if quick else 224, outputs=10, width=8 if quick else 64)).body


def jobs(options: Options) -> dict[str, Job]:
    """Both trainings, with random samples: neither speed nor memory depends on what is in them."""
    torch.manual_seed(0)
    quick, draws = options.quick, torch.Generator().manual_seed(1)
    side, count, length = (32, 256, 16) if quick else (224, 2048, 128)
    pictures = torch.randn(count, 3, side, side, generator=draws)
    tokens = torch.randint(1000, (count, length), generator=draws)
    encoder = Encoder(32, 2, 2, 1000) if quick else Encoder()
    common: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        "batch_size": 32,
        "epochs": 1,
        "device": options.device,
    }
    classes = torch.randint(2, (count,), generator=draws)
    return {
        "ResNet-18": Job(model=resnet18(quick), data=(pictures, classes), **common),
        "BERT-base": Job(model=encoder, data=(tokens, classes), **common),
    }


@contextmanager
def as_t4(device: str) -> Iterator[None]:
    """Inside, torch may take no more of the GPU than a T4 has."""
    if device == "cpu":
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, find_gpu("t4").usable_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()


# --- batch -----------------------------------------------------------------------------------------------


def batch_rows(options: Options) -> Iterator[Row]:
    """The largest and the fastest batch, each against what it should be."""
    for name, job in jobs(options).items():
        with as_t4(options.device):
            found = hotlap.batch(job, seconds=5 if options.quick else 180)
            print(f"\n{name}\n{found.summary()}\n")
            largest = found.largest
            assert largest is not None, "nothing trains"
            with opened(job) as bench:
                trains = bench.trains(bench.window(largest.size), updates=5)
                yield Row(part="batch", what=f"{name}: {largest.size:,} trains", seen=trains or "yes", kept=not trains)
                if found.searched.found_largest:
                    more = bench.trains(bench.window(largest.size + 1), updates=5)
                    what = f"{name}: {largest.size + 1:,} does not"
                    yield Row(part="batch", what=what, seen=more or "it trains", kept=more is not None)
                elif options.device != "cpu":
                    yield Row(
                        part="batch", what=f"{name}: the largest is proven", seen=found.searched.ended, kept=False
                    )
                kept, fast = found.keeps_reserve, found.fastest
                assert kept is not None
                assert fast is not None
                sizes = sorted({fast.size, kept.size, *sweep_sizes(kept.size, 6 if options.quick else 28)})
                effective = job.effective_batch or 1
                speeds = {size: tried(bench, size, effective, True).samples_per_s or 0.0 for size in sizes}
            best = max(speeds, key=lambda size: speeds[size])
            part = speeds[fast.size] / speeds[best]
            told = f"{fast.size:,} has {part:.1%} of {best:,} ({show_rate(speeds[best])} samples/s; {len(sizes)} sizes)"
            yield Row(part="batch", what=f"{name}: the fastest", seen=told, kept=part >= LEAST_SPEED or options.quick)


def sweep_sizes(most: int, count: int) -> list[int]:
    """Sizes from 1 up, evenly on a logarithmic scale."""
    return sorted({int(size) for size in np.geomspace(2, max(2, most), count).round()})


# --- memory ----------------------------------------------------------------------------------------------


def memory_rows(options: Options) -> Iterator[Row]:
    """The account against the allocator."""
    for name, job in jobs(options).items():
        found = hotlap.memory(job)
        print(f"\n{name}\n{found.summary()}\n")
        off = abs(found.peak_bytes - found.counted_bytes) / found.peak_bytes
        told = f"{show_bytes(found.counted_bytes)} of {show_bytes(found.peak_bytes)}: {off:.1%} off"
        yield Row(part="memory", what=f"{name}: the account", seen=told, kept=off <= MOST_OFF)
        for one in found.savings:
            if one.peak_bytes is not None:
                seen = f"{show_bytes(one.predicted_bytes)} predicted, {show_bytes(one.peak_bytes)} measured"
                near = abs(one.predicted_bytes - one.peak_bytes) <= MOST_GUESSED * one.peak_bytes
                yield Row(part="memory", what=f"{name}: {one.what}", seen=seen, kept=near)


# --- workers ---------------------------------------------------------------------------------------------


class Slow(Dataset[tuple[Tensor, int]]):
    """Samples that take some milliseconds of a core each."""

    def __init__(self, count: int, rounds: int) -> None:
        self._count, self._rounds = count, rounds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        numbers = np.random.default_rng(index).standard_normal(4096)
        for _ in range(self._rounds):
            numbers = np.sort(np.tanh(numbers))
        return torch.from_numpy(numbers[:256]).float(), index % 10


def small_job(data: Any, options: Options, **more: Any) -> Job:
    """A small network over vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = nn.CrossEntropyLoss()
    return Job(model=model, data=data, loss=loss, optimizer=optimizer, epochs=1, device=options.device, **more)


def workers_rows(options: Options) -> Iterator[Row]:
    """How many workers pay, against a plain loop with every count."""
    count = 512 if options.quick else 4096
    in_memory = (torch.randn(count, 256), torch.randint(10, (count,)))
    slow = Slow(count, 2 if options.quick else 8)
    for name, data in (("data in memory", in_memory), ("a slow dataset", slow)):
        dataset = torch.utils.data.TensorDataset(*data) if isinstance(data, tuple) else data
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=32, shuffle=True)
        found = hotlap.workers(small_job(loader, options), seconds=30 if options.quick else 200)
        print(f"\n{name}\n{found.summary()}\n")
        tries = [n for n in sorted({0, 1, 2, 3, 4, 6, 8, 12, read_cpu().cores}) if n <= read_cpu().cores]
        swept = {n: plain_step_s(dataset, n, options) for n in tries}
        best, chosen = min(swept, key=lambda n: swept[n]), found.best_count
        assert chosen is not None
        told = ", ".join(f"{n}: {show_seconds(step_s)}" for n, step_s in swept.items())
        pays = swept[chosen] <= NEAR * swept[best] or options.quick
        yield Row(part="workers", what=f"{name}: {chosen} workers", seen=f"{best} best ({told})", kept=pays)


def plain_step_s(dataset: Any, workers: int, options: Options) -> float:
    """Seconds a step of a loop as people write it, from the second round of the workers on."""
    job = small_job(dataset, options, batch_size=32)
    device = torch.device(options.device)
    model = job.model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    pinned = device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=32, shuffle=True, num_workers=workers, persistent_workers=workers > 0, pin_memory=pinned
    )
    warm, most_s, made_steps, begun = 2 * workers + 2, 1.0 if options.quick else 4.0, 0, 0.0
    while True:
        for x, y in loader:
            if made_steps == warm:
                _wait(device)
                begun = time.perf_counter()
            if made_steps > warm + 20 and time.perf_counter() - begun > most_s:
                _wait(device)
                return (time.perf_counter() - begun) / (made_steps - warm)
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True)).backward()
            optimizer.step()
            made_steps += 1


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- JPEG files ------------------------------------------------------------------------------------------


class Files(Dataset[tuple[Tensor, int]]):
    """JPEG files as most people read them: decoded whenever they are asked for."""

    def __init__(self, paths: list[Path], side: int) -> None:
        self._paths, self._side = paths, side

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(squared(self._paths[index].read_bytes(), self._side)), index % 10


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
    image = importlib.import_module("PIL.Image")
    chance = np.random.default_rng(0)
    paths = []
    for number in range(count):
        coarse = chance.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        path = folder / f"{number:06}.jpg"
        image.fromarray(coarse).resize((side, side), image.Resampling.BICUBIC).save(path, quality=90)
        paths.append(path)
    return paths


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
                _wait(device)
                self._begun = time.perf_counter()
            elif self._begun and time.perf_counter() - self._begun > seconds:
                _wait(device)
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


# --- the catalogue ---------------------------------------------------------------------------------------


class Lstm(nn.Module):
    """Two layers, both ways, over windows of 29 features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(29, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, windows: Tensor) -> Tensor:
        """A score for each class."""
        scores: Tensor = self.head(self.layers(windows)[0][:, -1])
        return scores


class OfTransformers(nn.Module):
    """A classifier of the transformers library, from its config."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        library = importlib.import_module("transformers")
        task = "SequenceClassification" if kind == "Bert" else "ImageClassification"
        self.body = getattr(library, f"{kind}For{task}")(getattr(library, f"{kind}Config")(**settings))

    def forward(self, inputs: Tensor) -> Tensor:
        """A score for each class."""
        scores: Tensor = self.body(inputs).logits
        return scores


def _residual(*depths: int) -> nn.Module:
    return OfTransformers("ResNet", depths=list(depths))


def _attending(kind: str, width: int, blocks: int) -> nn.Module:
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": width // 64}
    # On the CPU, dropout within attention makes torch keep whole maps of it, which no GPU does.
    return OfTransformers(kind, **sizes, intermediate_size=4 * width, attention_probs_dropout_prob=0.0)


def _dense(*widths: int) -> nn.Module:
    layers = [
        [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()] for before, after in itertools.pairwise(widths)
    ]
    return nn.Sequential(*itertools.chain(*layers[:-1]), layers[-1][0])


def _picture_network(name: str, width: int) -> nn.Module:
    return made(name, NetworkPlan(size=224, outputs=10, width=width)).body


EXAMPLES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ResNet-18 of a quarter's width": (lambda: _picture_network("resnet", 16), 4),
    "ResNet-18": (lambda: _picture_network("resnet", 64), 4),
    "ResNet-50": (lambda: _residual(3, 4, 6, 3), 4),
    "ResNet-152": (lambda: _residual(3, 8, 36, 3), 4),
    "the image recipe's ViT": (lambda: _picture_network("vit", 64), 4),
    "ViT-S/16": (lambda: _attending("ViT", 384, 12), 4),
    "ViT-B/16": (lambda: _attending("ViT", 768, 12), 4),
    "ViT-L/16": (lambda: _attending("ViT", 1024, 24), 4),
    "BERT-mini": (lambda: _attending("Bert", 256, 4), 16),
    "BERT-base": (lambda: _attending("Bert", 768, 12), 4),
    "LSTM 2×128, both ways": (lambda: Lstm(128), 16),
    "LSTM 2×512, both ways": (lambda: Lstm(512), 16),
    "MLP 100-256-128-64-3": (lambda: _dense(100, 256, 128, 64, 3), 1024),
    "MLP 560-1024-1024-1024-424": (lambda: _dense(560, 1024, 1024, 1024, 424), 1024),
}
"""How each example is made, and the smaller of two batches that are counted, the other having twice as many samples:
large enough that the peak of an update is where the activations are."""


def catalogue_rows(options: Options) -> Iterator[Row]:
    """What a sample takes, counted again."""
    for example in catalogue.EXAMPLES:
        make, few = EXAMPLES[example.name]
        if options.quick and example.parameters > 1e6:
            continue
        try:
            model = make()
        except ImportError:
            yield Row(part="catalogue", what=example.name, seen="transformers is not installed", kept=True)
            continue
        count = bytes_a_sample(model, example, few)
        told = f"{count / MIB:.4g} MiB a sample of {example.size}, {example.bytes_a_sample / MIB:.4g} in the catalogue"
        near = abs(count - example.bytes_a_sample) <= MOST_OFF * count
        parameters = sum(p.numel() for p in model.parameters())
        yield Row(part="catalogue", what=f"{example.name}, {parameters:,} parameters", seen=told, kept=near)


def bytes_a_sample(model: nn.Module, example: catalogue.Example, few: int) -> float:
    """What an update has more for each sample more, by the sizes of its tensors."""
    inputs = {
        catalogue.CONVOLUTIONS: lambda: torch.randn(2 * few, 3, example.size, example.size),
        catalogue.VISION: lambda: torch.randn(2 * few, 3, example.size, example.size),
        catalogue.TEXT: lambda: torch.randint(1000, (2 * few, example.size)),
        catalogue.RECURRENT: lambda: torch.randn(2 * few, example.size, 29),
        catalogue.DENSE: lambda: torch.randn(2 * few, example.size),
    }[example.kind]()
    job = Job(
        model=model,
        data=(inputs, torch.zeros(2 * few, dtype=torch.long)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        batch_size=few,
        epochs=1,
        device="cpu",
    )
    with opened(job) as bench:
        low, high = (bench.peak_bytes(bench.window(size))[0] for size in (few, 2 * few))
    return (high - low) / few


PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "batch": batch_rows,
    "memory": memory_rows,
    "workers": workers_rows,
    "jpeg": jpeg_rows,
    "catalogue": catalogue_rows,
}


def main() -> int:
    """Run the parts that are asked for, and tell what is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = Options(device=given.device, quick=given.quick, files=given.files)
    rows: list[Row] = []
    for part in given.only:
        for row in PARTS[part](options):
            rows.append(row)
            print(f"{'kept' if row.kept else 'BROKEN':<7} {row.part:<8} {row.what}: {row.seen}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if given.json is not None:
        where = torch.cuda.get_device_name() if options.device != "cpu" else read_cpu().model
        told = {"machine": where, "torch": torch.__version__, "quick": options.quick, "rows": [asdict(r) for r in rows]}
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(any(not row.kept for row in rows))


if __name__ == "__main__":
    sys.exit(main())
