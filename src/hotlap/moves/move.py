"""What every move is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven

NOTHING_S = 0.02


def _next_to_nothing(plan: Plan, rig: Driven) -> float:
    return NOTHING_S


@dataclass(frozen=True, kw_only=True)
class Move:
    """One change of plan that may pay."""

    name: str
    """As a table shows it."""
    kind: str
    """What it changes beside the time: `A` rounding alone, `B` precision."""
    propose: Callable[[Plan, Driven], Plan | str]
    """The plan with the change, or why there is nothing to change; whether the rig can obey it is asked of the rig."""
    setup_s: Callable[[Plan, Driven], float] = _next_to_nothing
    """About how many seconds it takes until the changed plan is at its pace."""
    helps: tuple[str, ...] = ()
    """What bounds a training that it may make faster; as `Diagnosis.bound` names it."""
    is_rare: bool = False
    """Whether most trainings have nothing to do with it: where it has nothing to change, the ledger leaves it out."""
