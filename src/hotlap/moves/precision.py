"""Faster number formats, as the hardware has them."""

from __future__ import annotations

from hotlap import machine
from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.moves.depthwise import without_compiling
from hotlap.moves.move import Move


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.numerics.precision in ("bf16", "fp16"):
        return f"the precision is {plan.numerics.precision} already"
    # bf16 has the range of fp32 and needs no scaling; fp16 comes second.
    for precision in ("bf16", "fp16"):
        if machine.dtype_fact(rig.device, precision).support is machine.Support.HARDWARE:
            return without_compiling(plan.but(precision=precision), rig)
    return f"this {rig.device.type} has no 16-bit number format in hardware"


def _setup_s(plan: Plan, rig: Driven) -> float:
    return 0.3 if rig.device.type == "cuda" else 0.02


MOVE = Move(
    name="16-bit precision", kind="B", propose=_propose, setup_s=_setup_s, helps=("arithmetic", "memory traffic")
)
