"""Pictures of trainings: learning curves, and how classes were confused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.core.errors import DataError
from hotlap.plots.axes import Line, Plot, Points, legend, thinned, value_range
from hotlap.plots.svg import CELL, COLOURS, GRID, HALF, Picture, short, text, width_of

Record = Mapping[str, Any]

NO_METRICS = ("step", "epoch", "train_loss", "valid_loss", "lr", "elapsed_s", "samples")
"""What a record holds beside metrics."""
USUAL = "macro_f1"
"""The metric that is drawn where a history has it; else the first."""
WIDTH, LEFT, RIGHT = 760, 64, 32
MOST = 1e300
"""Numbers from here on are not drawn: differences of them may overflow."""

# --- learning curves -----------------------------------------------------------------------------------


def curves(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draw the losses of trainings over their steps, and one metric beneath, into an SVG file.

    `runs` are the histories of models by name. Each has a colour; training is dashed, validation is not. Numbers that
    are not finite are left out. Raises DataError where there is nothing to draw.
    """
    metric = usual_metric(runs)
    losses, below = loss_lines(runs), metric_lines(runs, metric)
    if not losses:
        raise DataError("there is no loss in the history; curves are drawn of a training that has been evaluated")
    parts, legend_end = legend(_entries(losses, runs), LEFT, WIDTH - RIGHT, 20)
    plot = Plot(LEFT, WIDTH - RIGHT, _steps([*losses, *below]))
    end = legend_end + 44
    parts += plot.drawn("loss", losses, end, end + 230, has_steps=not below)
    end += 230
    if below and metric:
        parts += plot.drawn(f"{metric} on validation", below, end + 40, end + 210, has_steps=True)
        end += 210
    Picture(title="Learning curves", width=WIDTH, height=end + 48, parts=parts).write(path)


def lines_picture(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "step",
    width: int = HALF,
    height: int = 190,
    **more: Any,
) -> Picture:
    """Lines over axes with a legend above, for a page; `more` goes to `Plot.drawn`."""
    entries = [(line.name, line.colour, line.is_train) for line in lines] if len(lines) > 1 else []
    parts, end = legend(entries, 60, width - 20, 14)
    top = end + 16 if entries else 12
    known = [x for line in lines for x, _ in line.points] + [x for x, *_ in more.get("band", ())]
    steps = value_range([0.0, *known] if min(known) < 0.3 * max(known) else known)
    plot = Plot(60, width - 20, steps, unit)
    parts += plot.drawn("", lines, top, top + height, has_steps=True, **more)
    return Picture(title=title, width=width, height=top + height + 48, parts=parts)


def loss_lines(runs: Mapping[str, Sequence[Record]]) -> list[Line]:
    """The losses of each training; training and validation of a single one in two colours."""
    return [
        line
        for number, (name, run) in enumerate(runs.items())
        for line in (
            Line(
                name=f"{name}, training",
                points=points_of(run, "train_loss"),
                colour=1 if len(runs) == 1 else number,
                is_train=True,
            ),
            Line(name=f"{name}, validation", points=points_of(run, "valid_loss"), colour=number),
        )
        if line.points
    ]


def metric_lines(runs: Mapping[str, Sequence[Record]], metric: str | None) -> list[Line]:
    """One metric of each training that has it."""
    found = [
        Line(name=f"{name} {metric}", points=points_of(run, metric), colour=number)
        for number, (name, run) in enumerate(runs.items())
        if metric is not None
    ]
    return [line for line in found if line.points]


def points_of(run: Sequence[Record], name: str, over: str = "step") -> Points:
    """What of `name` can be drawn, in order of steps."""
    found = [
        (float(record[over]), float(record[name]))
        for record in run
        if all(_is_finite(record.get(one)) for one in (over, name))
    ]
    return thinned(found)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -MOST < value < MOST


def usual_metric(runs: Mapping[str, Sequence[Record]]) -> str | None:
    """The metric that is drawn."""
    names = [name for run in runs.values() for record in run for name in record if name not in NO_METRICS]
    return USUAL if USUAL in names else next(iter(names), None)


def _entries(lines: Sequence[Line], runs: Mapping[str, Any]) -> list[tuple[str, int, bool]]:
    """What a legend explains: each line, or each training and the two kinds of lines."""
    if len(runs) == 1:
        return [(line.name, line.colour, line.is_train) for line in lines]
    entries = [(name, number, False) for number, name in enumerate(runs)]
    return [*entries, ("dashed: training", COLOURS - 1, True), ("solid: validation", COLOURS - 1, False)]


def _steps(lines: Sequence[Line]) -> tuple[float, float]:
    return value_range([0.0, *(x for line in lines for x, _ in line.points)])


# --- confusion -----------------------------------------------------------------------------------------


def confusion_picture(table: Any, classes: Sequence[str], path: Path) -> None:
    """Draw how rows of each class (down) were predicted (across) into an SVG file, shaded by share of the class."""
    drawn_confusion(table, classes).write(path)


def drawn_confusion(table: Any, classes: Sequence[str]) -> Picture:
    """How rows of each class (down) were predicted (across), shaded by share of the class."""
    counts = np.asarray(table)
    side = len(classes)
    if counts.shape != (side, side) or not side:
        raise DataError(f"the table has shape {counts.shape}, and there are {side} classes; give a square of them")
    names = [short(name) for name in classes]
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = max(16, min(72, 560 // side))
    longest = round(width_of("x" * max(map(len, names)))) + 4
    is_turned = longest > cell - 6
    left, top = longest + 44, 56 + (round(0.72 * longest) if is_turned else 14)
    parts = [
        text(16, 24, "True class (down) and predicted class (across)", "title"),
        text(16, 42, "shade: share of the true class", "faint"),
    ]
    for row, name in enumerate(names):
        middle = top + row * cell + cell / 2
        parts.append(text(left - 8, middle + 4, name, anchor="end"))
        x = left + row * cell + cell / 2
        turn = f' transform="rotate(-45 {x:g} {top - 8})"' if is_turned else ""
        parts.append(text(x, top - 8, name, anchor="start" if is_turned else "middle", more=turn))
        for column in range(side):
            parts += _cell(left + column * cell, top + row * cell, cell, counts[row, column], shares[row, column])
    beyond = round(0.72 * longest) if is_turned else 0
    width = max(left + side * cell + max(20, beyond), 400)
    return Picture(title="Confusion of classes", width=width, height=top + side * cell + 20, parts=parts)


def _cell(x: int, y: int, size: int, count: Any, share: float) -> list[str]:
    square = f'x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" rx="2"'
    parts = [
        f'<rect {square} fill="none" stroke="{GRID}" class="grid"/>',
        f'<rect {square} class="cell" fill="{CELL}" opacity="{share:.3f}"/>',
    ]
    if size >= 36 and count:
        style = "on" if share > 0.6 else ""
        middle = x + size / 2 - 1
        parts.append(text(middle, y + size / 2 - 3, f"{int(count):,}", style, "middle"))
        parts.append(text(middle, y + size / 2 + 12, f"{100 * share:.0f} %", f"small {style}".strip(), "middle"))
    return parts
