"""Processes that fetch samples ahead."""

from __future__ import annotations

from hotlap.core.plan import Feed, Plan
from hotlap.engine.driven import Driven
from hotlap.machine.limits import read_cpu
from hotlap.moves.move import Move

MOST = 8
START_S = 0.1
"""What one worker takes to start, about: a fork, and its first batch."""


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.feed.workers:
        return f"there are {plan.feed.workers} already"
    reason = rig.why_not_spread()
    if reason is not None:
        return reason
    # As many as people are told to use; never more than there are cores.
    count = max(1, min(MOST, read_cpu().cores))
    pinned = rig.device.type == "cuda"
    return plan.with_feed(Feed(kind="loader", workers=count, persistent=True, pinned=pinned))


def _setup_s(plan: Plan, rig: Driven) -> float:
    return START_S * plan.feed.workers


MOVE = Move(name="workers that fetch ahead", kind="A", propose=_propose, setup_s=_setup_s, helps=("feeding",))
