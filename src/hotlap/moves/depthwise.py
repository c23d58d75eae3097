"""Depthwise convolutions by cuDNN's kernels, where compiling them may be paid for: they can be a little faster."""

from __future__ import annotations

from hotlap.core.plan import Plan
from hotlap.engine.depthwise import depthwise_kinds
from hotlap.engine.driven import Driven
from hotlap.moves.move import Move

COMPILING_S = 0.6
"""What cuDNN takes to compile one kind of layer, forward and backward: 0.5 to 1.2 s on an H200."""


def without_compiling(plan: Plan, rig: Driven) -> Plan:
    """The plan, in which channels last or 16 bits make nothing wait for cuDNN to compile."""
    is_slow_to_start = rig.device.type == "cuda" and depthwise_kinds(rig.modules) > 0
    return plan.but(depthwise="direct") if is_slow_to_start else plan


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.numerics.depthwise == "direct":
        return plan.but(depthwise="library")
    return "they are the library's already"


MOVE = Move(
    name="depthwise convolutions by cuDNN",
    kind="A",
    propose=_propose,
    setup_s=lambda plan, rig: COMPILING_S * depthwise_kinds(rig.modules),
    helps=("arithmetic", "memory traffic"),
    is_rare=True,
)
