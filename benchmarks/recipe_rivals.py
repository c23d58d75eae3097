"""The loop that the guides end with, written out plainly, for the models and the data of a recipe.

    python -m benchmarks.recipe_rivals --steps 1000 --answer FILE temporal --data bars.csv …

It takes the words of `hotlap train`, reads the same file, and trains the same first weights on as many samples a step:
a DataLoader with 2 persistent, pinned workers, copies that do not block, AdamW, clipping, two values read back in every
step. All windows lie in one tensor; texts are tokenised in the dataset's `__getitem__` and padded to the longest that
is allowed. Every model is timed in fp32 and, on a GPU, in fp16 with a scaled loss; encoders there in fp16 with
activations computed again, too. The last of these is how the guides end.

Timed are steps, after some others, and one evaluation of what is held out, by such a loader and after some batches of
another: kernels that are used for the first time take long to load, and only once. Reading,
features, schedule and predictions are not.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hotlap import machine
from hotlap.data.windows import Windows
from hotlap.recipes import recipe_named
from hotlap.recipes.options import from_words, options_of
from hotlap.recipes.recipe import Prepared

Losses = Generator[float, None, None]
"""A training: each `next` makes a step and tells its loss."""
WORKERS = 2
PLAIN, SCALED, AGAIN = "fp32", "fp16", "fp16, computed again"
"""Settings of the loop."""
WARM_STEPS = 20
"""At most, before the clock starts; batches, of an evaluation."""


# --- data ----------------------------------------------------------------------------------------------


def all_windows(data: Windows) -> TensorDataset:
    """Every window written out, in one tensor, and its label."""
    windows, labels = zip(*(data[at] for at in range(len(data))), strict=True)
    return TensorDataset(torch.stack(windows), torch.stack(labels))


class TextRows(Dataset[dict[str, Tensor]]):
    """Texts one by one, tokenised when they are asked for and padded to one width."""

    def __init__(self, texts: Sequence[str], labels: Sequence[int], tokenizer: Any, width: int) -> None:
        self._texts, self._labels, self._tokenizer, self._width = texts, labels, tokenizer, width

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = self._tokenizer(
            self._texts[index], truncation=True, padding="max_length", max_length=self._width, return_tensors="pt"
        )
        return {
            "input_ids": found["input_ids"].squeeze(0),
            "attention_mask": found["attention_mask"].squeeze(0),
            "labels": torch.tensor(self._labels[index]),
        }

    def __len__(self) -> int:
        return len(self._texts)


def text_rows(path: str, options: Any, prepared: Prepared) -> TextRows:
    """The rows of a file, with a recipe's tokenizer as transformers wraps it."""
    transformers = importlib.import_module("transformers")
    reader: Any = prepared.reader
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=reader.encoder.tokenizer, pad_token="[PAD]")
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    (column,) = reader.columns
    labels = [reader.classes.index(row[prepared.target_name]) for row in rows]
    return TextRows([row[column] for row in rows], labels, tokenizer, options.most)


# --- the loop ------------------------------------------------------------------------------------------


def loader_of(job: Any, data: Dataset[Any], device: torch.device, *, shuffle: bool) -> DataLoader[Any]:
    """As the guides have it."""
    return DataLoader(
        data,
        batch_size=job.batch_size,
        shuffle=shuffle,
        num_workers=WORKERS,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )


def guide_loop(
    job: Any, data: Dataset[Any], forward: Callable[[nn.Module, Any], Tensor], device: torch.device, *, setting: str
) -> Losses:
    """Steps of the model of a recipe's job, epoch after epoch without end."""
    fp16 = setting != PLAIN
    model, loss_of = job.model.to(device).train(), job.loss.to(device)
    if setting == AGAIN:
        model.encoder.gradient_checkpointing_enable()
    given = job.optimizer.defaults
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], weight_decay=given["weight_decay"])
    scaler = torch.amp.GradScaler(device.type, enabled=fp16)
    loader = loader_of(job, data, device, shuffle=True)
    running, right = 0.0, 0.0
    while True:
        for brought in loader:
            batch, labels = moved(brought, device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.float16, enabled=fp16):
                output = forward(model, batch)
                loss = loss_of(output, labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
            scaler.step(optimizer)
            scaler.update()
            this = loss.item()
            running += this
            right += (output.argmax(1) == labels).float().mean().item()
            yield this


def evaluated(
    job: Any, data: Dataset[Any], forward: Callable[[nn.Module, Any], Tensor], device: torch.device, *, setting: str
) -> float:
    """Seconds that one evaluation takes, after some batches of another: it stands for that of every epoch."""
    model, loss_of = job.model.eval(), job.loss
    loader = loader_of(job, data, device, shuffle=False)
    running, right = 0.0, 0
    with torch.no_grad():
        for most in (WARM_STEPS, len(loader)):
            begun = time.perf_counter()
            for brought in itertools.islice(loader, most):
                batch, labels = moved(brought, device)
                with torch.autocast(device.type, dtype=torch.float16, enabled=setting != PLAIN):
                    output = forward(model, batch)
                    running += loss_of(output, labels).item()
                right += int((output.argmax(1) == labels).sum().item())
    return time.perf_counter() - begun


def moved(batch: Any, device: torch.device) -> tuple[Any, Tensor]:
    """A batch on the device, and its labels."""
    if isinstance(batch, dict):
        there = {name: part.to(device, non_blocking=True) for name, part in batch.items()}
        return there, there["labels"]
    parts = [part.to(device, non_blocking=True) for part in batch]
    return parts, parts[1]


def timed(training: Losses, steps: int, device: torch.device) -> dict[str, Any]:
    """So many steps on the clock, after some that are not."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(min(WARM_STEPS, steps)):
        next(training)
    wait()
    begun = time.perf_counter()
    for _ in range(steps):
        loss = next(training)
    wait()
    seconds = time.perf_counter() - begun
    return {"steps": steps, "seconds": seconds, "step_s": seconds / steps, "loss": loss}


def settings_of(name: str, device: torch.device) -> tuple[str, ...]:
    """How the loop is timed; the last is how the guides end."""
    if device.type != "cuda":
        return (PLAIN,)
    return (PLAIN, SCALED, AGAIN) if name == "text" else (PLAIN, SCALED)


def rival_of(name: str, words: Sequence[str], steps: int) -> dict[str, dict[str, Any]]:
    """For each model of a recipe, by setting, what its steps and an evaluation took."""
    recipe = recipe_named(name)
    options: Any = options_of(recipe.options_type, None, from_words(words))
    device = machine.choose_device(options.device)
    prepared = recipe.prepare(options, _say)
    sides: list[Dataset[Any]] = []
    if name == "text":
        if not options.valid:
            raise SystemExit("recipe_rivals: text needs --valid FILE, by which an evaluation is timed")
        sides = [text_rows(path, options, prepared) for path in (options.data, options.valid)]
    found: dict[str, dict[str, Any]] = {}
    for one in prepared.candidates:
        found[one.name] = {}
        for setting in settings_of(name, device):
            job = one.job()
            sides = sides or [all_windows(job.data), all_windows(job.valid)]
            training = guide_loop(job, sides[0], prepared.reader.forward, device, setting=setting)
            told = timed(training, steps, device)
            training.close()  # its workers end before others are timed
            told["evaluation_s"] = evaluated(job, sides[1], prepared.reader.forward, device, setting=setting)
            found[one.name][setting] = told
            paces = f"{1e3 * told['step_s']:.3g} ms a step, {told['evaluation_s']:.3g} s an evaluation"
            _say(f"{one.name} in {setting}: {paces}")
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time a recipe's models; the answer goes to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of each model and precision")
    parser.add_argument("--answer", type=Path, required=True, help="a file for the figures")
    parser.add_argument("recipe", choices=("temporal", "text"))
    parser.add_argument("words", nargs=argparse.REMAINDER, help="as for hotlap train")
    options = parser.parse_args(arguments)
    options.answer.write_text(json.dumps(rival_of(options.recipe, options.words, options.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
