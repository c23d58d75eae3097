"""Depthwise convolutions by cuDNN's kernels, once they may be compiled: they are faster than torch's own."""

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
    return plan.but(depthwise="torch") if is_slow_to_start else plan


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.numerics.depthwise == "torch":
        return plan.but(depthwise="library")
    return "they are torch's own choice"


MOVE = Move(
    name="depthwise convolutions by cuDNN",
    kind="A",
    propose=_propose,
    setup_s=lambda plan, rig: COMPILING_S * depthwise_kinds(rig.modules),
    helps=("arithmetic", "memory traffic"),
    is_rare=True,
)
