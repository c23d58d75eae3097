"""Memory over one update as a picture: an SVG file of one line, its parts shaded by what was being done."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from hotlap.core.errors import DataError
from hotlap.core.units import show_bytes
from hotlap.recipes.pictures import round_marks
from hotlap.store.files import write_text

MOST_POINTS = 1500
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 330, 76, 58, 280
_COLOURS = {"batch": "#8a8f98", "activations": "#2f6fde", "backward": "#c2570c", "update": "#1d8a4a"}
_WORDS = {"batch": "batch", "activations": "forward", "backward": "backward", "update": "update"}


def draw_course(course: Sequence[tuple[str, int]], path: Path, title: str) -> None:
    """Draw the bytes that lived after each operation of an update. Raises DataError where there is none."""
    if len(course) < 2:
        raise DataError("no operation of an update was seen, so there is nothing to draw")
    every = max(1, len(course) // MOST_POINTS)
    # Of each part the largest: the peak must not fall between two points.
    points = [max(course[at : at + every], key=lambda one: one[1]) for at in range(0, len(course), every)]
    marks = round_marks(0.0, max(size for _, size in points) / 2**20 or 1.0)
    top = marks[-1] * 2**20

    def x(at: float) -> float:
        return LEFT + at / max(1, len(points) - 1) * (WIDTH - LEFT - 24)

    def y(size: float) -> float:
        return BOTTOM - size / top * (BOTTOM - TOP)

    parts = [f'<text x="{LEFT}" y="22" font-weight="600">{escape(title)}</text>']
    for mark in marks:
        height = y(mark * 2**20)
        parts.append(f'<path stroke="#8883" d="M{LEFT} {height:.1f}H{WIDTH - 24}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{escape(f"{mark:g} MiB")}</text>')
    for kind, run in groupby(enumerate(points), key=lambda one: one[1][0]):
        places = [(x(at), y(size)) for at, (_, size) in run]
        line = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        colour = _COLOURS.get(kind, _COLOURS["batch"])
        area = f"M{places[0][0]:.1f} {BOTTOM}L{line}L{places[-1][0] + 1:.1f} {BOTTOM}Z"
        parts.append(f'<path fill="{colour}" fill-opacity=".25" stroke="none" d="{area}"/>')
        parts.append(f'<path fill="none" stroke="{colour}" stroke-width="1.5" d="M{line}"/>')
    at, (_, most) = max(enumerate(points), key=lambda one: one[1][1])
    parts.append(f'<circle cx="{x(at):.1f}" cy="{y(most):.1f}" r="3.5" fill="#d11"/>')
    side = "end" if at > len(points) / 2 else "start"
    parts.append(f'<text x="{x(at):.1f}" y="{y(most) - 8:.1f}" text-anchor="{side}">peak {show_bytes(most)}</text>')
    for number, (kind, words) in enumerate(_WORDS.items()):
        left = LEFT + 110 * number
        parts.append(f'<rect x="{left}" y="{HEIGHT - 22}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{left + 18}" y="{HEIGHT - 12}">{words}</text>')
    body = "\n".join(parts)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"'
    write_text(
        path,
        f'{head} font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n',
    )
