"""All moves, and the plan with every one of them that this training can obey."""

from __future__ import annotations

from dataclasses import dataclass

from hotlap.core.plan import Plan
from hotlap.engine.rig import Rig
from hotlap.moves import autotune, capture, fused, layout, precision, resident, stream
from hotlap.moves.move import Move

MOVES: tuple[Move, ...] = (
    fused.MOVE,
    resident.MOVE,
    stream.MOVE,
    precision.MOVE,
    layout.MOVE,
    autotune.MOVE,
    capture.MOVE,
)
"""In the order in which a plan's parts rest on each other, but for the optimizer, which decides how fp16 skips."""


@dataclass(frozen=True)
class Everything:
    """The plan with every move that can be made, and why the others cannot."""

    plan: Plan
    made: tuple[Move, ...]
    not_made: tuple[tuple[Move, str], ...]


def everything(rig: Rig) -> Everything:
    """Whatever this machine can do with this training, unmeasured: nothing is said of whether it pays."""
    plan, made, not_made = rig.plan, [], []
    for move in MOVES:
        proposed = move.propose(plan, rig)
        reason = proposed if isinstance(proposed, str) else rig.supports(proposed)
        if isinstance(proposed, str) or reason:
            not_made.append((move, str(reason)))
        else:
            plan = proposed
            made.append(move)
    return Everything(plan, tuple(made), tuple(not_made))
