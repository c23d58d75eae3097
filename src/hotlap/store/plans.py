"""Plans as files."""

from __future__ import annotations

from pathlib import Path

from hotlap.core.errors import PlanError
from hotlap.core.plan import Plan
from hotlap.store.files import read_text, write_text


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan as a readable file."""
    write_text(Path(path), plan.to_text())


def load_plan(path: str | Path) -> Plan:
    """Read a plan file; every mistake in it is named."""
    try:
        return Plan.from_text(read_text(Path(path)))
    except PlanError as error:
        raise PlanError(*(f"{path}: {problem}" for problem in error.problems)) from None
