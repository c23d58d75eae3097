"""Plots of trainings and searches, each one SVG file that needs nothing else and can be read on white and on black."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.core.errors import DataError
from hotlap.core.terminal import clean
from hotlap.store.files import write_text

Record = Mapping[str, Any]
Points = list[tuple[float, float]]

NO_METRICS = ("step", "epoch", "train_loss", "valid_loss", "lr", "elapsed_s", "samples")
"""What a record holds beside metrics."""
USUAL = "macro_f1"
"""The metric that is drawn where a history has it; else the first."""
MOST_POINTS = 400
"""A line of more points is drawn through means of neighbours."""
MOST_DOTS = 40
COLOURS = 6
LONGEST_NAME = 24

_LIGHT = ("#0f5fc2", "#d1570f", "#1a7f37", "#8250df", "#b3261e", "#6e7781")
_DARK = ("#58a6ff", "#f0883e", "#56d364", "#bc8cff", "#ff7b72", "#b1bac4")
"""The colours of lines on white and on black; viewers that know no CSS show the first."""
_GRID, _CELL, _PAPER = "#d8dee4", "#0f5fc2", "#ffffff"
_STYLE = f"""
text {{ font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #1f2328; }}
.faint {{ fill: #59636e; }} .title {{ font-weight: 600; font-size: 13px; }} .on {{ fill: #ffffff; }}
.small {{ font-size: 11px; }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3; }} .faint {{ fill: #9198a1; }} .grid {{ stroke: #30363d; }} .paper {{ fill: #0d1117; }}
  .cell {{ fill: #2f81f7; }}
  {" ".join(f".c{at} {{ stroke: {colour}; }} .d{at} {{ fill: {colour}; }}" for at, colour in enumerate(_DARK))}
}}
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a picture."""

    name: str
    points: Points
    colour: int
    is_train: bool = False
    is_dots: bool = False
    """Whether only its points are drawn."""


# --- learning curves -----------------------------------------------------------------------------------


def curves(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw the losses of trainings over their steps, and one metric beneath, into an SVG file.

    `runs` are the histories of models by name. Each has a colour; training is dashed, validation is not. Numbers that
    are not finite are left out. Raises DataError where there is nothing to draw.
    """
    metric = _usual_metric(runs)
    losses = [line for number, (name, run) in enumerate(runs.items()) for line in _losses(name, run, number, len(runs))]
    below = [
        Line(name=f"{name} {metric}", points=_points(run, metric), colour=number)
        for number, (name, run) in enumerate(runs.items())
        if metric and _points(run, metric)
    ]
    if not losses:
        raise DataError("there is no loss in the history; curves are drawn of a training that has been evaluated")
    width, left, right, top = 760, 64, 32, 20
    legend, legend_end = _legend(losses, runs, left, width - right, top)
    parts = [*legend]
    steps = _range([0.0, *(x for line in (*losses, *below) for x, _ in line.points)])
    plot = _Plot(left, width - right, steps)
    end = legend_end + 44
    parts += plot.drawn("loss", losses, end, end + 230, has_steps=not below)
    end += 230
    if below and metric:
        parts += plot.drawn(f"{metric} on validation", below, end + 40, end + 210, has_steps=True)
        end += 210
    _write(path, width, end + 48, parts, "Learning curves")


def _losses(name: str, run: Sequence[Record], number: int, runs: int) -> list[Line]:
    """Training and validation; of a single run in two colours."""
    train, valid = _points(run, "train_loss"), _points(run, "valid_loss")
    found = [
        Line(name=f"{name}, training", points=train, colour=1 if runs == 1 else number, is_train=True),
        Line(name=f"{name}, validation", points=valid, colour=number),
    ]
    return [line for line in found if line.points]


def _points(run: Sequence[Record], name: str) -> Points:
    """What of `name` can be drawn, in order of steps."""
    found = [
        (float(record["step"]), float(record[name]))
        for record in run
        if isinstance(record.get(name), (int, float)) and math.isfinite(record[name])
    ]
    if len(found) <= MOST_POINTS:
        return found
    parts = np.array_split(np.array(found), MOST_POINTS)
    return [(float(x), float(y)) for x, y in (part.mean(0) for part in parts)]


def _usual_metric(runs: Mapping[str, Sequence[Record]]) -> str | None:
    names = [name for run in runs.values() for record in run for name in record if name not in NO_METRICS]
    return USUAL if USUAL in names else next(iter(names), None)


def _legend(lines: Sequence[Line], runs: Mapping[str, Any], left: int, right: int, top: int) -> tuple[list[str], int]:
    """What colours and dashes mean, in as many rows as it takes; and where it ends."""
    entries = [(line.name, line.colour, line.is_train) for line in lines]
    if len(runs) > 1:
        entries = [(name, number, False) for number, name in enumerate(runs)]
        entries += [("dashed: training", COLOURS - 1, True), ("solid: validation", COLOURS - 1, False)]
    parts, x, y = [], left, top
    for name, colour, is_train in entries:
        name = _short(name)
        taken = 48 + 7 * len(name)
        if x + taken > right and x > left:
            x, y = left, y + 20
        parts.append(_stroke(f"M{x} {y}h24", colour, is_train))
        parts.append(_text(x + 30, y + 4, name))
        x += taken
    return parts, y


class _Plot:
    """Axes over the same steps, one below the other."""

    def __init__(self, left: int, right: int, steps: tuple[float, float], unit: str = "step") -> None:
        self._left, self._right = left, right
        self._steps, self._unit = steps, unit

    def drawn(self, title: str, lines: Sequence[Line], top: int, bottom: int, *, has_steps: bool) -> list[str]:
        """Grid, numbers and lines between two heights."""
        low, high = _range([y for line in lines for _, y in line.points])
        marks = round_marks(low, high)
        low, high = min(low, marks[0]), max(high, marks[-1])

        def place(x: float, y: float) -> tuple[float, float]:
            first, last = self._steps
            across = self._left + (x - first) / (last - first) * (self._right - self._left)
            return round(across, 1), round(bottom - (y - low) / (high - low) * (bottom - top), 1)

        parts = [_text(self._left, top - 10, title, "title")]
        for mark in marks:
            y = place(self._steps[0], mark)[1]
            parts.append(f'<path class="grid" stroke="{_GRID}" d="M{self._left} {y}H{self._right}"/>')
            parts.append(_text(self._left - 8, y + 4, _number(mark), "faint", "end"))
        if has_steps:
            first, last = self._steps
            whole = [mark for mark in round_marks(first, last, most=8) if first <= mark <= last and mark == round(mark)]
            parts += [_text(place(mark, low)[0], bottom + 20, _number(mark), "faint", "middle") for mark in whole]
            parts.append(_text((self._left + self._right) / 2, bottom + 40, self._unit, "faint", "middle"))
        for line in lines:
            parts += _drawn_line(line, [place(x, y) for x, y in line.points], self._unit)
        return parts


def _drawn_line(line: Line, places: Points, unit: str) -> list[str]:
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
    parts = [] if line.is_dots else [_stroke(path, line.colour, line.is_train)]
    if line.is_dots or len(places) == 1 or (not line.is_train and len(places) <= MOST_DOTS):
        for (x, y), (step, value) in zip(places, line.points, strict=True):
            words = f"{_short(line.name)} {value:.4g} at {unit} {step:,.0f}"
            at = line.colour % COLOURS
            dot = f'<circle class="d{at}" cx="{x:g}" cy="{y:g}" r="3" fill="{_LIGHT[at]}">'
            parts.append(f"{dot}<title>{_safe(words)}</title></circle>")
    return parts


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


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest; a little apart where they are the same."""
    low, high = min(values), max(values)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    apart = abs(low) / 10 or 1.0
    return low - apart, high + apart


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


# --- searches ------------------------------------------------------------------------------------------


def search_history(scores: Sequence[tuple[int, float]], best: Points, name: str, path: Path) -> None:
    """Draw the score of each trial as a dot, and the best so far as a line, into an SVG file."""
    lines = [
        Line(name="a trial", points=[(float(at), score) for at, score in scores], colour=1, is_dots=True),
        Line(name="best so far", points=best, colour=0),
    ]
    plot = _Plot(64, 728, _range([0.0, *(float(at) for at, _ in scores)]), "trial")
    drawn = plot.drawn(f"{name}: dots are trials, the line is the best so far", lines, 40, 300, has_steps=True)
    _write(path, 760, 348, drawn, "Search history")


def importance_bars(shares: Mapping[str, float], path: Path) -> None:
    """Draw how much of the differences in score each value explains, into an SVG file; the largest first."""
    parts, most = [_text(16, 24, "Importance of each value for the score", "title")], max(shares.values()) or 1.0
    for row, (name, share) in enumerate(sorted(shares.items(), key=lambda item: -item[1])):
        y, length = 44 + 28 * row, 440 * share / most
        parts.append(_text(190, y + 14, _short(name), anchor="end"))
        parts.append(f'<rect x="200" y="{y}" width="{length:.1f}" height="18" rx="2" class="cell" fill="{_CELL}"/>')
        parts.append(_text(208 + length, y + 14, f"{100 * share:.0f} %", "faint"))
    _write(path, 760, 56 + 28 * len(shares), parts, "Importance")


# --- confusion -----------------------------------------------------------------------------------------


def confusion_picture(table: Any, classes: Sequence[str], path: Path) -> None:
    """Draw how rows of each class (down) were predicted (across) into an SVG file, shaded by share of the class."""
    counts = np.asarray(table)
    side = len(classes)
    if counts.shape != (side, side) or not side:
        raise DataError(f"the table has shape {counts.shape}, and there are {side} classes; give a square of them")
    names = [_short(name) for name in classes]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = max(16, min(72, 560 // side))
    longest = 7 * max(map(len, names))
    is_turned = longest > cell - 6
    left, top = longest + 44, 56 + (round(0.72 * longest) if is_turned else 14)
    parts = [
        _text(16, 24, "True class (down) and predicted class (across)", "title"),
        _text(16, 42, "shade: share of the true class", "faint"),
    ]
    for row, name in enumerate(names):
        middle = top + row * cell + cell / 2
        parts.append(_text(left - 8, middle + 4, name, anchor="end"))
        x = left + row * cell + cell / 2
        turn = f' transform="rotate(-45 {x:g} {top - 8})"' if is_turned else ""
        parts.append(_text(x, top - 8, name, anchor="start" if is_turned else "middle", more=turn))
        for column in range(side):
            parts += _cell(left + column * cell, top + row * cell, cell, counts[row, column], shares[row, column])
    beyond = round(0.72 * longest) if is_turned else 0
    width = max(left + side * cell + max(20, beyond), 400)
    _write(path, width, top + side * cell + 20, parts, "Confusion of classes")


def _cell(x: int, y: int, size: int, count: Any, share: float) -> list[str]:
    square = f'x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" rx="2"'
    parts = [
        f'<rect {square} fill="none" stroke="{_GRID}" class="grid"/>',
        f'<rect {square} class="cell" fill="{_CELL}" opacity="{share:.3f}"/>',
    ]
    if size >= 36 and count:
        style = "on" if share > 0.8 else ""
        middle = x + size / 2 - 1
        parts.append(_text(middle, y + size / 2 - 3, f"{int(count):,}", style, "middle"))
        parts.append(_text(middle, y + size / 2 + 12, f"{100 * share:.0f} %", f"small {style}".strip(), "middle"))
    return parts


# --- SVG -----------------------------------------------------------------------------------------------


def _stroke(path: str, colour: int, is_train: bool) -> str:
    at, style = colour % COLOURS, "line train" if is_train else "line"
    shape = 'stroke-width="1.5" stroke-dasharray="5 4"' if is_train else 'stroke-width="2"'
    ends = 'stroke-linejoin="round" stroke-linecap="round"'
    return f'<path class="{style} c{at}" fill="none" stroke="{_LIGHT[at]}" {shape} {ends} d="{path}"/>'


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start", more: str = "") -> str:
    said = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{said}{more}>{_safe(words)}</text>'


def _short(words: str) -> str:
    return words if len(words) <= LONGEST_NAME else f"{words[: LONGEST_NAME - 2]} …"


def _safe(words: str) -> str:
    """As XML may hold it: other characters than printable ones would make the file unreadable."""
    return escape(clean(words))


def _write(path: Path, width: float, height: float, parts: Sequence[str], title: str) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    body = "\n".join(parts)
    paper = f'<rect class="paper" fill="{_PAPER}" width="100%" height="100%"/>'
    write_text(Path(path), f"{head}\n<title>{title}</title>\n<style>{_STYLE}</style>\n{paper}\n{body}\n</svg>\n")
