"""The parts of every picture: colours, strokes, marks, words, and the frame around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hotlap.core.terminal import clean
from hotlap.store.files import write_text

COLOURS = 6
LONGEST_NAME = 24
HALF = 440
"""The width of a picture that fills half of a page, or a phone: words in it stay large enough on both."""
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#4d4d4d")
DARK = ("#56b4e9", "#f0822d", "#2fc79a", "#e39cc5", "#f0c030", "#d0d7de")
"""The colours of lines on white and on black, after Okabe and Ito: they differ for people who see colours otherwise.
Viewers that know no CSS show the first."""
GRID, CELL, PAPER, INK, FAINT = "#d8dee4", "#0072b2", "#ffffff", "#1f2328", "#59636e"
DARK_STYLE = " ".join(f".c{at} {{ stroke: {colour}; }} .d{at} {{ fill: {colour}; }}" for at, colour in enumerate(DARK))
STYLE = """
text { font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #1f2328; }
.faint { fill: #59636e; } .title { font-weight: 600; font-size: 13px; } .on { fill: #ffffff; }
.small { font-size: 11px; }
"""
NIGHT_STYLE = f"""
  text {{ fill: #e6edf3; }} .faint {{ fill: #9198a1; }} .grid {{ stroke: #30363d; }} .paper {{ fill: #0d1117; }}
  .cell {{ fill: #2f81f7; }} .on {{ fill: #ffffff; }} .ink {{ stroke: #e6edf3; }}
  {DARK_STYLE}
"""
"""What the dark changes; a page has both parts once for all its pictures."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing; what comes from files in it is escaped already."""

    title: str
    width: float
    height: float
    parts: Sequence[str]

    def write(self, path: Path) -> None:
        """Write it as a file of its own, on a ground that is white or black."""
        style = f"{STYLE}@media (prefers-color-scheme: dark) {{{NIGHT_STYLE}}}\n"
        ground = f'<rect class="paper" fill="{PAPER}" width="100%" height="100%"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self._box}>'
        body = "\n".join(self.parts)
        title = f"<title>{safe(self.title)}</title>"
        write_text(Path(path), f"{head}\n{title}\n<style>{style}</style>\n{ground}\n{body}\n</svg>\n")

    def inline(self) -> str:
        """The picture as a part of a page, which has the styles and names it."""
        return f'<svg {self._box} aria-label="{safe(self.title)}">{"".join(self.parts)}</svg>'

    @property
    def _box(self) -> str:
        return f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" role="img"'


def stroke(path: str, colour: int, is_train: bool = False) -> str:
    """A line; one of training is thin and dashed."""
    at, style = colour % COLOURS, "line train" if is_train else "line"
    shape = 'stroke-width="1.5" stroke-dasharray="5 4"' if is_train else 'stroke-width="2"'
    ends = 'stroke-linejoin="round" stroke-linecap="round"'
    return f'<path class="{style} c{at}" fill="none" stroke="{LIGHT[at]}" {shape} {ends} d="{path}"/>'


def mark(x: float, y: float, shape: int, words: str = "", colour: int | None = None, size: float = 3.5) -> str:
    """A filled mark whose shape tells series apart: disc, square, triangle, diamond, turned triangle, ring."""
    at = (shape if colour is None else colour) % COLOURS
    look = f'class="mark d{at}" fill="{LIGHT[at]}"'
    title = f"<title>{safe(words)}</title>" if words else ""
    kind = shape % COLOURS
    if kind == 0:
        return f'<circle {look} cx="{x:g}" cy="{y:g}" r="{size:g}">{title}</circle>'
    if kind == 5:
        look = f'class="mark c{at}" fill="none" stroke="{LIGHT[at]}" stroke-width="2"'
        return f'<circle {look} cx="{x:g}" cy="{y:g}" r="{size:g}">{title}</circle>'
    r = size + 0.5
    path = {
        1: f"M{x - r:g} {y - r:g}h{2 * r:g}v{2 * r:g}h{-2 * r:g}z",
        2: f"M{x:g} {y - r:g}l{r:g} {1.8 * r:g}h{-2 * r:g}z",
        3: f"M{x:g} {y - 1.3 * r:g}l{1.3 * r:g} {1.3 * r:g}l{-1.3 * r:g} {1.3 * r:g}l{-1.3 * r:g} {-1.3 * r:g}z",
        4: f"M{x:g} {y + r:g}l{r:g} {-1.8 * r:g}h{-2 * r:g}z",
    }[kind]
    return f'<path {look} d="{path}">{title}</path>'


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start", more: str = "") -> str:
    """Words at a place."""
    said = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{said}{more}>{safe(words)}</text>'


def short(words: str, most: int = LONGEST_NAME) -> str:
    """A name that has room in a picture."""
    return words if len(words) <= most else f"{words[: most - 2]} …"


def safe(words: str) -> str:
    """As XML may hold it: other characters than printable ones would make the file unreadable."""
    return escape(clean(words))


def number(value: float) -> str:
    """A number as axes show it."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-4):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def width_of(words: str) -> float:
    """About how wide words of the usual size are."""
    return 6.6 * len(words)
