"""Beside a script whose training runs: every few seconds a look at what its user should know before it is too late."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from hotlap.core.errors import HotlapError
from hotlap.core.terminal import say
from hotlap.fitting.first_nan import are_finite
from hotlap.machine.session_end import SessionEnd, session_end
from hotlap.monitor.memory_watch import MemoryWatch
from hotlap.script.training import ScriptTraining
from hotlap.script.update.capture import parameters_of

EVERY_S = 2.0
"""Between two looks."""
NOTICE_S = 1800.0
"""How long before the end of the session hotlap says so."""
NOTICE_SHARE = 0.25
"""The same as a share of the time that is left when the training begins, where that is less."""


class Lookout:
    """Looks now and then, and shows a line where there is one to show; the session asks between steps."""

    def __init__(self, show: Callable[[str], None] = lambda line: say(f"hotlap  {line}")) -> None:
        self.due_s = -math.inf
        """When to look next, by `time.perf_counter`."""
        self._show, self._has_asked = show, False
        self._end: SessionEnd | None = None
        self._notice_s = 0.0
        self._memory: MemoryWatch | None = None

    def begin(self, device: torch.device) -> None:
        """A training of the script has begun."""
        self.end()
        self._memory = MemoryWatch(device)

    def end(self) -> None:
        """The training is over, or hotlap leaves it alone."""
        if self._memory is not None:
            self._memory.close()
        self._memory, self.due_s = None, -math.inf

    def memory_line(self, step: int, *, filled_at: int | None, is_steady: bool, may_watch: bool) -> str | None:
        """Look at memory between two steps, after `look`; the line on what grows, once that is known.

        `filled_at` is the step up to which a cache may fill. Memory `is_steady` unless hotlap changes how it trains.
        """
        memory = self._memory
        if memory is None:
            return None
        if memory.is_open:
            line = memory.step_ended()
        elif is_steady:
            line = memory.look(step, filled_at=filled_at, may_watch=may_watch)
        else:
            memory.forget()
            return None
        if memory.is_open:
            self.due_s = -math.inf  # each step is one to watch
        if line is not None:
            self._show(line)
        return line

    def look(self) -> None:
        """Look once; costs some microseconds where there is nothing to say."""
        self.due_s = time.perf_counter() + EVERY_S
        if not self._has_asked:
            self._has_asked = True
            self._ask()
        if self._end is not None and self._end.left_s <= self._notice_s:
            self._show(f"the session {self._end.line}: save the training before, so that it can go on later")
            self._end = None

    def _ask(self) -> None:
        try:
            self._end = session_end()
        except HotlapError as error:
            self._show(str(error))
        if self._end is not None:
            self._notice_s = min(NOTICE_S, NOTICE_SHARE * self._end.left_s)


# --- weights -----------------------------------------------------------------------------


LOOK_S = 5.0
"""Seconds between two looks at weights, each of which waits once for the device."""


class WeightsWatch:
    """Looks at the weights of one training every few seconds, and at its end."""

    def __init__(self, training: ScriptTraining) -> None:
        self._training = training
        self._good: int | None = None
        """The last update after which all weights were finite."""
        self._next_s = 0.0
        self.line: str | None = None
        """What to say of weights that are not finite; None if they are."""

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s

    def look(self) -> str | None:
        """What to say of weights that are found not to be finite, once; the ledger has it too."""
        training = self._training
        if self.line is not None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return None
        self._next_s = time.perf_counter() + LOOK_S
        weights = [weight for optimizer in training.optimizers for weight in parameters_of(optimizer)]
        step = training.before + training.steps
        try:
            is_good = are_finite(weights)
        except RuntimeError:  # on several devices, or of a kind that cannot be asked
            self._next_s = math.inf
            return None
        if is_good:
            self._good = step
            return None
        self._next_s = math.inf
        if self._good is None:  # a script may begin with whatever it likes
            return None
        plan, own = training.plan, training.own
        changes = ", ".join(f"{name} {was} → {now}" for name, (was, now) in own.changes(plan).items())
        since = f"weights are not finite after update {step:,}; they were after update {self._good:,}"
        self.line = f"{since}; in force: {f'the plan with {changes}' if changes else 'your own plan'}"
        training.write_down("weights not finite", "fault", self.line)
        return self.line
