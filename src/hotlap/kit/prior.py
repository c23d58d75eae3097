"""Where a search for a batch begins: by what an earlier search has measured here, else by the catalogue."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hotlap.core.errors import HotlapError
from hotlap.core.terminal import logger
from hotlap.core.units import show_bytes
from hotlap.data.batches import Batch
from hotlap.kit.catalogue import Kind, example_of, kind_of_model
from hotlap.kit.search import Line
from hotlap.store.cache import Cache
from hotlap.store.keys import key_of

log = logger(__name__)

KIND = "batch"
WEIGHT_COPIES = 4
"""The weights, their gradients, and two values for each that an optimizer like Adam keeps."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """A size to begin with, and why."""

    size: int
    why: str


def prior(model: nn.Module, sample: Batch, room_bytes: float, where: str) -> Prior:
    """The size to begin with on a GPU that has so much room: the largest power of two that should fit.

    It is a guess. What was measured here for this kind of model and samples is believed before the catalogue.
    """
    kind = kind_of_model(model, sample)
    known = recalled(kind, where)
    if known is not None:
        size = _power(known.size_at(room_bytes))
        told = f"{show_bytes(known.bytes_a_sample)} a sample were measured on {where} before, for {_words(kind)}"
        return Prior(size=size, why=told)
    example = example_of(kind)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    line = Line(bytes_a_sample=example.bytes_at(kind.size), rest_bytes=WEIGHT_COPIES * weights)
    told = f"a guess for {where} from {example.name}, {show_bytes(line.bytes_a_sample)} a sample of {kind.sample}"
    return Prior(size=_power(line.size_at(room_bytes)), why=told)


def _power(size: int) -> int:
    return 1 << max(0, size.bit_length() - 1)


def _words(kind: Kind) -> str:
    return f"{kind.name} and {kind.sample}"


# --- what was measured here ------------------------------------------------------------------------------


def recalled(kind: Kind, where: str) -> Line | None:
    """What an earlier search has measured of such a model with such samples on this GPU."""
    try:
        entry = Cache().get(KIND, _key(kind, where))
        return None if entry is None else Line(**entry.values)
    except (HotlapError, OSError, TypeError, ValueError) as error:
        log.warning("what a sample took before cannot be read: %s", error)
        return None


def remember(kind: Kind, where: str, line: Line) -> None:
    """Keep what was measured for the next search. A cache that cannot be used stops nothing."""
    facts = {"kind": kind.name, "sample": kind.sample, "parameters": kind.parameters, "gpu": where}
    try:
        cache, key = Cache(), _key(kind, where)
        cache.drop(KIND, key)
        cache.put(KIND, key, values=asdict(line), facts={**facts, **asdict(line)})
    except (HotlapError, OSError) as error:
        log.warning("what a sample takes cannot be kept: %s", error)


def _key(kind: Kind, where: str) -> str:
    # Two digits: a head of other classes does not make another model.
    facts: dict[str, Any] = {"kind": kind.name, "size": kind.size, "parameters": f"{kind.parameters:.1e}"}
    return key_of({**facts, "gpu": where, "torch": str(torch.__version__)})
