"""Which kernels of attention drop well, and what trainings come to by each of them.

    python -m benchmarks.attention_masks [--epochs 25] [--seeds 2] [--only masks training] [--json FILE]

- masks: what each kernel drops in calls of several shapes, as hotlap looks at it before it lets a kernel drop: the
  share of places that are dropped in calls of their own, and how much more the number of those dropped varies than by
  chance;
- training: the small Transformer of `benchmarks/user_scripts`, trained by each kernel in fp32 and bf16 from the same
  first weights on the same batches; shown are the mean loss of the last epoch, and the share of held-out samples that
  are classified rightly in fp32, for each seed. Nothing of hotlap is in these trainings.

It needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.user_scripts.transformer import Model
from benchmarks.versions import versions
from hotlap.engine.assists.attention import NAMES, Call, masks_of

SHAPES = [(128, 4, 20, 32), (16, 12, 48, 64), (16, 12, 64, 64), (16, 12, 96, 64), (16, 12, 192, 64), (8, 12, 384, 64)]
"""Samples, heads, places, size of a head."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLES, HELD_OUT = 20_000, 2_000
BATCH, LR = 128, 5e-4
WARM_STEPS = 3


def looked_at(device: torch.device) -> list[dict[str, Any]]:
    """The masks of each kernel at each shape; a kernel that has none there is left out."""
    rows = []
    for shape in SHAPES:
        for precision, dtype in PRECISIONS.items():
            for kernel, name in NAMES.items():
                tensors = torch.randn(3, *shape, device=device, dtype=dtype)
                try:
                    found = masks_of(Call(*tensors, None, 0.1, False, None, False), kernel)
                except RuntimeError:
                    continue
                row = {"shape": shape, "precision": precision, "kernel": name, "good": found.are_good}
                rows.append({**row, "distinct": found.distinct, "spread": found.spread})
                told = "good" if found.are_good else "POOR"
                print(
                    f"  {shape!s:<20} {precision} {name:<10} {told}  {found.distinct:7.2%} of places by themselves, "
                    f"variance {found.spread:.2f} of chance's, at most {found.limit:.2f}",
                    flush=True,
                )
    return rows


def data_of(device: torch.device) -> tuple[Tensor, Tensor]:
    """As the script makes it: windows, and which of three classes their mean is of."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 20, 29, generator=generator)
    y = (x.mean(1) @ torch.randn(29, 3, generator=generator)).argmax(1)
    return x.to(device), y.to(device)


class Training:
    """One of them: on a GPU its step is captured, and all data is there."""

    def __init__(self, kernel: SDPBackend | None, dtype: torch.dtype, seed: int, device: torch.device) -> None:
        self._kernel, self._dtype, self._device = kernel, dtype, device
        torch.manual_seed(seed)
        self._model = Model().to(device)
        self._x, self._y = data_of(device)
        self._rate = torch.tensor(LR, device=device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=self._rate, fused=True, capturable=True)
        self._chosen = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self._losses = torch.zeros((), device=device)

    def run(self, epochs: int) -> tuple[float, float]:
        """The mean loss of the last epoch, and the share of held-out samples that are right after it."""
        batches = (SAMPLES - HELD_OUT) // BATCH
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR), LR, epochs * batches, cycle_momentum=False
        )
        replay = None
        self._model.train()
        for epoch in range(epochs):
            self._losses.zero_()
            order = torch.randperm(SAMPLES - HELD_OUT, device=self._device)[: batches * BATCH].view(batches, BATCH)
            for number, chosen in enumerate(order):
                self._rate.fill_(schedule.get_last_lr()[0])
                self._chosen.copy_(chosen)
                if epoch == 0 and number == WARM_STEPS:
                    replay = self._captured()
                (replay or self._aside)()
                schedule.optimizer.step()
                schedule.step()
        self._model.eval()
        with torch.no_grad():
            right = self._model(self._x[-HELD_OUT:]).argmax(1) == self._y[-HELD_OUT:]
        return float(self._losses) / batches, float(right.float().mean())

    def _step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with self._autocast(), nullcontext() if self._kernel is None else sdpa_kernel(self._kernel):
            output = self._model(self._x[self._chosen])
        loss = F.cross_entropy(output.float(), self._y[self._chosen])
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._losses += loss.detach()

    def _aside(self) -> None:
        """A step on another stream, as before a capture."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)

    def _captured(self) -> Callable[[], None]:
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is torch.float32 else torch.autocast("cuda", dtype=self._dtype)


def trained(epochs: int, seeds: int, device: torch.device) -> list[dict[str, Any]]:
    """A training by each kernel in each precision; where it cannot be, it is left out."""
    rows = []
    for precision, dtype in PRECISIONS.items():
        for kernel, name in {None: "torch's own", **NAMES}.items():
            try:
                found = [Training(kernel, dtype, seed, device).run(epochs) for seed in range(seeds)]
            except RuntimeError:
                continue
            losses, right = zip(*found, strict=True)
            rows.append({"precision": precision, "kernel": name, "losses": losses, "right": right})
            shown = ", ".join(f"{loss:.4f}" for loss in losses), ", ".join(f"{share:.4f}" for share in right)
            print(f"  {precision} {name:<12} loss {shown[0]}; held out {shown[1]}", flush=True)
    return rows


def main() -> int:
    """Look at all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=("masks", "training"), default=("masks", "training"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention_masks: these kernels are those of a GPU, and there is none", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")  # of kernels that are not there for a shape
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    facts: dict[str, Any] = {"device": name, "versions": versions()}
    print(f"attention that drops, on {name}, torch {torch.__version__}")
    if "masks" in options.only:
        print("masks")
        facts["masks"] = looked_at(device)
    if "training" in options.only:
        print(f"trainings of {options.epochs} epochs")
        facts["training"] = trained(options.epochs, options.seeds, device)
    if options.json is not None:
        options.json.write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
