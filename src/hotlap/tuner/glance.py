"""A glance at what all moves give together, before any of them is judged: where it is much, more may be spent on them.

Gates and laps cost seconds, and a short run may spend less than what pays takes to try. A few updates aside cost a
tenth of that. They say nothing of whether the training stays the same, and keep nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hotlap.engine.protocol import TunableTraining
from hotlap.moves import Everything, Move, everything
from hotlap.tuner.allowance import allowed
from hotlap.tuner.probe import HOPE, UPDATES, Probe
from hotlap.tuner.stand import Stand


@dataclass(frozen=True)
class Glance:
    """Moves that were seen to give much together."""

    moves: Sequence[Move] = ()
    gain: float = 1.0
    was_taken: bool = False
    """Whether anything was seen at all: there may be no time for it, or too few windows in an epoch."""

    @property
    def line(self) -> str:
        """What was seen, for people; nothing where that was not much."""
        names = ", ".join(move.name for move in self.moves)
        return f"at a glance {self.gain:.2g}x by {names}" if self.moves else ""


def at_a_glance(rig: TunableTraining, stand: Stand, probe: Probe, moves: Sequence[Move]) -> Glance:
    """What those of the moves that are soon made give together, roughly."""
    began = time.perf_counter()
    made = _soon_made(rig, stand, moves)
    with allowed(stand.budget.left_s):
        step_s = probe.glance(made.plan) if made is not None else None
    stand.budget.made(0, time.perf_counter() - began)
    gain = stand.lap.step_s / step_s if step_s else 1.0
    if made is None or step_s is None:
        return Glance()
    return Glance(made.made, gain, True) if gain >= HOPE else Glance(was_taken=True)


def _soon_made(rig: TunableTraining, stand: Stand, moves: Sequence[Move]) -> Everything | None:
    """As many of the moves as a glance at them may be paid for.

    None where what shows most in short runs is not among them: another precision, and a recorded step where there can
    be one.
    """
    made = everything(rig, stand.plan, moves)
    needed = {move for move in made.made if move.at_a_glance}
    if not any(move.at_a_glance == "needed" for move in needed):
        return None
    setups_s = {move: stand.setup_s(move) for move in moves}
    while needed <= set(made.made):
        # Updates that load the kernels of one move load those of the others; data has to be brought besides.
        held = {move for move in made.made if move.feeds == "held" and made.plan.feed.kind == "resident"}
        held_s = sum(setups_s[move] for move in held)
        most_s = max(setups_s[move] for move in made.made if move not in held)
        if UPDATES * stand.budget.base_s + held_s + most_s <= stand.budget.left_s:
            return made
        spare = [move for move in made.made if move not in needed]
        if not spare:
            return None
        dearest = max(spare, key=lambda move: setups_s[move])
        moves = [move for move in moves if move is not dearest]
        made = everything(rig, stand.plan, moves)  # another may take its place
    return None
