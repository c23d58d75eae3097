"""Lines and dots over axes with round numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotlap.plots.svg import COLOURS, FAINT, GRID, mark, number, safe, short, stroke, text

Points = list[tuple[float, float]]

MOST_POINTS = 400
"""A line of more points is drawn through means of neighbours."""
MOST_DOTS = 40
MARKS = 7
"""Marks on a line that has no dot at each point."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a picture."""

    name: str
    points: Points
    colour: int
    is_train: bool = False
    is_dots: bool = False
    """Whether only its points are drawn."""


def thinned(points: Points) -> Points:
    """At most `MOST_POINTS` points, each the mean of neighbours."""
    if len(points) <= MOST_POINTS:
        return points
    parts = np.array_split(np.array(points), MOST_POINTS)
    return [(float(x), float(y)) for x, y in (part.mean(0) for part in parts)]


class Plot:
    """Axes over the same steps, one below the other."""

    def __init__(self, left: int, right: int, steps: tuple[float, float], unit: str = "step") -> None:
        self._left, self._right = left, right
        self._steps, self._unit = steps, unit

    def drawn(
        self,
        title: str,
        lines: Sequence[Line],
        top: int,
        bottom: int,
        *,
        has_steps: bool,
        rules: Sequence[tuple[str, float]] = (),
        band: Sequence[tuple[float, float, float]] = (),
        events: Sequence[tuple[float, str]] = (),
        zero: bool = False,
        show: Callable[[float], str] = number,
    ) -> list[str]:
        """Grid, numbers and lines between two heights.

        `rules` are levels with names, `band` has the lowest and highest of other trainings at steps, `events` are
        moments with names; `zero` begins at 0.
        """
        held = [y for line in lines for _, y in line.points] + [y for _, y in rules]
        held += [y for _, low, high in band for y in (low, high)] + [0.0] * zero
        low, high = value_range(held)
        marks = round_marks(low, high)
        low, high = min(low, marks[0]), max(high, marks[-1])

        def place(x: float, y: float) -> tuple[float, float]:
            first, last = self._steps
            across = self._left + (x - first) / (last - first) * (self._right - self._left)
            return round(across, 1), round(bottom - (y - low) / (high - low) * (bottom - top), 1)

        parts = [text(self._left, top - 10, title, "title")] if title else []
        for value in marks:
            y = place(self._steps[0], value)[1]
            parts.append(f'<path class="grid" stroke="{GRID}" d="M{self._left} {y}H{self._right}"/>')
            parts.append(text(self._left - 8, y + 4, show(value), "faint", "end"))
        if has_steps:
            first, last = self._steps
            whole = [value for value in round_marks(first, last, most=8) if first <= value <= last]
            whole = [value for value in whole if last - first < 4 or value == round(value)]
            parts += [text(place(value, low)[0], bottom + 20, number(value), "faint", "middle") for value in whole]
            parts.append(text((self._left + self._right) / 2, bottom + 40, self._unit, "faint", "middle"))
        parts += _band([(place(x, one), place(x, other)) for x, one, other in band])
        for x, words in events:
            across = place(x, low)[0]
            path = f'<path class="grid event" stroke="{FAINT}" stroke-dasharray="2 3" d="M{across} {top}V{bottom}">'
            parts.append(f"{path}<title>{safe(words)}</title></path>")
        for name, y in rules:
            height = place(self._steps[0], y)[1]
            dash = f'stroke="{FAINT}" stroke-width="1.5" stroke-dasharray="10 4 2 4"'
            parts.append(f'<path class="rule" fill="none" {dash} d="M{self._left} {height}H{self._right}"/>')
            parts.append(text(self._right, height - 5, f"{short(name, 34)} {y:.4g}", "faint small", "end"))
        for line in lines:
            parts += drawn_line(line, [place(x, y) for x, y in line.points], self._unit)
        return parts


def _band(edges: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> list[str]:
    if not edges:
        return []
    around = [low for low, _ in edges] + [high for _, high in reversed(edges)]
    path = "L".join(f"{x:g} {y:g}" for x, y in around)
    return [f'<path class="band" fill="{FAINT}" opacity="0.25" d="M{path}z"/>']


def drawn_line(line: Line, places: Points, unit: str) -> list[str]:
    """A line with its dots; a long one has a few marks, which tell it from others without colours."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
    parts = [] if line.is_dots else [stroke(path, line.colour, line.is_train)]
    if line.is_dots or len(places) == 1 or (not line.is_train and len(places) <= MOST_DOTS):
        chosen = range(len(places))
    elif not line.is_train:
        chosen = range(len(places) // (2 * MARKS), len(places), max(1, len(places) // MARKS))
    else:
        chosen = range(0)
    for at in chosen:
        (x, y), (step, value) = places[at], line.points[at]
        words = f"{short(line.name)} {value:.4g} at {unit} {step:,.0f}"
        parts.append(mark(x, y, line.colour % COLOURS, words, size=3))
    return parts


def legend(entries: Sequence[tuple[str, int, bool]], left: int, right: int, top: int) -> tuple[list[str], int]:
    """What colours, marks and dashes mean, in as many rows as it takes; and where it ends."""
    parts, x, y = [], left, top
    for name, colour, is_train in entries:
        name = short(name)
        taken = 48 + 7 * len(name)
        if x + taken > right and x > left:
            x, y = left, y + 20
        parts.append(stroke(f"M{x} {y}h24", colour, is_train))
        if not is_train:
            parts.append(mark(x + 12, y, colour).replace('class="mark ', 'class="', 1))
        parts.append(text(x + 30, y + 4, name))
        x += taken
    return parts, y


def round_marks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 and zeros) from about `low` to about `high`, `most` of them at most and at least 2."""
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest; a little apart where they are the same."""
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    apart = abs(low) / 10 or 1.0
    return low - apart, high + apart
