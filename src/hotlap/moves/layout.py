"""Images with their channels last, as the convolutions of tensor cores take them."""

from __future__ import annotations

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.moves.depthwise import depthwise
from hotlap.moves.move import NOTHING_S, Move

DEPTHWISE_S = 0.3
"""What cuDNN takes to compile one with channels last, forward and backward, as measured on an H200."""


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.numerics.layout == "channels_last":
        return "channels are last already"
    return plan.but(layout="channels_last")


def _setup_s(plan: Plan, rig: Driven) -> float:
    return NOTHING_S + (DEPTHWISE_S * depthwise(rig.modules) if rig.device.type == "cuda" else 0.0)


MOVE = Move(name="channels last", kind="A", propose=_propose, setup_s=_setup_s, helps=("arithmetic", "memory traffic"))
