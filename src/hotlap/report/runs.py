"""The runs of a folder, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.core.terminal import clean
from hotlap.core.units import show_seconds
from hotlap.report.document import Cell, Figure, Table
from hotlap.report.reading import RECIPE, SEARCH, RunFiles, began_s, number, read_run, runs_in
from hotlap.report.sections import kind_words, score_words, time_of
from hotlap.report.settings_sections import plan_words
from hotlap.report.training_sections import ratio_words, total_of


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What a list says of a run."""

    name: str
    path: Path
    state: str
    """`done`, `running` or `stopped`; `unreadable` where its files are none of hotlap's."""
    score: str
    began: str
    kind: str = ""
    speed_up: float | None = None
    """How many times as fast a step became."""
    seconds: float | None = None
    plan: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The line as JSON holds it."""
        return {**vars(self), "path": str(self.path)}


def list_runs(folder: Path) -> list[Listed]:
    """The runs of a folder, the newest first. Raises StoreError for what is no folder."""
    return [_listed(path) for path in runs_in(folder)]


def _listed(path: Path) -> Listed:
    began = began_s(path)
    when = datetime.fromtimestamp(began).astimezone().strftime("%Y-%m-%d %H:%M") if began else ""
    try:
        run = read_run(path)
    except StoreError as error:
        return Listed(name=clean(path.name), path=path, state="unreadable", score=str(error), began=when)
    first = run.trainings[0] if run.trainings else None
    return Listed(
        name=run.name,
        path=path,
        kind=kind_words(run),
        state=state_of(run),
        score=score_words(run),
        speed_up=number(total_of(first.ledger).get("ratio")) if first is not None and run.kind != RECIPE else None,
        seconds=time_of(run),
        plan="" if first is None or run.kind in (RECIPE, SEARCH) else plan_words(first),
        began=when,
    )


def state_of(run: RunFiles) -> str:
    """Whether a run came to its end."""
    return "done" if run.is_finished else "running" if run.is_live else "stopped"


def runs_table(listed: list[Listed]) -> Table:
    """The list as a table for people."""
    rows: list[tuple[Cell, ...]] = [
        (
            one.name,
            one.kind,
            one.state,
            one.score,
            Figure(one.speed_up, "" if one.speed_up is None else ratio_words(one.speed_up)),
            Figure(one.seconds, "" if one.seconds is None else show_seconds(one.seconds)),
            one.plan,
            one.began,
        )
        for one in listed
    ]
    head = ("run", "kind", "state", "score", "step", "time", "plan at the end", "began")
    return Table(title="Runs", head=head, rows=rows)
