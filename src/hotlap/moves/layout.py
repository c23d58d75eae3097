"""Images with their channels last, as the convolutions of tensor cores take them."""

from __future__ import annotations

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.moves.depthwise import without_compiling
from hotlap.moves.move import Move


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.numerics.layout == "channels_last":
        return "channels are last already"
    return without_compiling(plan.but(layout="channels_last"), rig)


MOVE = Move(name="channels last", kind="A", propose=_propose, helps=("arithmetic", "memory traffic"))
