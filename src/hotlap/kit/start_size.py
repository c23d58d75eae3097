"""The batch size that a search begins with: measured here before, or estimated from a similar model.

Each row of `EXAMPLES` is a model in fp32 with the bytes of tensors that one more sample adds to an update, counted on
the CPU (`python -m benchmarks.kit --only catalogue` counts them again). For another model this is an estimate: the
first measured update corrects it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import nn

from hotlap.core.errors import HotlapError
from hotlap.core.terminal import logger
from hotlap.core.units import MIB, show_bytes
from hotlap.data.batches import Batch
from hotlap.kit.search import MemoryLine
from hotlap.monitor.model_kind import CONVOLUTIONS, DENSE, RECURRENT, TEXT, UNITS, VISION, Kind, kind_of_model
from hotlap.store.cache import Cache
from hotlap.store.keys import key_of


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model of a kind, and the bytes of a sample in it."""

    kind: str
    name: str
    parameters: int
    size: int
    """Of its samples."""
    bytes_a_sample: int

    def bytes_at(self, size: int) -> int:
        """The bytes of a sample of another size: pictures by area, sequences by length."""
        power = {"pixels": 2, "tokens": 1, "steps": 1, "numbers": 0}[UNITS[self.kind]]
        return max(1, round(self.bytes_a_sample * (size / self.size) ** power))


def _example(kind: str, name: str, *, millions: float, size: int, mib: float) -> Example:
    return Example(kind=kind, name=name, parameters=round(millions * 1e6), size=size, bytes_a_sample=round(mib * MIB))


# fmt: off
EXAMPLES: Final = (
    _example(CONVOLUTIONS, "ResNet-18 of a quarter's width", millions=0.703, size=224, mib=5.65),
    _example(CONVOLUTIONS, "ResNet-18", millions=11.2, size=224, mib=20.0),
    _example(CONVOLUTIONS, "ResNet-50", millions=23.5, size=224, mib=79.8),
    _example(CONVOLUTIONS, "ResNet-152", millions=58.2, size=224, mib=167),
    _example(VISION, "the image recipe's ViT", millions=2.86, size=224, mib=15.1),
    _example(VISION, "ViT-S/16", millions=21.7, size=224, mib=57.5),
    _example(VISION, "ViT-B/16", millions=85.8, size=224, mib=114),
    _example(VISION, "ViT-L/16", millions=303, size=224, mib=300),
    _example(TEXT, "BERT-mini", millions=11.2, size=128, mib=9.77),
    _example(TEXT, "BERT-base", millions=109, size=256, mib=167),
    _example(RECURRENT, "LSTM 2×128, both ways", millions=0.559, size=20, mib=0.86),
    _example(RECURRENT, "LSTM 2×512, both ways", millions=8.53, size=20, mib=3.38),
    _example(DENSE, "MLP 100-256-128-64-3", millions=0.0681, size=100, mib=0.0043),
    _example(DENSE, "MLP 560-1024-1024-1024-424", millions=3.11, size=560, mib=0.0334),
)
# fmt: on


def example_of(kind: Kind) -> Example:
    """The example of this kind whose number of parameters is nearest, as a factor."""
    same = [one for one in EXAMPLES if one.kind == kind.name]
    return min(same, key=lambda one: abs(math.log(one.parameters / max(1, kind.parameters))))


# --- the size that a search for a batch begins with ----------------------------------------------------------


log = logger(__name__)

KIND = "batch"
WEIGHT_COPIES = 4
"""Weights, gradients, and two values for each, as Adam keeps."""


@dataclass(frozen=True, kw_only=True)
class StartSize:
    """A first size, and the reason for it."""

    size: int
    why: str


def start_size(model: nn.Module, sample: Batch, room_bytes: float, where: str) -> StartSize:
    """The first size on a GPU with so much room: the largest power of two that should fit.

    An earlier measurement on this GPU, of such a model and samples, counts before the catalogue.
    """
    kind = kind_of_model(model, sample)
    known = measured_before(kind, where)
    if known is not None:
        size = _power(known.size_at(room_bytes))
        why = f"{show_bytes(known.bytes_a_sample)} a sample were measured on {where} before, for {_words(kind)}"
        return StartSize(size=size, why=why)
    example = example_of(kind)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    line = MemoryLine(bytes_a_sample=example.bytes_at(kind.size), rest_bytes=WEIGHT_COPIES * weights)
    why = f"a guess for {where} from {example.name}, {show_bytes(line.bytes_a_sample)} a sample of {kind.sample}"
    return StartSize(size=_power(line.size_at(room_bytes)), why=why)


def _power(size: int) -> int:
    return 1 << max(0, size.bit_length() - 1)


def _words(kind: Kind) -> str:
    return f"{kind.name} and {kind.sample}"


# --- what was measured here ------------------------------------------------------------------------------


def measured_before(kind: Kind, where: str) -> MemoryLine | None:
    """The measurement of an earlier search for such a model and samples on this GPU."""
    try:
        entry = Cache().get(KIND, _key(kind, where))
        return None if entry is None else MemoryLine(**entry.values)
    except (HotlapError, OSError, TypeError, ValueError) as error:
        log.warning("cannot read the earlier measurement of a sample: %s", error)
        return None


def keep_measured(kind: Kind, where: str, line: MemoryLine) -> None:
    """Keep the measurement for the next search. A cache that fails stops nothing."""
    facts = {"kind": kind.name, "sample": kind.sample, "parameters": kind.parameters, "gpu": where}
    try:
        Cache().replace(KIND, _key(kind, where), values=asdict(line), facts={**facts, **asdict(line)})
    except (HotlapError, OSError) as error:
        log.warning("cannot keep the measurement of a sample: %s", error)


def _key(kind: Kind, where: str) -> str:
    # Two digits: another number of classes does not make another model.
    facts: dict[str, Any] = {"kind": kind.name, "size": kind.size, "parameters": f"{kind.parameters:.1e}"}
    return key_of({**facts, "gpu": where, "torch": str(torch.__version__)})
