"""What each move gave in the runs of a folder: measured gains, from their ledgers alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.core.table import rows
from hotlap.report.reading import read_run, runs_in


@dataclass(kw_only=True)
class Gain:
    """What became of one move over many trainings."""

    move: str
    kept: int = 0
    judged: int = 0
    """Trainings in which it was measured."""
    ratios: list[float] = field(default_factory=list)
    """How many times as fast it made a step, where it was kept and measured by itself."""
    together: list[float] = field(default_factory=list)
    """The same, where it was measured together with others: the gain is not its own."""

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON holds them."""
        return dict(vars(self))

    @property
    def words(self) -> str:
        """The gains, for people."""
        parts = [f"kept in {self.kept} of {self.judged}"]
        parts += [f"{_range(self.ratios)} alone"] if self.ratios else []
        parts += [f"{_range(self.together)} with others"] if self.together else []
        return ", ".join(parts)


def gains_in(folder: Path) -> tuple[int, list[Gain]]:
    """How many trainings of a folder were tuned, and what each move that was measured gave, the most kept first."""
    found: dict[str, Gain] = {}
    trainings = 0
    for path in runs_in(folder):
        try:
            run = read_run(path)
        except StoreError:
            continue
        for training in run.trainings:
            listed = rows(training.ledger) if training.ledger is not None else []
            judged = [
                row
                for row in listed
                if row.outcome in ("kept", "rejected", "undecided") and row.ratio and not row.known
            ]
            trainings += bool(judged)
            for row in judged:
                for name in row.what.split(", "):
                    gain = found.setdefault(name, Gain(move=name))
                    gain.judged += 1
                    if row.outcome == "kept" and row.ratio is not None:
                        gain.kept += 1
                        is_bundle = "together with others" in row.why or ", " in row.what
                        (gain.together if is_bundle else gain.ratios).append(row.ratio)
    return trainings, sorted(found.values(), key=lambda gain: (-gain.kept, -gain.judged, gain.move))


def _range(ratios: Sequence[float]) -> str:
    low, high = min(ratios), max(ratios)
    if len(ratios) == 1:
        return f"{low:.2f}x"
    return f"{statistics.median(ratios):.2f}x (from {low:.2f}x to {high:.2f}x)"
