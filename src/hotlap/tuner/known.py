"""Plans that were found before, by machine, versions, model and data: looked up instead of searched for again."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from hotlap import __version__
from hotlap.core.errors import HotlapError
from hotlap.core.plan import Plan
from hotlap.data.holding import outline
from hotlap.data.purity import randomness_watched
from hotlap.engine.driven import Driven
from hotlap.store.cache import Cache
from hotlap.store.keys import key_of

log = logging.getLogger(__name__)

KIND = "plan"


class KnownPlans:
    """What the cache knows of this training on this machine. A cache that cannot be used stops nothing."""

    def __init__(self, rig: Driven, *, batch_size: int) -> None:
        self._key = key_of(_facts(rig, batch_size))

    def found(self) -> tuple[Plan, list[str]] | None:
        """The plan that an earlier run found, and the names of its moves."""
        try:
            entry = Cache().get(KIND, self._key)
            if entry is None:
                return None
            return Plan.from_dict(entry.values["plan"]), [str(name) for name in entry.values["moves"]]
        except (HotlapError, OSError, LookupError, TypeError, ValueError) as error:
            log.warning("the plan found before cannot be read: %s", error)
            return None

    def remember(self, plan: Plan, moves: Sequence[str]) -> None:
        """Keep a plan for later runs, and the names of the moves that have made it."""
        try:
            cache = Cache()
            cache.drop(KIND, self._key)
            cache.put(KIND, self._key, values={"plan": plan.to_dict(), "moves": list(moves)}, facts={"plan": str(plan)})
        except (HotlapError, OSError) as error:
            log.warning("the plan that was found cannot be kept: %s", error)


def _facts(rig: Driven, batch_size: int) -> dict[str, Any]:
    """All that may make another plan the best one."""
    source = rig.source
    on_gpu = rig.device.type == "cuda"
    with randomness_watched(source.samples):
        sample = outline(source.aside().read([0])[0])
    return {
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
        "samples": len(source),
        "batch": batch_size,
        "plan": rig.plan.to_dict(),
    }
