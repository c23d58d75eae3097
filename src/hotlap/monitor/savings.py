"""What would lower the peak memory of a training, predicted from one update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hotlap import machine
from hotlap.core.torch_private import BatchNormBase
from hotlap.data.batches import Batch
from hotlap.engine.blocks import checkpointed_blocks, why_not_checkpointed
from hotlap.engine.precision import why_not_precision
from hotlap.monitor.model_kind import DENSE, RECURRENT, TEXT, UNITS, kind_of_model

CHANGES = "it changes what the model learns"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Something that would lower the peak."""

    what: str = ""
    predicted_bytes: int | None = None
    """None if it is impossible."""
    predicted_step_s: float | None = None
    """None if only a try can tell."""
    peak_bytes: int | None = None
    """Measured; None if not tried."""
    step_s: float | None = None
    """Measured seconds for the samples of an update."""
    changes: str = ""
    """What it changes in the training beyond rounding."""
    why_not: str | None = None
    """Why hotlap has not tried it, or why it is impossible."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model in plain values, for a file."""

    blocks: Sequence[str]
    """The names of its repeated blocks."""
    why_no_blocks: str | None
    """Why these cannot be checkpointed."""
    precision: str | None
    """The half precision of its device, be it emulated."""
    why_no_precision: str | None
    why_slow_precision: str | None
    """Why it is too slow there to be tried."""
    least: int
    """The smallest batch that may train."""
    kind: str | None
    """What kind of model it is, as the catalogue has it; None where no batch was seen."""
    size: int = 0
    """Of its samples, in the units of that kind."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A watched update."""

    samples: int
    """Samples that go through the model at once."""
    effective_batch: int
    peak_bytes: int
    """On a GPU by torch's allocator, else counted from tensors."""
    step_s: float
    kinds: Mapping[str, int]
    """Memory at the peak, by purpose."""
    layers: Mapping[str, int]
    """Activations at the peak, by the module that made them."""
    outputs: Mapping[str, int]
    """Bytes of each module's output."""
    why_whole: str | None = None
    """Why its batch cannot be split otherwise."""

    @property
    def with_samples(self) -> int:
        """The memory that grows with the samples at once."""
        return sum(self.kinds.get(kind, 0) for kind in ("activations", "backward", "batch"))


def model_facts(model: nn.Module, sample: Batch | None, device: torch.device) -> ModelFacts:
    """Facts of a model on this device; `sample` is one of its batches."""
    names = {id(part): name for name, part in model.named_modules()}
    blocks = [names[id(block)] for block in checkpointed_blocks(model)]
    reasons = {one: why_not_precision(one, device) for one in ("bf16", "fp16")}
    precision = next((one for one, reason in reasons.items() if reason is None), None)
    fact = None if precision is None else machine.dtype_fact(device, precision)
    is_emulated = fact is not None and fact.support is machine.Support.EMULATED
    kind = None if sample is None else kind_of_model(model, sample)
    none = f"{type(model).__name__} has no repeated blocks"
    return ModelFacts(
        blocks=blocks,
        why_no_blocks=why_not_checkpointed(model, len(blocks), device) if blocks else none,
        precision=precision,
        why_no_precision=None if precision is not None else reasons["bf16"],
        why_slow_precision=fact.reason if fact is not None and is_emulated else None,
        least=least_batch([model]),
        kind=None if kind is None else kind.name,
        size=0 if kind is None else kind.size,
    )


def least_batch(modules: Iterable[nn.Module]) -> int:
    """The smallest batch that may train: a batch norm has nothing to compute from one sample."""
    layers = (layer for module in modules for layer in module.modules())
    return 1 + any(isinstance(layer, BatchNormBase) and layer.training for layer in layers)


def smaller_pieces(update: Update, model: ModelFacts) -> tuple[Saving, int]:
    """Half as many samples at once, and how many those are; impossible where batches cannot be cut."""
    least = f"{update.samples:,} at once is the smallest batch that trains" if update.samples <= model.least else None
    why_not = update.why_whole or least
    if why_not is not None:
        return Saving(what="micro-batches", why_not=why_not), 0
    half = max(model.least, -(-update.samples // 2))
    # All pieces but the first hold gradients of earlier pieces beside their activations.
    gradients = update.kinds.get("parameters", 0) - update.kinds.get("gradients", 0)
    predicted = update.peak_bytes - round(update.with_samples * (1 - half / update.samples)) + max(0, gradients)
    what = f"micro-batches of {half:,}, {-(-update.effective_batch // half):,} accumulated"
    return Saving(what=what, predicted_bytes=predicted, predicted_step_s=update.step_s), half


def checkpointed(update: Update, model: ModelFacts) -> Saving:
    """All blocks checkpointed; impossible where there are none."""
    if model.why_no_blocks is not None:
        return Saving(what="checkpointing", why_not=model.why_no_blocks)
    inside = [
        sum(size for layer, size in update.layers.items() if layer == block or layer.startswith(f"{block}."))
        for block in model.blocks
    ]
    kept = sum(update.outputs.get(block, 0) for block in model.blocks)
    saved = max(0, sum(inside) - kept - max(inside))
    share = sum(inside) / max(1, update.kinds.get("activations", 0))
    return Saving(
        what=f"all {len(model.blocks)} blocks checkpointed",
        predicted_bytes=update.peak_bytes - saved,
        predicted_step_s=update.step_s * (1 + min(1.0, share) / 3),
    )


def half_precision(update: Update, model: ModelFacts) -> Saving:
    """Autocast. Its speed depends on the hardware and the share of matrix products: only a try can tell."""
    if model.precision is None:
        return Saving(what="autocast", why_not=model.why_no_precision)
    saved = update.kinds.get("activations", 0) // 2 - update.kinds.get("parameters", 0) // 2
    return Saving(
        what=f"{model.precision} autocast",
        predicted_bytes=update.peak_bytes - max(0, saved),
        why_not=model.why_slow_precision,
    )


def smaller_samples(update: Update, model: ModelFacts) -> list[Saving]:
    """Shorter sequences or smaller pictures, which keep less; that is another training."""
    if model.kind is None:
        return [Saving(what="smaller samples", why_not="their size is unknown")]
    if model.kind == DENSE:
        return []
    # Half the tokens, or three quarters of a side: about half of the computation and memory.
    side = 0.5 if model.kind in (TEXT, RECURRENT) else 0.75
    part = side if model.kind in (TEXT, RECURRENT) else side**2
    return [
        Saving(
            what=f"{round(side * model.size):,} {UNITS[model.kind]} in place of {model.size:,}",
            predicted_bytes=update.peak_bytes - round((1 - part) * update.with_samples),
            predicted_step_s=part * update.step_s,
            changes=CHANGES,
            why_not=CHANGES,
        )
    ]
