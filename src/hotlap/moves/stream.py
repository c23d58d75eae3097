"""Batches copied to the GPU ahead of the step that needs them."""

from __future__ import annotations

from hotlap.core.plan import Feed, Plan
from hotlap.engine.driven import Driven
from hotlap.moves.move import Move
from hotlap.moves.resident import holding_s


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.feed.kind == "resident":
        return "batches are on the device already"
    if plan.feed.kind == "stream":
        return "they are streamed already"
    return plan.with_feed(Feed(kind="stream"))


MOVE = Move(name="batches copied ahead", kind="A", propose=_propose, setup_s=holding_s, helps=("feeding",))
