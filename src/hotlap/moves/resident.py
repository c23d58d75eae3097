"""All of the data on the device, gathered there."""

from __future__ import annotations

from hotlap.core.plan import Feed, Plan
from hotlap.engine.driven import Driven
from hotlap.moves.move import NOTHING_S, Move


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.feed.kind == "resident":
        return "it is held already"
    # Settings of workers belong to the loader that it takes the place of.
    return plan.with_feed(Feed(kind="resident"))


def holding_s(plan: Plan, rig: Driven) -> float:
    """About how long it takes until all samples are where a plan's feed gathers them."""
    return NOTHING_S + rig.holding_s(plan.feed)


MOVE = Move(name="data held on the device", kind="A", propose=_propose, setup_s=holding_s, helps=("feeding",))
