"""What tuning may cost: a small share of the run, and a quarter of what it has saved already."""

from __future__ import annotations

SHARE = 0.015
"""Of the run, as predicted at the user's own pace."""
OF_SAVED = 0.25
"""Of what kept moves have saved so far."""
MOST_S = 60.0
"""And never more, unless the user says otherwise."""


class Budget:
    """Seconds beyond what the same updates would have taken under the user's own plan."""

    def __init__(self, *, base_s: float, updates: int, most_s: float = MOST_S) -> None:
        self.base_s = base_s
        """Seconds an update under the user's own plan, as last measured: a machine's pace changes."""
        self._in_all, self._most_s = updates, most_s
        self.spent_s = 0.0
        self.saved_s = 0.0
        self._wall_s, self._updates = 0.0, 0

    @property
    def all_s(self) -> float:
        """What may be spent in all, as things stand."""
        return min(self._most_s, SHARE * self.base_s * self._in_all + OF_SAVED * self.saved_s)

    @property
    def left_s(self) -> float:
        """What may still be spent."""
        return self.all_s - self.spent_s

    def lost_s(self, step_s: float) -> float:
        """What all of it took beyond a pace of so many seconds an update."""
        return self._wall_s - self._updates * step_s

    def made(self, updates: int, wall_s: float) -> None:
        """Told that so many updates took so long: slower than the user's own pace costs, faster saves."""
        self._wall_s += wall_s
        self._updates += updates
        beyond = wall_s - updates * self.base_s
        if beyond > 0:
            self.spent_s += beyond
        else:
            self.saved_s -= beyond
