"""Pictures of a report: bars with intervals, parts of a whole, and points beside their diagonal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotlap.plots.axes import round_marks, value_range
from hotlap.plots.svg import FAINT, GRID, HALF, INK, LIGHT, Picture, mark, number, safe, short, text, width_of

ROW = 26
HATCHES = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<path class="grid" stroke="{FAINT}" stroke-width="2" d="M0 0V6"/></pattern>'
)
"""What fills bars that do not count, seen without colours too. A page has it once, for all its pictures."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar with its name before it and words behind it."""

    name: str
    value: float
    words: str = ""
    colour: int | None = 0
    """Its colour; None: hatched, since it does not count."""
    low: float | None = None
    high: float | None = None
    """An interval around the value."""
    begins: float = 0.0
    """Where the bar begins, if not at 0."""


def bars_picture(title: str, bars: Sequence[Bar], *, unit: str = "", width: int = HALF) -> Picture:
    """Horizontal bars from 0 on, or to the left for numbers below 0."""
    names = [short(bar.name, 28 if width == HALF else 52) for bar in bars]
    left = min(0.47 * width, max(map(width_of, names)) + 22)
    room = width - left - 12 - max((width_of(bar.words) for bar in bars), default=0)
    ends = [0.0, *(x for bar in bars for x in (bar.value, bar.high, bar.low, bar.begins) if x is not None)]
    low, high = value_range(ends)
    low = min(low, 0.0)
    room = max(room, 0.3 * width)

    def place(value: float) -> float:
        return left + (value - low) / (high - low) * room

    parts = []
    for row, (bar, name) in enumerate(zip(bars, names, strict=True)):
        y = 8 + ROW * row
        parts.append(text(left - 8, y + 13, name, anchor="end"))
        first, last = sorted((place(bar.begins), place(bar.value)))
        size = f'x="{first:.1f}" y="{y}" width="{max(last - first, 1):.1f}" height="18" rx="2"'
        words = safe(f"{bar.name}: {bar.words or number(bar.value)}{unit}")
        look = 'class="ghost" fill="url(#hatch)"' if bar.colour is None else _look(bar.colour)
        parts.append(f"<rect {size} {look}><title>{words}</title></rect>")
        end = last
        if bar.low is not None and bar.high is not None:
            one, other = place(bar.low), place(bar.high)
            line = f"M{one:.1f} {y + 9}H{other:.1f}M{one:.1f} {y + 4}v10M{other:.1f} {y + 4}v10"
            parts.append(f'<path class="ink" fill="none" stroke="{INK}" stroke-width="1.5" d="{line}"/>')
            end = max(end, other)
        parts.append(text(end + 6, y + 13, bar.words, "faint"))
    parts.append(f'<path class="grid" stroke="{GRID}" d="M{place(0):.1f} 4V{12 + ROW * len(bars)}"/>')
    return Picture(title=title, width=width, height=16 + ROW * len(bars), parts=parts)


def parts_picture(title: str, parts_of: Sequence[tuple[str, float]], show: Callable[[float], str]) -> Picture:
    """Parts of a time, one after the other: a line for each, which begins where the one before ends."""
    bars, begins = [], 0.0
    for at, (name, seconds) in enumerate(parts_of):
        words = show(seconds)
        bars.append(Bar(name=name, value=begins + seconds, begins=begins, words=words, colour=at % 5))
        begins += seconds
    return bars_picture(title, bars)


def diagonal_picture(title: str, points: Sequence[tuple[float, float]], across: str, down: str) -> Picture:
    """Points of two numbers each, with the line on which both are equal."""
    low, high = value_range([value for point in points for value in point])
    marks = round_marks(low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])
    left, top, side = 70, 12, 320

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            round(left + (x - low) / (high - low) * side, 1),
            round(top + side - (y - low) / (high - low) * side, 1),
        )

    parts = []
    for value in marks:
        x, y = place(value, value)
        parts.append(f'<path class="grid" stroke="{GRID}" d="M{left} {y}h{side}M{x} {top}v{side}"/>')
        parts.append(text(left - 8, y + 4, number(value), "faint", "end"))
        parts.append(text(x, top + side + 18, number(value), "faint", "middle"))
    start, end = place(low, low), place(high, high)
    line = f"M{start[0]} {start[1]}L{end[0]} {end[1]}"
    parts.append(f'<path class="rule" fill="none" stroke="{FAINT}" stroke-dasharray="6 4" d="{line}"/>')
    parts += [mark(*place(x, y), 0, f"{across} {x:.4g}, {down} {y:.4g}", size=2.5) for x, y in points]
    parts.append(text(left + side / 2, top + side + 38, across, "faint", "middle"))
    middle = top + side / 2
    parts.append(text(14, middle, down, "faint", "middle", f' transform="rotate(-90 14 {middle:g})"'))
    return Picture(title=title, width=left + side + 20, height=top + side + 48, parts=parts)


def _look(colour: int) -> str:
    return f'class="bar d{colour}" fill="{LIGHT[colour]}"'
