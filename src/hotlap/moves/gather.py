"""Whole batches indexed out of tensors, instead of samples collated one by one."""

from __future__ import annotations

from hotlap.core.plan import Feed, Plan
from hotlap.engine.driven import Driven
from hotlap.moves.move import Move
from hotlap.moves.resident import holding_s


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.feed.kind != "loader":
        return "batches are indexed as a whole already"
    return plan.with_feed(Feed(kind="gather"))


MOVE = Move(name="batches indexed as a whole", kind="A", propose=_propose, setup_s=holding_s, helps=("feeding",))
