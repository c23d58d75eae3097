"""What every move is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hotlap.core.plan import Plan
from hotlap.engine.rig import Rig


@dataclass(frozen=True, kw_only=True)
class Move:
    """One change of plan that may pay."""

    name: str
    """As a table shows it."""
    kind: str
    """What it changes beside the time: `A` rounding alone, `B` precision."""
    propose: Callable[[Plan, Rig], Plan | str]
    """The plan with the change, or why there is nothing to change; whether the rig can obey it is asked of the rig."""
