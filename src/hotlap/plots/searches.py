"""Pictures of searches: the score of each trial, and how much each value matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hotlap.plots.axes import Line, Plot, Points, value_range
from hotlap.plots.svg import CELL, Picture, short, text


def search_history(scores: Sequence[tuple[int, float]], best: Points, name: str, path: Path) -> None:
    """Draw the score of each trial as a mark, and the best so far as a line, into an SVG file."""
    lines = [
        Line(name="a trial", points=[(float(at), score) for at, score in scores], colour=1, is_dots=True),
        Line(name="best so far", points=best, colour=0),
    ]
    plot = Plot(64, 728, value_range([0.0, *(float(at) for at, _ in scores)]), "trial")
    drawn = plot.drawn(f"{name}: squares are trials, the line is the best so far", lines, 40, 300, has_steps=True)
    Picture(title="Search history", width=760, height=348, parts=drawn).write(path)


def importance_bars(shares: Mapping[str, float], path: Path) -> None:
    """Draw how much of the differences in score each value explains, into an SVG file; the largest first."""
    parts, most = [text(16, 24, "Importance of each value for the score", "title")], max(shares.values()) or 1.0
    for row, (name, share) in enumerate(sorted(shares.items(), key=lambda item: -item[1])):
        y, length = 44 + 28 * row, 440 * share / most
        parts.append(text(190, y + 14, short(name), anchor="end"))
        parts.append(f'<rect x="200" y="{y}" width="{length:.1f}" height="18" rx="2" class="cell" fill="{CELL}"/>')
        parts.append(text(208 + length, y + 14, f"{100 * share:.0f} %", "faint"))
    Picture(title="Importance", width=760, height=56 + 28 * len(shares), parts=parts).write(path)
