"""More updates in one replay."""

from __future__ import annotations

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.moves.move import Move

STEPS = 32


def _propose(plan: Plan, rig: Driven) -> Plan | str:
    if plan.execution.mode != "captured" or plan.feed.kind != "resident":
        return "it needs captured steps and data that is held on the device"
    if rig.most_replay_steps < STEPS:
        return "updates are made one at a time here"
    if plan.execution.replay_steps >= STEPS:
        return f"there are {plan.execution.replay_steps} already"
    if rig.epoch_windows < 2 * STEPS:
        return f"an epoch has {rig.epoch_windows} updates only"
    return plan.but(replay_steps=STEPS)


MOVE = Move(name=f"{STEPS} steps a replay", kind="A", propose=_propose, setup_s=lambda p, r: 0.5, helps=("launching",))
