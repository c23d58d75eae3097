"""What a session says at its end, and what it leaves in run folders."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from hotlap import machine
from hotlap.core.errors import HotlapError
from hotlap.core.ledger import Ledger
from hotlap.core.table import as_json, table
from hotlap.core.units import show_seconds
from hotlap.machine.kernels import first_line
from hotlap.script.steering import Steering
from hotlap.store.run_folder import RunFolder

MOST_TOLD = 3
"""Trainings of one script that are told of in full."""


class Teller:
    """Collects what there is to tell of a script. All of it goes to stderr, at the end."""

    def __init__(self, *, name: str, out: Path | None, as_json: bool) -> None:
        self._name, self._out, self._as_json = name, out, as_json
        self._trainings: list[tuple[Ledger, list[str]]] = []
        self._faults: list[str] = []
        self._refusals: list[str] = []

    def fault(self, error: Exception) -> None:
        """Something in hotlap went wrong."""
        if isinstance(error, HotlapError):
            told, words = self._refusals, str(error)
        else:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            where = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
            told, words = self._faults, f"{type(error).__name__}: {first_line(error)}{where}"
        if words not in told:
            told.append(words)

    def trained(self, steering: Steering, advice: list[str]) -> None:
        """A training has ended; `advice` is what hotlap cannot do by itself."""
        training = steering.training
        step_s = steering.seconds / max(1, training.steps - 1)
        lines = [f"{training.steps:,} updates in {show_seconds(steering.seconds)}, {show_seconds(step_s)} each"]
        lines += [*steering.evaluating.lines, *advice]
        self._trainings.append((training.ledger, lines))
        try:
            lines.append(f"run folder {self._written(steering)}")
        except (HotlapError, OSError) as error:
            self.fault(error)

    def _written(self, steering: Steering) -> Path:
        number = len(self._trainings)
        out = self._out if number == 1 or self._out is None else self._out.with_name(f"{self._out.name}-{number}")
        folder = RunFolder.create(out, name=self._name)
        folder.write_environment(machine.environment())
        folder.write_started({"command": "run", "script": self._name})
        folder.write_ledger(steering.training.ledger)
        folder.write_plan(steering.plan)
        folder.write_artefacts()
        return folder.path

    def lines(self, ledger: Ledger | None = None) -> list[str]:
        """All of it for people; `ledger` is of a training that still goes on."""
        told = [*self._trainings, *([(ledger, ["still training"])] if ledger is not None else [])]
        found: list[str] = []
        for one, lines in told[:MOST_TOLD]:
            found += ["", *table(one), *lines]
        if len(told) > MOST_TOLD:
            found.append(f"and {len(told) - MOST_TOLD} more trainings")
        if not told and not self._faults and not self._refusals:
            found.append("no training was seen: no optimizer made a few steps")
        found += [f"the script runs as it is: {reason}" for reason in self._refusals]
        found += [f"hotlap had to stop: {fault}; the script went on without it" for fault in self._faults]
        return found

    def tell(self, error: BaseException | None = None) -> None:
        """Say all of it."""
        if self._as_json:
            told = {"trainings": [as_json(ledger) for ledger, _ in self._trainings], "faults": self._faults}
            lines = [json.dumps(told)]
        else:
            lines = [f"hotlap  {line}" if line else "" for line in self.lines()]
        if error is not None and "CUDA error" in str(error):
            lines.append("hotlap  whether this comes without hotlap too: hotlap run --off …")
        sys.stderr.write("\n".join([*lines, ""]))
        sys.stderr.flush()
