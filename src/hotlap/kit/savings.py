"""What would bring the memory of a training down: predicted from one update, and tried where it can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hotlap import machine
from hotlap.core.units import show_bytes, show_seconds
from hotlap.data.batches import Batch
from hotlap.engine.blocks import checkpointed_blocks, why_not_checkpointed
from hotlap.engine.precision import why_not_precision
from hotlap.kit.start_size import DENSE, RECURRENT, TEXT, UNITS, kind_of_model

CHANGES = "it changes what is learnt"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Something that would bring the peak down."""

    what: str
    predicted_bytes: int | None = None
    """None where it cannot be had at all."""
    predicted_step_s: float | None = None
    """None where it cannot be told without trying."""
    peak_bytes: int | None = None
    """As it was measured; None where it was not tried."""
    step_s: float | None = None
    changes: str = ""
    """What it changes in the training beyond rounding, if anything."""
    why_not: str | None = None
    """Why it was not tried, or cannot be had."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What something was seen to bring, by real updates; or why it was not tried."""

    peak_bytes: int | None = None
    step_s: float | None = None
    """Seconds for as many samples as an update has."""
    why_not: str | None = None
    changes: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is to be known of a model, in plain values that can be written to a file."""

    name: str
    blocks: Sequence[str]
    """The names of the blocks that it repeats."""
    why_no_blocks: str | None
    """Why these cannot be checkpointed."""
    precision: str | None
    """The half precision of its device, be it emulated."""
    why_no_precision: str | None
    why_slow_precision: str | None
    """Why it is too slow there to be tried."""
    least: int
    """The smallest batch that may train: a batch norm has nothing to compute from one sample."""
    kind: str | None
    """What kind of model it is, as the catalogue has it; None where no batch was seen."""
    size: int = 0
    """Of its samples, in the units of that kind."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """An update as it was watched."""

    samples: int
    """That go through the model at once."""
    effective_batch: int
    peak_bytes: int
    step_s: float
    kinds: Mapping[str, int]
    layers: Mapping[str, int]
    outputs: Mapping[str, int]
    """Bytes that each module gave."""
    why_whole: str | None = None
    """Why its batch goes through in no other pieces."""

    @property
    def with_samples(self) -> int:
        """What grows with the samples that go through at once."""
        return sum(self.kinds.get(kind, 0) for kind in ("activations", "backward", "batch"))


class Trials(Protocol):
    """A training in which things can be tried."""

    def in_pieces(self, size: int) -> Tried:
        """Updates of the same samples, of which so many go through the model at once."""

    def checkpointed(self, blocks: int) -> Tried:
        """Updates with all blocks checkpointed."""

    def in_precision(self, precision: str) -> Tried:
        """Updates under autocast."""


def model_facts(model: nn.Module, sample: Batch | None, device: torch.device) -> ModelFacts:
    """What is to be known of a model on this device; `sample` is a batch that it gets."""
    names = {id(part): name for name, part in model.named_modules()}
    blocks = [names[id(block)] for block in checkpointed_blocks(model)]
    reasons = {one: why_not_precision(one, device) for one in ("bf16", "fp16")}
    precision = next((one for one, reason in reasons.items() if reason is None), None)
    fact = None if precision is None else machine.dtype_fact(device, precision)
    is_emulated = fact is not None and fact.support is machine.Support.EMULATED
    kind = None if sample is None else kind_of_model(model, sample)
    none = f"{type(model).__name__} has no blocks that it repeats"
    return ModelFacts(
        name=type(model).__name__,
        blocks=blocks,
        why_no_blocks=why_not_checkpointed(model, len(blocks), device) if blocks else none,
        precision=precision,
        why_no_precision=None if precision is not None else reasons["bf16"],
        why_slow_precision=fact.reason if fact is not None and is_emulated else None,
        least=1 + any(isinstance(layer, _BatchNorm) and layer.training for layer in model.modules()),
        kind=None if kind is None else kind.name,
        size=0 if kind is None else kind.size,
    )


def savings(update: Update, model: ModelFacts, trials: Trials) -> list[Saving]:
    """What would bring the peak of this update down, and what of it cannot be had."""
    return [
        _smaller_pieces(update, model, trials),
        _checkpointed(update, model, trials),
        _in_half_precision(update, model, trials),
        *_smaller_samples(update, model),
    ]


def _smaller_pieces(update: Update, model: ModelFacts, trials: Trials) -> Saving:
    least = f"{update.samples:,} at once is the least that trains" if update.samples <= model.least else None
    why_not = update.why_whole or least
    if why_not is not None:
        return Saving(what="micro-batches", why_not=why_not)
    half = max(model.least, -(-update.samples // 2))
    # All pieces but the first have the gradients of those before them beside their activations.
    gradients = update.kinds.get("parameters", 0) - update.kinds.get("gradients", 0)
    return _with(
        trials.in_pieces(half),
        what=f"micro-batches of {half:,}, {-(-update.effective_batch // half):,} accumulated",
        predicted_bytes=update.peak_bytes
        - round(update.with_samples * (1 - half / update.samples))
        + max(0, gradients),
        predicted_step_s=update.step_s,
    )


def _checkpointed(update: Update, model: ModelFacts, trials: Trials) -> Saving:
    if model.why_no_blocks is not None:
        return Saving(what="checkpointing", why_not=model.why_no_blocks)
    inside = [
        sum(size for layer, size in update.layers.items() if layer == block or layer.startswith(f"{block}."))
        for block in model.blocks
    ]
    kept = sum(update.outputs.get(block, 0) for block in model.blocks)
    saved = max(0, sum(inside) - kept - max(inside))
    share = sum(inside) / max(1, update.kinds.get("activations", 0))
    return _with(
        trials.checkpointed(len(model.blocks)),
        what=f"all {len(model.blocks)} blocks checkpointed",
        predicted_bytes=update.peak_bytes - saved,
        predicted_step_s=update.step_s * (1 + min(1.0, share) / 3),
    )


def _in_half_precision(update: Update, model: ModelFacts, trials: Trials) -> Saving:
    if model.precision is None:
        return Saving(what="autocast", why_not=model.why_no_precision)
    saved = update.kinds.get("activations", 0) // 2 - update.kinds.get("parameters", 0) // 2
    # How fast it is depends on the hardware and on what of a step is products: it is timed, not predicted.
    slow = None if model.why_slow_precision is None else Tried(why_not=model.why_slow_precision)
    return _with(
        slow or trials.in_precision(model.precision),
        what=f"{model.precision} autocast",
        predicted_bytes=update.peak_bytes - max(0, saved),
    )


def _smaller_samples(update: Update, model: ModelFacts) -> list[Saving]:
    """Shorter sequences or smaller pictures, of which less is kept; that is another training."""
    if model.kind is None:
        return [Saving(what="smaller samples", why_not="how large they are was not seen")]
    if model.kind == DENSE:
        return []
    # Half as many tokens, or three quarters of a side: about half of what is computed and kept.
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


def _with(tried: Tried, *, what: str, predicted_bytes: int, predicted_step_s: float | None = None) -> Saving:
    return Saving(
        what=what,
        predicted_bytes=predicted_bytes,
        predicted_step_s=predicted_step_s,
        peak_bytes=tried.peak_bytes,
        step_s=tried.step_s,
        changes=tried.changes,
        why_not=tried.why_not,
    )


def table(found: Sequence[Saving], peak_bytes: int, step_s: float | None) -> list[str]:
    """All of them in lines for people, beside the training as it is."""
    width = max(len("what would bring it down"), *(2 + len(one.what) for one in found))
    lines = [
        f"{'what would bring it down':<{width}}  {'predicted':>21}  {'measured':>21}",
        f"{'  as it is':<{width}}  {'':>21}  {_figures(peak_bytes, step_s)}",
    ]
    for one in found:
        guess = _figures(one.predicted_bytes, one.predicted_step_s)
        seen = _figures(one.peak_bytes, one.step_s)
        if one.peak_bytes is None:
            seen = f"{'not tried' if one.predicted_bytes is not None else 'not to be had'}: {one.why_not}"
        told = one.changes if one.peak_bytes is not None else ""
        lines.append(f"  {one.what:<{width - 2}}  {guess}  {seen}  {told}".rstrip())
    return lines


def _figures(count: int | None, seconds: float | None) -> str:
    shown = "" if count is None else show_bytes(count)
    pace = "" if seconds is None else show_seconds(seconds)
    return f"{shown:>10} {pace:>10}"
