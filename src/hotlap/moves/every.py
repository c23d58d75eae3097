"""All moves, and the plan with every one of them that this training can obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotlap.core.plan import Plan
from hotlap.engine.driven import Driven
from hotlap.moves import (
    autotune,
    capture,
    compiled,
    depthwise,
    fused,
    gather,
    layout,
    longer,
    precision,
    resident,
    stream,
    tf32,
    workers,
)
from hotlap.moves.move import Move

MOVES: tuple[Move, ...] = (
    fused.MOVE,
    resident.MOVE,
    stream.MOVE,
    gather.MOVE,
    precision.MOVE,
    tf32.MOVE,
    layout.MOVE,
    autotune.MOVE,
    capture.MOVE,
)
"""In the order in which a plan's parts rest on each other, but for the optimizer, which decides how fp16 skips."""

OTHERS: tuple[Move, ...] = (longer.MOVE, workers.MOVE, depthwise.MOVE, compiled.MOVE)
"""Moves that take the place of one of these, or build upon it, or are too dear to be tried beside others."""


@dataclass(frozen=True)
class Everything:
    """A plan with every move that can be made, and why the others cannot."""

    plan: Plan
    made: tuple[Move, ...]
    not_made: tuple[tuple[Move, str], ...]


def everything(rig: Driven, plan: Plan | None = None, moves: Sequence[Move] | None = None) -> Everything:
    """Whatever of these moves can be made from `plan` on, unmeasured: nothing is said of whether it pays.

    Without any named, all of them, and workers only where samples have to be fetched one by one.
    """
    if moves is None:
        found = everything(rig, plan, MOVES)
        return found if found.plan.feed.kind != "loader" else everything(rig, plan, (*MOVES, workers.MOVE))
    plan, made, not_made = plan or rig.plan, [], []
    for move in moves:
        proposed = move.propose(plan, rig)
        reason = proposed if isinstance(proposed, str) else rig.supports(proposed)
        if isinstance(proposed, str) or reason:
            not_made.append((move, str(reason)))
        else:
            plan = proposed
            made.append(move)
    return Everything(plan, tuple(made), tuple(not_made))
