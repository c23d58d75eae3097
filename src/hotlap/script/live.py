"""How the training of a script stands while it runs: what its sampler writes down, where the user names a folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.fitting.live import MARKS, as_state, gpu_of, ledger_lines, sample_of
from hotlap.monitor.conditions import Conditions, Event, Stretch
from hotlap.monitor.hardware import HostReader
from hotlap.monitor.verdict import Seen, verdict
from hotlap.tuner.budget import Length


class Standing(NamedTuple):
    """How the training of a script stands."""

    updates: int
    length: Length
    plan: Plan
    ledger: Ledger
    is_tuning: bool


class LiveScript:
    """What a script's training lays out for others; the thread of a sampler calls `read` and `state`."""

    def __init__(self, name: str, folder: Path, device: torch.device, standing: Callable[[], Standing | None]) -> None:
        """`standing` only reads what the session has; None between two trainings."""
        self._name, self._device, self._standing = name, device, standing
        self._host, self._gpu = HostReader(folder), gpu_of(device)[0]
        self._began_s, self._last = time.perf_counter(), Standing(0, Length(0), Plan(), Ledger(), False)
        self._marks: deque[tuple[float, int]] = deque([(self._began_s, 0)], maxlen=MARKS)
        self._samples: deque[dict[str, Any]] = deque(maxlen=MARKS)
        self._conditions = Conditions()

    def read(self) -> dict[str, Any]:
        """The figures of a sample."""
        self._last = self._standing() or self._last
        return sample_of(self._host, self._gpu, self._device, self._last.updates)

    def state(self, sample: dict[str, Any]) -> dict[str, Any]:
        """How the training stands, as `live.json` has it."""
        now, standing = time.perf_counter(), self._last
        since_s, before = self._marks[0]
        last_s, last = self._marks[-1]
        self._marks.append((now, standing.updates))
        self._samples.append(sample)
        made, seconds = max(0, standing.updates - before), max(1e-9, now - since_s)
        rate = made / seconds
        # A guess that turned out too low is none.
        on_gpu, samples = self._device.type == "cuda", tuple(self._samples)
        stretch = Stretch(standing.plan, now - last_s, standing.updates - last)
        counts = stretch.steps > 0 and not standing.is_tuning
        seen = Seen(seconds=seconds, steps=made, on_gpu=on_gpu, samples=samples, plan=standing.plan)
        self._conditions.see(seen, stretch if counts else None)
        found = verdict(seen) if on_gpu else None
        is_known = standing.length.known and standing.length.updates >= standing.updates
        total = standing.length.updates if is_known else None
        return {
            "kind": "run",
            "unit": "updates",
            "name": self._name,
            "device": str(self._device),
            "doing": "training",
            "step": standing.updates,
            "steps": total,
            "steps_per_s": rate,
            "elapsed_s": now - self._began_s,
            "left_s": max(0, total - standing.updates) / rate if total is not None and rate > 0 else None,
            "plan": str(standing.plan),
            "is_tuning": standing.is_tuning,
            "ledger": ledger_lines(standing.ledger),
            # hotlap times nothing in a script that it leaves alone, so only a GPU shows what bounds it.
            **({"bound": as_state(found)} if found is not None and found.bound != "computing" else {}),
        }

    def conditions(self) -> list[Event]:
        """The conditions of the host while it trained, once the sampler has ended."""
        return list(self._conditions.close())
