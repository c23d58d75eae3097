"""Matrix products and convolutions in TF32: fp32 whose factors are rounded to 10 bits of fraction."""

from __future__ import annotations

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.moves.move import Move


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.numerics.precision != "fp32":
        return f"the precision is {plan.numerics.precision} already"
    return plan.but(precision="tf32")


MOVE = Move(name="TF32", kind="B", propose=_propose, helps=("arithmetic", "memory traffic"))
