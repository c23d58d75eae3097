"""The whole step recorded and replayed."""

from __future__ import annotations

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.moves.move import Move

STEPS = 8
"""Updates in one replay: launching it then costs next to nothing, and whoever waits for its end waits milliseconds."""


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.execution.mode == "captured":
        return "it is captured already"
    at_once = min(STEPS, rig.most_replay_steps) if plan.feed.kind == "resident" else 1
    return plan.but(mode="captured", replay_steps=at_once)


MOVE = Move(
    name="whole step captured", kind="A", propose=_propose, setup_s=lambda p, r: 0.3, helps=("launching", "feeding")
)
