"""Predicted step times against measured ones, on an H200; and the factors of the prediction.

    python -m benchmarks.predictions [--json FILE]

Measured: step times in the files of `benchmarks/results` that each row names, by a quote that stands in the file.
Predicted: from the work of one update, counted here, and the published rates of an H200. The factors that predict a
work come from the other works alone. The last lines give the factors that all works together come to; the exit code
is 1 if those in `hotlap/machine/prediction.py` differ from them by more than 2 %.

Nothing is trained: large models compute with tensors that have shapes and no numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kit.trainings import Encoder
from benchmarks.networks import NETWORKS
from benchmarks.texts import NUMBERS, TextWork, text_works
from benchmarks.versions import versions
from benchmarks.work import WORKS, Work
from hotlap.machine import prediction
from hotlap.machine.catalogue import find_gpu
from hotlap.machine.prediction import (
    AS_IT_IS,
    AS_IT_IS_ERROR,
    AT_BEST,
    AT_BEST_ERROR,
    Error,
    Factors,
    as_it_is_s,
    at_best_s,
)
from hotlap.monitor import work as counted

RESULTS = Path(__file__).parent / "results"
H200 = find_gpu("h200")
WRITTEN: Mapping[str, str] = {
    "whole-run-h200.json": "2026-11-19",
    "fast-path-h200.txt": "2026-11-15",
    "fast-path-h200-texts.txt": "2026-11-17",
    "whole-run-h200-texts.txt": "2026-11-17",
    "precision-h200.txt": "2026-11-18",
    "kit-memory-h200.txt": "2026-11-17",
    "resnet50-whole-run-h200.txt": "2026-11-18",
}
"""When each file was stored."""
PADDED = 0.113
"""Share of padding in batches of texts of similar length, as `fast-path-h200-texts.txt` has it."""
START = Factors(arithmetic=0.3, traffic=0.3, launch_s=3e-6, issue_s=3e-5, begin_s=1e-3)
"""Where the search for factors begins. Those that are not searched for stay so, or do not matter."""
SAME = 1.02
"""Factors count as the same up to this ratio."""
ENCODER = "Encoder of BERT-base's size, 128 tokens, batch 32"
Predict = Callable[[prediction.Work, Factors], float]


@dataclass(frozen=True)
class Measured:
    """A step time that a stored file holds."""

    file: str
    quote: str
    """Stands in the file."""
    step_s: float
    feeding: float = 0.0
    """Share of the step that goes to bringing batches, as the same row of the file has it."""

    @property
    def seconds(self) -> float:
        """Of a step with its batch ready."""
        return self.step_s * (1 - self.feeding)


def _paced(steps: int, quote: str) -> Measured:
    """A training of so many steps that takes 25 s as the user brings it."""
    return Measured("precision-h200.txt", quote, 25 / steps)


FITS, PRECISION, TEXTS = "whole-run-h200.json", "precision-h200.txt", "whole-run-h200-texts.txt"
AS_WRITTEN: Mapping[str, Measured] = {
    "LSTM 2×128, batch 128": Measured(FITS, "issuing 25 operations takes 2.59 of 3.22 ms", 2.59e-3),
    "Transformer d128, batch 128": Measured(FITS, "issuing 229 operations takes 7.18 of 7.84 ms", 7.18e-3),
    "MLP, batch 256": Measured(FITS, "issuing 52 operations takes 2.38 of 3.92 ms", 2.38e-3),
    "ResNet-18, batch 32": Measured(FITS, "issuing 175 operations takes 8.16 of 12.8 ms", 8.16e-3),
    "BERT-base, batch 16": Measured(TEXTS, "operations takes 29.4 of 30.8 ms", 29.4e-3),
    "DeBERTa-base with numbers, batch 8": Measured(TEXTS, "operations takes 52 of 52.7 ms", 52e-3),
    ENCODER: Measured("kit-memory-h200.txt", "4.0 GiB    62.8 ms", 62.8e-3),
    "ResNet-50, 128², batch 64": Measured("resnet50-whole-run-h200.txt", "18.7 ms/step", 18.7e-3, 0.07),
    "ResNet-50, 224², batch 64": _paced(715, "240 of 715; 15.5 s in place of 25 s"),
    "ResNet-18, 224², batch 64": _paced(1734, "246 of 1,734; 11.8 s in place of 25 s"),
    "MobileNetV3, 224², batch 64": Measured(PRECISION, "26.6 ms/step", 26.6e-3, 0.06),
    "EfficientNet-B0, 224², batch 64": Measured(PRECISION, "38.2 ms/step", 38.2e-3, 0.05),
    "DenseNet-121, 128², batch 64": _paced(595, "432 of 595; 17.4 s in place of 25 s"),
    "VGG-16-BN, 128², batch 64": _paced(822, "246 of 822; 15.8 s in place of 25 s"),
    "ConvNeXt-T, 128², batch 64": Measured(PRECISION, "38 ms/step", 38e-3, 0.04),
    "ViT-S, 224², batch 64": Measured(PRECISION, "57.4 ms/step", 57.4e-3, 0.05),
    "U-Net, 96², batch 16": _paced(3607, "240 of 3,607; 9 s in place of 25 s"),
    "LSTM 2×256, batch 64": _paced(6619, "517 of 6,619; 4.64 s in place of 25 s"),
}
"""Trainings as the user brings them: fp32, plain AdamW, eager."""
FAST: Mapping[str, Measured] = {
    "LSTM 2×128, batch 128": Measured(FITS, "0.0003796611058823295", 0.3797e-3),
    "Transformer d128, batch 128": Measured(FITS, "0.0010916585138887787", 1.0917e-3),
    "MLP, batch 256": Measured(FITS, "0.00015473490437499117", 0.1547e-3),
    "ResNet-18, batch 32": Measured(FITS, "0.003558693911458022", 3.5587e-3),
    "ResNet-18, batch 256": Measured("fast-path-h200.txt", "13,367  1.000", 256 / 13_367),
    "ResNet-50, 128², batch 64": Measured(
        "resnet50-whole-run-h200.txt", "total                       6.68 ms", 6.68e-3
    ),
    "BERT-base, batch 16": Measured("fast-path-h200-texts.txt", "2,507   3,113  1.241", 16 / 3_113),
    "DeBERTa-base with numbers, batch 8": Measured("fast-path-h200-texts.txt", "648     674  1.041", 8 / 674),
}
"""The same under hotlap's plan: bf16, captured, held data, fused AdamW."""


# --- the work of an update -----------------------------------------------------------------------------


def batch_of(work: Work) -> Any:
    """A batch of the work's shape."""
    if isinstance(work, TextWork):
        lengths = work.data().train.lengths.double()
        width = 8 * round(float(lengths.mean()) / (1 - PADDED) / 8)
        ids = torch.ones(work.batch, width, dtype=torch.int64)
        if "numbers" in work.name:
            return {
                "input_ids": ids,
                "attention_mask": ids,
                "numbers": torch.ones(work.batch, NUMBERS),
                "labels": torch.ones(work.batch),
            }
        return {"input_ids": ids, "attention_mask": ids, "labels": ids[:, 0]}
    if not work.images:
        data = work.data()
        return data.x[: work.batch], data.y[: work.batch]
    side = next((int(word.strip("²,")) for word in work.name.split() if "²" in word), 224)
    return torch.ones(work.batch, 3, side, side), torch.ones(work.batch, dtype=torch.int64)


def loss_of(work: Work, model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch."""
    loss: Tensor = work.loss(model, batch) if isinstance(work, TextWork) else work.loss(model(batch[0]), batch[1])
    return loss


def work_of(work: Work) -> prediction.Work:
    """What an update asks of a GPU."""
    is_large = work.images or isinstance(work, TextWork)
    model, made = work.build().train(), batch_of(work)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if is_large else contextlib.nullcontext()
    with mode:
        if isinstance(mode, FakeTensorMode):
            model, made = _without_numbers(model, made, mode)
        optimizer = work.optimizer(model)

        def update() -> None:
            loss_of(work, model, made).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        update()  # makes the optimizer's state
        return counted.count_work(update)


def _without_numbers(model: nn.Module, batch: Any, mode: FakeTensorMode) -> tuple[nn.Module, Any]:
    """Both with tensors that have a shape alone."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model._apply(mode.from_tensor)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    return model, torch.utils._pytree.tree_map(mode.from_tensor, batch)


def encoder_work() -> Work:
    """The encoder of `benchmarks.kit`."""

    def data() -> Any:
        tokens = torch.ones(32, 128, dtype=torch.int64)
        return _Batch(tokens, tokens[:, 0])

    return Work(name=ENCODER, model=Encoder, data=data, batch=32, precision="bf16", replay_steps=1)


@dataclass(frozen=True)
class _Batch:
    x: Tensor
    y: Tensor


# --- factors -------------------------------------------------------------------------------------------


LIMITS: Mapping[str, tuple[float, float]] = {
    "arithmetic": (0.05, 1.0),
    "traffic": (0.05, 1.0),
    "launch_s": (5e-7, 2e-5),
    "issue_s": (5e-6, 2e-4),
    "begin_s": (1e-5, 5e-3),
}


Rows = Mapping[str, Measured]


@dataclass(frozen=True)
class Part:
    """One way to train, with its measured times."""

    title: str
    rows: Rows
    predict: Predict
    known: Factors
    """What hotlap predicts with."""
    known_error: Error
    free: tuple[str, ...]
    """The factors that are fitted."""

    def fitted(self, works: Mapping[str, prediction.Work], without: str = "") -> Factors:
        """The factors with the least squares of relative errors: one after the other moves while that helps."""
        rows = {name: row for name, row in self.rows.items() if name != without}

        def cost(factors: Factors) -> float:
            return sum(math.log(self.predict(works[name], factors) / row.seconds) ** 2 for name, row in rows.items())

        best, step = START, 0.5
        least = cost(best)
        while step > 1e-4:
            moved = False
            for name, ratio in itertools.product(self.free, (1 + step, 1 / (1 + step))):
                low, high = LIMITS[name]
                tried = dataclasses.replace(best, **{name: min(high, max(low, getattr(best, name) * ratio))})
                if (found := cost(tried)) < least - 1e-12:
                    best, least, moved = tried, found, True
            step = step if moved else step / 2
        return best

    def predicted(self, works: Mapping[str, prediction.Work]) -> dict[str, float]:
        """For each work the seconds of a step, with factors from all others."""
        return {name: self.predict(works[name], self.fitted(works, without=name)) for name in self.rows}

    def error(self, predicted: Mapping[str, float]) -> Error:
        """How far measured times are from predicted ones."""
        ratios = [self.rows[name].seconds / seconds for name, seconds in predicted.items()]
        return Error(low=min(ratios), high=max(ratios), works=len(ratios))

    def lines(self, predicted: Mapping[str, float], whole: Factors) -> Iterator[str]:
        """The table, for people."""
        yield f"{self.title:<52} predicted  measured   error  measured in"
        off = {name: seconds / self.rows[name].seconds - 1 for name, seconds in predicted.items()}
        for name, seconds in predicted.items():
            row = self.rows[name]
            times = f"{1e3 * seconds:>6.3g} ms {1e3 * row.seconds:>6.3g} ms"
            yield f"  {name:<50} {times}  {off[name]:>+6.0%}  {row.file} of {WRITTEN[row.file]}"
        middle, error = sorted(map(abs, off.values()))[len(off) // 2], self.error(predicted)
        yield f"  error: {middle:.0%} in the middle; measured are {error.low:.2f} to {error.high:.2f} of the predicted"
        yield f"  factors from all {len(off)}: {_shown(whole, self.free)}"
        yield ""

    def is_known(self, predicted: Mapping[str, float], whole: Factors) -> bool:
        """Whether hotlap predicts with these factors, and states this error."""
        pairs = [(getattr(self.known, name), getattr(whole, name)) for name in self.free]
        error = self.error(predicted)
        pairs += [(self.known_error.low, error.low), (self.known_error.high, error.high)]
        return all(max(one / other, other / one) < SAME for one, other in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 1 if hotlap has other factors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    there = {work.name: work for work in (*WORKS, *text_works(), *NETWORKS, encoder_work())}
    works = {name: work_of(there[name]) for name in dict.fromkeys([*AS_WRITTEN, *FAST])}
    print("step times on an NVIDIA H200, measured as the files in benchmarks/results have them, and predicted with")
    print(
        "factors from the other works; work counted with " + ", ".join(f"{n} {v}" for n, v in versions().items()) + "\n"
    )
    is_known, report = True, {}
    for part in PARTS:
        predicted, whole = part.predicted(works), part.fitted(works)
        print(*part.lines(predicted, whole), sep="\n")
        is_known &= part.is_known(predicted, whole)
        measured = {name: row.seconds for name, row in part.rows.items()}
        report[part.title] = {"predicted_s": predicted, "measured_s": measured, "factors": vars(whole)}
    if options.json:
        options.json.write_text(json.dumps({"works": {n: w.to_dict() for n, w in works.items()}, **report}, indent=2))
    print("hotlap predicts with these factors" if is_known else "hotlap predicts with OTHER factors")
    return 0 if is_known else 1


def _as_it_is(work: prediction.Work, factors: Factors) -> float:
    return as_it_is_s(work, H200, factors)


def _at_best(work: prediction.Work, factors: Factors) -> float:
    return at_best_s(work, H200, factors)


def _shown(factors: Factors, names: Sequence[str]) -> str:
    words = {"arithmetic": "of the arithmetic rate", "traffic": "of the bandwidth", "launch_s": "a launch"}
    words |= {"issue_s": "an operation of the host", "begin_s": "an update of the host"}
    values = {name: getattr(factors, name) for name in names}
    return ", ".join(
        f"{1e6 * value:.4g} µs {words[name]}" if name.endswith("_s") else f"{value:.4g} {words[name]}"
        for name, value in values.items()
    )


PARTS = (
    Part(
        title="as it is: eager, fp32 with TF32 convolutions",
        rows=AS_WRITTEN,
        predict=_as_it_is,
        known=AS_IT_IS,
        known_error=AS_IT_IS_ERROR,
        free=("arithmetic", "traffic", "issue_s", "begin_s"),
    ),
    Part(
        title="at best: bf16, captured, held data, fused optimizer",
        rows=FAST,
        predict=_at_best,
        known=AT_BEST,
        known_error=AT_BEST_ERROR,
        free=("arithmetic", "traffic", "launch_s"),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
