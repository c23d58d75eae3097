"""How a training of trees stands while it runs: what its sampler writes down."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hotlap.core.ledger import Ledger
from hotlap.fitting.live import MARKS, gpu_of, ledger_lines, sample_of
from hotlap.monitor.hardware import HostReader
from hotlap.trees.growing import Watch
from hotlap.trees.job import TreeJob, TreePlan


class LiveTrees:
    """What a training of trees lays out for others; the thread of a sampler calls `read` and `state`."""

    def __init__(self, job: TreeJob, folder: Path, watch: Watch, plan: Callable[[], TreePlan], ledger: Ledger) -> None:
        self._job, self._watch, self._plan, self._ledger = job, watch, plan, ledger
        self.stopped = ""
        """Why it ended; empty while it runs."""
        device = plan().device
        self._device = torch.device(device if device.startswith("cuda") else "cpu")
        self._host, self._gpu = HostReader(folder), gpu_of(self._device)[0]
        self._began_s = time.perf_counter()
        self._marks: deque[tuple[float, int]] = deque([(self._began_s, watch.rounds)], maxlen=MARKS)

    def read(self) -> dict[str, Any]:
        """The figures of a sample."""
        return sample_of(self._host, self._gpu, self._device, self._watch.rounds)

    def state(self, sample: dict[str, Any]) -> dict[str, Any]:
        """How the training stands, as `live.json` has it."""
        now, rounds, total = time.perf_counter(), self._watch.rounds, self._job.rounds * self._job.targets
        since_s, before = self._marks[0]
        self._marks.append((now, rounds))
        rate = (rounds - before) / max(1e-9, now - since_s)
        return {
            "kind": "trees",
            "unit": "rounds",
            "name": self._job.library,
            "device": self._plan().device,
            "doing": "training",
            "stopped": self.stopped,
            "step": min(rounds, total),
            "steps": total,
            "steps_per_s": rate,
            "elapsed_s": now - self._began_s,
            "left_s": max(0, total - rounds) / rate if rate > 0 else None,
            "plan": str(self._plan()),
            "ledger": ledger_lines(self._ledger),
        }
