"""What a run folder remembers of its training beside the checkpoints: what it began with, and how it ended.

A run that was killed before its first checkpoint begins again from it; one that has ended is not trained twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.errors import StoreError
from hotlap.core.units import MIB
from hotlap.engine.rig import Rig
from hotlap.fitting.best import trained_tensors
from hotlap.fitting.forged import counts, records
from hotlap.store.disk import read_small
from hotlap.store.encoding import from_json
from hotlap.store.files import write_text
from hotlap.store.run_folder import RunFolder, finite
from hotlap.store.tensors import why_not_stored
from hotlap.store.weights import load_weights, unwrapped

FILE = "record.json"
MODEL, LOSS = "model.safetensors", "loss.safetensors"
FORMAT = 1
MOST_BYTES = 16 * MIB
PIECE = 64 * MIB
"""So much of a tensor comes off a GPU at a time."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a training ended. Its weights are in `model.safetensors`, and a loss's own in `loss.safetensors`."""

    stopped: str
    asked: int
    """Windows that it was to train."""
    patience: int | None
    """Evaluations without a better one after which it stopped early; None where it did not."""
    steps: int
    updates: int
    samples: int
    train_s: float
    total_s: float
    best_step: int
    weights: dict[str, str | None]
    """What `weights_key` says of the weights in each file."""

    def is_all(self, asked: int, patience: int | None) -> bool:
        """Whether nothing is left of a training of so many windows and so much patience."""
        if self.patience is not None:
            return patience is not None and patience <= self.patience
        return asked <= self.asked


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a training began with, and how it ended."""

    facts: dict[str, Any]
    """As a checkpoint has them: identity, plan, versions."""
    first: str | None
    """What `first_key` said before the first step."""
    ended: Ended | None = None


def first_key(rig: Rig) -> str | None:
    """A hash of all that a training begins with: weights, buffers, and what an optimizer brings along."""
    return weights_key({**trained_tensors(rig), **_brought_along(rig.optimizer)})


def weights_key(tensors: Mapping[str, Tensor]) -> str | None:
    """A hash of name, dtype, shape and every byte of these tensors; None for some that no file can hold.

    The bytes by crc32: 25 ms for 25 million weights where sha256 takes 75. It tells honest trainings apart; who
    forges a record can forge a hash too.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if why_not_stored(tensor):
            return None
        flat = tensor.detach().reshape(-1)
        rows, crc = max(1, PIECE // flat.element_size()), 0
        for start in range(0, flat.numel(), rows):
            crc = zlib.crc32(flat[start : start + rows].cpu().view(torch.uint8).numpy().data, crc)
        digest.update(f"{name!r} {tensor.dtype} {tuple(tensor.shape)} {crc:08x}\n".encode())
    return digest.hexdigest()


def modules_of(rig: Rig) -> dict[str, nn.Module]:
    """The trained modules by the files that hold them at the end: the model, and a loss that has weights."""
    loss = rig.modules[-1]
    has_own = loss is not rig.model and any(True for _ in loss.parameters())
    return {MODEL: rig.model} | ({LOSS: loss} if has_own else {})


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What a file of a module's weights holds."""
    state: dict[str, Any] = unwrapped(module).state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def write_record(folder: RunFolder, record: Record) -> None:
    """Write `record.json`."""
    told = {"format": FORMAT, **dataclasses.asdict(record)}
    write_text(folder.path / FILE, json.dumps(finite(told)) + "\n")


def read_record(folder: RunFolder) -> Record:
    """What `write_record` wrote; it may be a stranger's, so all of it is looked at. Raises StoreError."""
    raw = from_json(read_small(folder.path / FILE, MOST_BYTES), FILE)
    try:
        if raw["format"] != FORMAT or not isinstance(raw["facts"], dict):
            raise ValueError
        ended = None if raw["ended"] is None else _checked(Ended(**raw["ended"]))
        return Record(facts=raw["facts"], first=raw["first"], ended=ended)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise StoreError(f"{FILE} is not a record of a training") from None


def read_end(folder: RunFolder, ended: Ended) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Any]]]:
    """The weights by file and the evaluations that an ended training left, if all are as they were written.

    Raises StoreError where they are not.
    """
    weights = {}
    for file, key in ended.weights.items():
        weights[file] = load_weights(folder.path / file)
        if weights_key(weights[file]) != key:
            raise StoreError(f"{file} differs from what was written")
    try:
        # JSON has no NaN: it stands there as null.
        lines = [{k: math.nan if v is None else v for k, v in record.items()} for record in folder.read_metrics()]
        history = records(*lines)
    except (ValueError, AttributeError) as error:
        raise StoreError(f"metrics.jsonl: {error}") from None
    if not any(record["step"] == ended.best_step for record in history):
        raise StoreError(f"metrics.jsonl has no line of step {ended.best_step}, the best")
    return weights, history


def _brought_along(optimizer: Optimizer) -> dict[str, Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {number: optimizer.state.get(parameter) for number, parameter in enumerate(parameters)}
    return {
        f"optimizer.{number}.{name}": value
        for number, state in states.items()
        if isinstance(state, dict)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _checked(ended: Ended) -> Ended:
    counts(ended.asked, ended.steps, ended.updates, ended.samples, ended.best_step)
    counts(0 if ended.patience is None else ended.patience)
    for seconds in (ended.train_s, ended.total_s):
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e12:
            raise ValueError(f"{seconds!r:.40} is no time")
    if not isinstance(ended.stopped, str) or not ended.stopped.isprintable():
        raise ValueError("the reason of the end is no plain text")
    # Only files that hotlap writes are read, wherever a stranger's record points.
    files = set(ended.weights) if isinstance(ended.weights, dict) else set()
    if not {MODEL} <= files <= {MODEL, LOSS}:
        raise ValueError("the weights have no files")
    return ended
