"""What a session says at its end, and what it leaves in run folders."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

from hotlap import machine
from hotlap.core.errors import HotlapError
from hotlap.core.ledger import Ledger
from hotlap.core.table import as_json, table
from hotlap.core.terminal import say
from hotlap.core.units import show_seconds
from hotlap.machine.kernels import first_line
from hotlap.script.resting import Trained
from hotlap.store.run_folder import RunFolder

MOST_TOLD = 3
"""Trainings of one script that are told of in full."""


class Teller:
    """Collects what there is to tell of a script. All of it goes to stderr, at the end."""

    def __init__(self, *, name: str, out: Path | None, as_json: bool) -> None:
        self._name, self._out, self._as_json = name, out, as_json
        self._home = Path().absolute()  # which the script may change
        self._trainings: list[tuple[Ledger, list[str]]] = []
        self._figures: list[dict[str, Any]] = []
        self._folders: dict[int, RunFolder] = {}
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

    def trained(self, training: Trained, advice: list[str]) -> None:
        """A training has ended, or one that ended before has gone on; `advice` is what hotlap cannot do by itself."""
        updates, step_s = training.updates, training.seconds / max(1, training.steps)
        took = f"all but the first {training.before} in {show_seconds(training.seconds)}"
        lines = [f"{updates:,} updates, {took}, {show_seconds(step_s)} each"]
        lines += [*training.notes, *advice]
        figures = {"updates": updates, "step_s": step_s, "notes": [*training.notes, *advice]}
        known = [ledger for ledger, _ in self._trainings]
        number = next((n for n, ledger in enumerate(known) if ledger is training.ledger), len(known))
        self._trainings[number:] = [(training.ledger, lines), *self._trainings[number + 1 :]]
        self._figures[number:] = [figures, *self._figures[number + 1 :]]
        try:
            folder = self._written(training, number)
            lines.append(f"run folder {self._shown(folder)}")
            figures["run_folder"] = str(folder)
        except (HotlapError, OSError) as error:
            self.fault(error)

    def _shown(self, folder: Path) -> Path:
        """As it is found from where the user has started the script."""
        return folder.relative_to(self._home) if folder.is_relative_to(self._home) else folder

    def _written(self, training: Trained, number: int) -> Path:
        """Write what a training leaves: the first one into the run folder of the script, others into folders in it."""
        folder = self._folders.get(number)
        if folder is None:
            first = self._folders.get(0)
            out = first.path / f"training-{number + 1}" if first is not None else self._out
            folder = self._folders[number] = RunFolder.create(out, name=self._name, home=self._home)
            folder.write_environment(machine.environment())
            folder.write_started({"command": "run", "script": self._name})
        folder.write_ledger(training.ledger)
        folder.write_plan(training.plan)
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
            pairs = zip(self._trainings, self._figures, strict=True)
            trainings = [as_json(ledger) | figures for (ledger, _), figures in pairs]
            told = {"trainings": trainings, "faults": self._faults, "refusals": self._refusals}
            lines = [json.dumps(told)]
        else:
            lines = [f"hotlap  {line}" if line else "" for line in self.lines()]
        if error is not None and "CUDA error" in str(error):
            lines.append("hotlap  whether this comes without hotlap too: hotlap run --off …")
        say(*lines)
