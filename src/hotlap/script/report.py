"""The report of a session: the lines it prints at the end, and the files in run folders."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotlap import machine
from hotlap.core.errors import HotlapError, first_line
from hotlap.core.ledger import Ledger
from hotlap.core.table import Row, as_json, rows, table
from hotlap.core.terminal import columns, say
from hotlap.core.units import show_seconds
from hotlap.fitting.record import without_secrets
from hotlap.machine.host import process_age_s
from hotlap.report import write_report
from hotlap.script.idle import TrainingSummary
from hotlap.store.run_folder import RunFolder

if TYPE_CHECKING:
    from hotlap.script.session import Settings

MOST_LISTED = 3
"""Trainings of one script that the report shows in full."""
WORTH_TUNING_S = 20.0
"""Seconds; for shorter scripts the report does not suggest more tuning."""
MARGIN = "hotlap  "
"""Before each line of hotlap's but the first: the script writes to the same terminal."""
FASTER = 1.005
"""The least ratio that counts as faster: it shows as 1.01x or more."""


class Report:
    """Collects results of one script, and prints them on stderr at the end."""

    def __init__(self, settings: Settings) -> None:
        """With `torch_s` in the settings, the process only runs the script: the script's time is that of the process.

        Its start so far is hotlap's, but for these seconds, in which it imported torch as it would without hotlap.
        """
        self._settings, words = settings, settings.words
        # At once: the user may edit a script while it runs. What a module is, shows once it runs.
        self._script = _named(words[0]) if words and words[0] != "-m" else {}
        self._home = Path().absolute()  # the script may change the working directory
        self._trainings: list[tuple[Ledger, list[str]]] = []
        self._figures: list[dict[str, Any]] = []
        self._folders: dict[int, RunFolder] = {}
        self.notes: list[str] = []
        """Lines beside those of the trainings."""
        self._faults: list[str] = []
        self._refusals: list[str] = []
        self.conditions: list[str] = []
        """What held the host up meanwhile, a line each."""
        torch_s = settings.torch_s
        age_s = process_age_s() if torch_s is not None else 0.0
        self._began, self._start_s = time.perf_counter() - age_s, max(0.0, age_s - (torch_s or 0.0))

    def fault(self, error: Exception) -> None:
        """Add a failure of hotlap, or (a HotlapError) a reason why hotlap leaves the script alone."""
        if isinstance(error, HotlapError):
            lines, words = self._refusals, str(error)
        else:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            where = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
            lines, words = self._faults, f"{type(error).__name__}: {first_line(error)}{where}"
        if words not in lines:
            lines.append(words)

    def add_training(self, training: TrainingSummary, advice: list[str]) -> None:
        """A training has ended, or ended again after it continued; `advice` holds lines for the script's author."""
        updates, step_s = training.updates, training.seconds / max(1, training.steps)
        took = f"all but the first {training.before} in {show_seconds(training.seconds)}"
        lines = [f"{updates:,} updates, {took}, {show_seconds(step_s)} each"]
        lines += [*training.notes, *advice]
        figures = {
            "updates": updates,
            "step_s": step_s,
            "training_s": training.seconds,
            "device": training.device,
            "notes": [*training.notes, *advice],
        }
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
        """A path relative to where the user started the script."""
        return folder.relative_to(self._home) if folder.is_relative_to(self._home) else folder

    def folder(self, number: int = 0) -> RunFolder:
        """The run folder of a training, made where it is not there; later ones are inside that of the first."""
        folder = self._folders.get(number)
        if folder is None:
            first = self._folders.get(0)
            settings = self._settings
            out = first.path / f"training-{number + 1}" if first is not None else settings.out
            folder = self._folders[number] = RunFolder.create(out, name=settings.name, home=self._home)
            folder.write_environment(machine.environment())
            run = ("hotlap", "run", *settings.words)
            words = {"words": without_secrets(run, os.environ)} if settings.words else {}
            script = self._script or (_named(getattr(sys.modules["__main__"], "__file__", None)) if words else {})
            folder.write_started({"command": "run", "script": settings.name, **words, **script})
        return folder

    def _written(self, training: TrainingSummary, number: int) -> Path:
        folder = self.folder(number)
        folder.write_ledger(training.ledger)
        folder.write_plan(training.plan)
        folder.write_artefacts()
        return folder.path

    def lines(self, ledger: Ledger | None = None) -> list[str]:
        """All lines to print; `ledger` belongs to a training that still runs."""
        trainings = [*self._trainings, *([(ledger, ["still training"])] if ledger is not None else [])]
        width = columns(sys.stderr)
        width = None if width is None else width - len(MARGIN)
        found: list[str] = []
        for one, lines in trainings[:MOST_LISTED]:
            found += ["", *table(one, width), *lines]
        if len(trainings) > MOST_LISTED:
            found.append(f"and {len(trainings) - MOST_LISTED} more trainings")
        if not trainings and not self._faults and not self._refusals:
            found.append("no training found: the script's main process made too few weight updates")
        found += [f"host: {line}" for line in self.conditions]
        found += [f"hotlap leaves the script alone: {reason}" for reason in self._refusals]
        found += [f"hotlap failed: {fault}; the script continued without it" for fault in self._faults]
        return found

    def headline(self, took_s: float | None = None) -> str:
        """The result in one line, of a script that took so long; by default until now."""
        ledgers = [ledger for ledger, _ in self._trainings]
        if not any(row.outcome == "kept" for ledger in ledgers for row in rows(ledger)):
            if self._faults:
                return f"left as it was, because hotlap failed: {self._faults[0]}"
            if self._refusals:
                return f"left as it was, because {self._refusals[0]}"
        took_s = time.perf_counter() - self._began if took_s is None else took_s
        is_fixed = self._settings.plan not in (None, "auto")
        tune_s = self._settings.tune_s
        return headline(ledgers, took_s, start_s=self._start_s, is_fixed=is_fixed, tune_s=tune_s)

    def tell(self, error: BaseException | None = None) -> None:
        """Print everything, and write down what it came to."""
        took_s = time.perf_counter() - self._began
        first = self.headline(took_s)
        self._write_results({"headline": first, "took_s": took_s, "start_s": self._start_s})
        if self._settings.as_json:
            pairs = zip(self._trainings, self._figures, strict=True)
            trainings = [as_json(ledger) | figures for (ledger, _), figures in pairs]
            data = {
                "headline": first,
                "trainings": trainings,
                "faults": self._faults,
                "refusals": self._refusals,
                "conditions": self.conditions,
                "notes": self.notes,
            }
            lines = [json.dumps(data)]
        else:
            below = self.lines() if self._trainings or self._faults or self._refusals else []
            lines = [f"hotlap: {first}", *(f"{MARGIN}{line}" if line else "" for line in [*below, *self.notes])]
        if error is not None and "CUDA error" in str(error):
            lines.append("hotlap  to see whether this error comes from hotlap: hotlap run --off …")
        say(*lines)

    def _write_results(self, whole: dict[str, Any]) -> None:
        """Write the figures of each training into its run folder, and those of the whole script into the first."""
        for number, folder in self._folders.items():
            if number >= len(self._figures):
                continue  # it ended before it came to anything
            try:
                folder.write_result({**(whole if number == 0 else {}), **self._figures[number]})
                folder.write_artefacts()
                if number == 0 and self._settings.report:
                    found = self._trainings[0][1]
                    found.append(f"report {self._shown(write_report(folder.path))}")
            except Exception as error:  # the script is done: nothing of hotlap's may end it otherwise
                self.fault(error)


def _named(file: str | None) -> dict[str, str]:
    """Where a script lies, and the hash of its text; empty where it is no file."""
    try:
        content = Path(file or "").read_bytes()
    except OSError:  # a folder or a zip file with a __main__.py
        return {}
    return {"file": str(Path(file or "").absolute()), "sha256": hashlib.sha256(content).hexdigest()}


def headline(
    ledgers: Sequence[Ledger],
    took_s: float,
    *,
    start_s: float = 0.0,
    is_fixed: bool = False,
    tune_s: float | None = None,
) -> str:
    """The result of a script's trainings in one line.

    `is_fixed`: the user chose the plan; `tune_s`: the seconds that the user allowed for tuning.

    The time without hotlap is computed from updates that ran at the pace of the script's own plan, where measured. The
    seconds that hotlap took to start are not part of it.
    """
    if not ledgers:
        return "left as it was: no training found, because the script's main process made too few weight updates"
    if is_fixed:
        kept = [row.what for ledger in ledgers for row in rows(ledger) if row.outcome == "kept"]
        changed = ", ".join(filter(None, (_changed(ledgers), *kept)))
        if not changed:
            return "left as it was, because the plan that you chose changes nothing here"
        return (
            f"took {_whole(took_s)} with {changed}, by the plan that you chose; what it saves: `hotlap run --compare`"
        )
    totals = [as_json(ledger)["total"] for ledger in ledgers]
    found = [row for ledger in ledgers for row in rows(ledger)]
    if any(row.outcome == "kept" for row in found):
        saved_s = [total["saved_s"] for total in totals if total is not None and total["saved_s"] is not None]
        saved_s += [row.saved_s for row in found if row.saved_s is not None]
        if not saved_s:
            names = ", ".join(row.what for row in found if row.outcome == "kept")
            return f"took {_whole(took_s)} with {names}; hotlap did not measure how much that saved"
        return _gain(took_s, math.fsum(saved_s), math.fsum(row.cost_s for row in found if row.what == "total"), start_s)
    whole = next((row.why for row in found if row.what == "all moves"), None)
    if whole is not None and not any(row.outcome in ("rejected", "undecided") for row in found):
        return f"{whole.partition(':')[0]}; nothing was changed{_hint(found, took_s, tune_s)}"
    return f"left as it was: {_why_left(found)}{_hint(found, took_s, tune_s)}"


def _changed(ledgers: Sequence[Ledger]) -> str:
    """The parts of the plans that differ from those of the script's own, in words."""
    parts: dict[str, None] = {}
    for ledger in ledgers:
        own, *others = [str(entry.plan).split(" · ") for entry in ledger]
        parts |= dict.fromkeys(new for plan in others for old, new in zip(own, plan, strict=True) if old != new)
    return ", ".join(parts)


def _gain(took_s: float, saved_s: float, cost_s: float, start_s: float) -> str:
    """`cost_s` is part of `saved_s`; `start_s` is not."""
    own_s = max(0.0, took_s + saved_s - start_s)
    ratio, seconds = own_s / took_s, f"{_whole(took_s)} instead of about {_whole(own_s)}"
    if ratio >= FASTER:
        return f"{ratio:.2f}x as fast: {seconds}" if ratio < 1.995 else f"{ratio:.1f}x as fast: {seconds}"
    what = "hotlap's start and tuning" if start_s else "tuning"
    costs = show_seconds(start_s + cost_s)
    return f"no faster: {seconds}, because the run ended before it had saved what {what} cost ({costs})"


def _whole(s: float) -> str:
    """Seconds in a form easy to compare: 61 s and 158 s, not 1 min 1 s and 2 min 38 s."""
    return f"{s:.0f} s" if 10 <= s < 1000 else show_seconds(s)


def _why_left(found: Sequence[Row]) -> str:
    """What hotlap tried, and why nothing changed."""
    judged = [row for row in found if row.outcome in ("rejected", "undecided")]
    tried = {name for row in judged if not row.known for name in row.what.split(", ")}
    unpaid = [row for row in found if row.outcome == "not tried" and row.needs_s is not None]
    if tried:
        is_cut = any(row.outcome == "undecided" for row in judged)
        result = "but the run ended before a gain was shown" if is_cut else "and none of them helped"
        return f"{len(tried)} move{'s' if len(tried) > 1 else ''} tried, {result}"
    if unpaid:
        first = unpaid[0]
        return f"nothing was tried, because trials would cost more than the time allowed: {first.what}, {first.why}"
    if judged:
        return "nothing was tried, because an earlier run has shown that nothing helps"
    if any(row.outcome == "not tried" for row in found):
        return "nothing was tried, because no trial would have paid; the table has the reasons"
    if found:
        return "the run ended before a trial did"
    return "nothing was tried, because the run ended before its pace was known"


def _hint(found: Sequence[Row], took_s: float, tune_s: float | None) -> str:
    """The option that makes hotlap try more, where that may pay."""
    unpaid = {row.what: row.needs_s for row in found if row.outcome == "not tried" and row.needs_s is not None}
    if took_s < WORTH_TUNING_S:
        return ""
    if unpaid:
        names = [*unpaid]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        return f"; to try {', '.join(names[:2])}{more} anyway: --tune-seconds {_seconds_for(unpaid.values())}"
    if any(row.what == "all moves" for row in found):
        return f"; to try anyway: --tune-seconds {round(max(WORTH_TUNING_S, 2 * (tune_s or 0.0)))}"
    return ""


def _seconds_for(costs: Iterable[float]) -> int:
    """A round number of seconds that pays for these trials and their laps."""
    return max(5, 5 * math.ceil(1.5 * math.fsum(costs) / 5))
