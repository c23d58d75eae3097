"""Where a search stands: the plan settled on, the moves that made it, its pace, and what is left of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hotlap.core.plan import Plan
from hotlap.core.units import show_about, show_seconds
from hotlap.engine.protocol import TunableTraining
from hotlap.moves import Everything, Move, everything
from hotlap.tuner.budget import Budget, Length, allowed
from hotlap.tuner.laps import Lap
from hotlap.tuner.probe import HOPE, UPDATES, Probe
from hotlap.tuner.stats import LEAST_GAIN
from hotlap.tuner.trials import Trials

FIRST_GATE_S = 0.25
"""What the first one takes beside, on a GPU: kernels that nothing has used so far are loaded, 0.2 to 0.7 s of it."""
RECORDING = 4
"""Updates of the user's own that it takes to record one shape of batch, about: some are made before it is."""


class Doubt(NamedTuple):
    """Why a move is not tried."""

    why: str
    cost_s: float | None = None
    """What it costs, where it may be paid for later."""
    is_dear: bool = False
    """Whether it would be tried if it cost less."""


class SearchState:
    """The plan that has been settled on so far, and what trying others may still give."""

    trials: Trials
    lap: Lap
    """How the plan settled on was seen to go."""

    def __init__(
        self, rig: TunableTraining, *, moves: Sequence[Move], length: Callable[[], Length], probe: Probe
    ) -> None:
        self._rig, self._moves, self._length, self._probe = rig, moves, length, probe
        self.baseline = self.plan = rig.plan
        """The user's own plan, and the one that has been settled on."""
        self.kept: list[Move] = []
        self.seen: Sequence[Move] = ()
        """Moves that were made for a glance: they are set up already."""

    def begin(self, trials: Trials, lap: Lap) -> None:
        """From now on the pace of the user's own plan is known."""
        self.trials, self.lap = trials, lap

    @property
    def budget(self) -> Budget:
        """What may be spent."""
        return self.trials.budget

    def with_moves(self, moves: Sequence[Move], but: Move | None = None) -> Plan:
        """The user's plan with the kept moves and these, in the order in which they rest on each other."""
        chosen = [move for move in self._moves if (move in self.kept or move in moves) and move is not but]
        return everything(self._rig, self.baseline, chosen).plan

    def setup_s(self, move: Move, beside: Sequence[Move] = ()) -> float:
        """What it takes to set up the plan that a move makes, beside others."""
        if move in self.seen:
            return 0.0
        return move.setup_s(self.with_moves([*beside, move]), self._rig)

    def why_not_worth(self, move: Move, beside_s: float = 0.0) -> Doubt | None:
        """Why a trial cannot pay, or may not be paid for beside others that take so long; None where it can."""
        proposed = move.proposed(self.plan, self._rig)
        if isinstance(proposed, str):
            return Doubt(proposed)
        cost_s = (0.0 if move in self.seen else move.setup_s(proposed, self._rig)) + self.gate_s([move])
        most, why = self._probe.most_gain(self.plan, proposed, self.lap)
        can_save_s = self.left_s * (1 - 1 / most)
        if most < LEAST_GAIN:
            return Doubt(why)
        takes = f"estimated to take {show_about(cost_s)} to try"
        if cost_s > can_save_s:
            return Doubt(f"{takes}, can save {show_seconds(can_save_s)} at most", is_dear=True)
        if cost_s > self.budget.left_s - beside_s:
            may = show_seconds(max(0.0, self.budget.left_s))
            return Doubt(f"{takes}, and {may} may be spent", cost_s, is_dear=True)
        return None

    def gate_s(self, moves: Sequence[Move]) -> float:
        """About what a gate takes that judges these moves: as the cheapest of its kind so far, at least."""
        is_first = self._rig.device.type == "cuda" and not self.trials.gate_s and not self.seen
        guessed_s = self.trials.gate_updates * self.budget.base_s + (FIRST_GATE_S if is_first else 0.0)
        return max(guessed_s, self.trials.cheapest_gate_s(moves))

    # --- time ------------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        """Seconds that the rest of the run takes under the plan settled on."""
        return self.updates_left * float(self.lap.step_s)

    @property
    def updates_left(self) -> int:
        """Updates until the end of the run."""
        return max(0, self._length().updates - self._rig.steps)

    def updates_until(self, cost_s: float) -> int | None:
        """Updates until so much may be spent, and it is still worth it; None where that day does not come."""
        budget = self.budget
        a_update_s = 0.25 * (budget.base_s - self.lap.step_s)
        if a_update_s <= 0 or cost_s > budget.most_s - budget.spent_s:
            return None
        updates = int(max(0.0, cost_s - budget.left_s) / a_update_s) + 1
        return updates if 4 * updates < self.updates_left else None

    def recording_s(self, plan: Plan) -> float:
        """About how long it takes until a plan of which nothing is recorded yet replays all that it will."""
        is_captured = plan.execution.mode == "captured"
        return RECORDING * self.budget.base_s * self._rig.shapes if is_captured else 0.0


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


def at_a_glance(rig: TunableTraining, state: SearchState, probe: Probe, moves: Sequence[Move]) -> Glance:
    """Roughly what those moves that are quickly applied give together, before a gate judges any of them.

    Gates and laps cost seconds, and a short run may spend less than a gain takes to prove. A few updates made aside
    cost a tenth of that. They do not show that the training stays the same, and leave no trace.
    """
    began = time.perf_counter()
    made = _soon_made(rig, state, moves)
    with allowed(state.budget.left_s):
        step_s = probe.glance(made.plan) if made is not None else None
    state.budget.made(0, time.perf_counter() - began)
    gain = state.lap.step_s / step_s if step_s else 1.0
    if made is None or step_s is None:
        return Glance()
    return Glance(made.made, gain, True) if gain >= HOPE else Glance(was_taken=True)


def _soon_made(rig: TunableTraining, state: SearchState, moves: Sequence[Move]) -> Everything | None:
    """As many of the moves as a glance at them may be paid for.

    None where what shows most in short runs is not among them: another precision, and a recorded step where there can
    be one.
    """
    made = everything(rig, state.plan, moves)
    needed = {move for move in made.made if move.at_a_glance}
    if not any(move.at_a_glance == "needed" for move in needed):
        return None
    setups_s = {move: state.setup_s(move) for move in moves}
    while needed <= set(made.made):
        # Updates that load the kernels of one move load those of the others; data has to be brought besides.
        held = {move for move in made.made if move.feeds == "held" and made.plan.feed.kind == "resident"}
        held_s = sum(setups_s[move] for move in held)
        most_s = max(setups_s[move] for move in made.made if move not in held)
        if UPDATES * state.budget.base_s + held_s + most_s <= state.budget.left_s:
            return made
        spare = [move for move in made.made if move not in needed]
        if not spare:
            return None
        dearest = max(spare, key=lambda move: setups_s[move])
        moves = [move for move in moves if move is not dearest]
        made = everything(rig, state.plan, moves)  # another may take its place
    return None
