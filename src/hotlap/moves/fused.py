"""The optimizer's update as one kernel."""

from __future__ import annotations

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.moves.move import Move


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    return "it is fused already" if plan.numerics.optimizer == "fused" else plan.but(optimizer="fused")


MOVE = Move(name="fused optimizer", kind="A", propose=_propose, helps=("launching", "memory traffic"))
