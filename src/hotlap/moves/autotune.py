"""cuDNN's own choice of kernels by timing them."""

from __future__ import annotations

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.engine.layout import why_not_channels_last
from hotlap.moves.move import Move


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.execution.autotune:
        return "it is on already"
    if rig.device.type != "cuda":
        return "cuDNN is for GPUs"
    if why_not_channels_last(rig.modules) is not None:
        return "the model has no convolutions over images or volumes"
    if rig.steps:
        return "torch keeps the kernels it has chosen for shapes that were computed before"
    return plan.but(autotune=True)


MOVE = Move(name="cuDNN autotuned", kind="A", propose=_propose, setup_s=lambda p, r: 1.0, helps=("arithmetic",))
