"""All of the data on the device, gathered there."""

from __future__ import annotations

from hotlap.core.plan import Feed, Plan
from hotlap.engine.rig import Rig
from hotlap.moves.move import Move


def _propose(plan: Plan, rig: Rig) -> Plan | str:
    if plan.feed.kind == "resident":
        return "it is held already"
    # Settings of workers belong to the loader that it takes the place of.
    return Plan(feed=Feed(kind="resident"), numerics=plan.numerics, memory=plan.memory, execution=plan.execution)


MOVE = Move(name="batches held on the device", kind="A", propose=_propose)
