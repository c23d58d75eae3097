"""Plans that were found before, by machine, versions, model and data: looked up instead of searched for again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hotlap import __version__
from hotlap.core.errors import HotlapError
from hotlap.core.plan import Plan
from hotlap.core.terminal import logger
from hotlap.data.pure.proof import why_not_pure
from hotlap.data.resident import outline
from hotlap.engine.protocol import TunableTraining
from hotlap.store.cache import Cache
from hotlap.store.keys import key_of

log = logger(__name__)

KIND = "plan"
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an earlier run of the same training came to."""

    plan: Plan
    moves: tuple[str, ...]
    """Names of the moves that have made the plan."""
    gain: float
    """How many times faster than the user's own it was."""
    gate_s: float
    """What the dearest gate took."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Moves that were tried and gave nothing, or were held back, by name with the reason."""


class KnownPlans:
    """What the cache knows of this training on this machine. A cache that cannot be used stops nothing."""

    def __init__(self, rig: TunableTraining, *, batch_size: int) -> None:
        self._rig, self._batch_size, self._plan = rig, batch_size, rig.plan

    @cached_property
    def _key(self) -> str:
        """Computed when first asked for: to follow a dataset's code takes time, and short runs never ask."""
        return key_of(_facts(self._rig, self._batch_size, self._plan))

    def found(self) -> Found | None:
        """What an earlier run found; None where there was none."""
        try:
            entry = Cache().get(KIND, self._key)
            if entry is None:
                return None
            values = entry.values
            return Found(
                plan=Plan.from_dict(values["plan"]),
                moves=tuple(str(name) for name in values["moves"]),
                gain=float(values["gain"]),
                gate_s=float(values["gate_s"]),
                rejected={str(name): str(why) for name, why in dict(values["rejected"]).items()},
            )
        except (HotlapError, OSError, LookupError, TypeError, ValueError) as error:
            log.warning("the plan found before cannot be read: %s", error)
            return None

    def remember(self, found: Found) -> None:
        """Keep for later runs what was found."""
        values = {
            "plan": found.plan.to_dict(),
            "moves": list(found.moves),
            "gain": found.gain,
            "gate_s": found.gate_s,
            "rejected": dict(found.rejected),
        }
        try:
            Cache().replace(KIND, self._key, values=values, facts={"plan": str(found.plan)})
        except (HotlapError, OSError) as error:
            log.warning("the plan that was found cannot be kept: %s", error)

    def forget(self) -> None:
        """What was found before does not hold any more."""
        try:
            Cache().drop(KIND, self._key)
        except (HotlapError, OSError) as error:
            log.warning("the plan found before cannot be let go of: %s", error)


def _facts(rig: TunableTraining, batch_size: int, plan: Plan) -> dict[str, Any]:
    """All that may make another plan the best one."""
    source = rig.source
    on_gpu = rig.device.type == "cuda"
    # It is only asked where that leaves no trace.
    is_pure = why_not_pure(source) is None
    first = source.for_probing().read_good([0])[0] if is_pure else []
    sample = outline(first[0]) if first else ()
    return {
        "format": FORMAT,
        "hotlap": __version__,
        "torch": torch.__version__,
        "pretended": os.environ.get("HOTLAP_PRETEND"),
        "device": torch.cuda.get_device_name(rig.device) if on_gpu else f"cpu with {torch.get_num_threads()} threads",
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()) if on_gpu else None,  # type: ignore[no-untyped-call]
        "layers": [f"{name} {type(layer).__qualname__}" for m in rig.modules for name, layer in m.named_modules()],
        "weights": [f"{name} {tuple(p.shape)} {p.dtype}" for m in rig.modules for name, p in m.named_parameters()],
        "optimizer": type(rig.optimizer).__qualname__,
        "sample": list(sample),
        "samples": len(source) if is_pure else None,
        "batch": batch_size,
        "plan": plan.to_dict(),
    }
