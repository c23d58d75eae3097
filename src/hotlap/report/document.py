"""A report as a value: what HTML, Markdown and JSON are made of. All text in it is data and never markup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotlap.core.units import show_bytes, show_seconds
from hotlap.plots.svg import Picture


@dataclass(frozen=True)
class Figure:
    """A number in a table, with the words that show it: tables sort by the number."""

    value: float | None
    words: str


Cell = str | Figure


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a head; `title` is its name for those who hear it."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    marked: tuple[int, ...] = ()
    """Rows that stand out, such as the best."""
    is_folded: bool = False
    """Whether a page shows it on request only."""

    @property
    def is_wide(self) -> bool:
        """Whether it needs the whole width of a page."""
        widths = [
            max([len(name), *(len(cell if isinstance(cell, str) else cell.words) for cell in column)])
            for name, column in zip(self.head, self._columns, strict=True)
        ]
        return sum(widths) + 2 * len(widths) > 76

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column whether it has numbers."""
        return tuple(bool(column) and all(isinstance(cell, Figure) for cell in column) for column in self._columns)

    @property
    def _columns(self) -> list[list[Cell]]:
        return [[row[at] for row in self.rows if at < len(row)] for at in range(len(self.head))]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture with its figures in a table."""

    title: str
    picture: Picture
    table: Table
    note: str = ""
    is_wide: bool = False
    is_open: bool = False
    """Whether a page shows the table without being asked."""


@dataclass(frozen=True)
class Code:
    """Text as it is, such as a command."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    words: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """A line of a checklist."""

    when: str
    """`before`, `during` or `after`."""
    what: str
    outcome: str
    """`ok`, `look` or `unknown`."""
    found: str


@dataclass(frozen=True)
class Checklist:
    """What was checked, and what was found."""

    checks: Sequence[Check]


Block = Text | Table | Chart | Code | Checklist


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a report."""

    key: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A figure at the top of a report."""

    name: str
    words: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of one run."""

    name: str
    kind: str
    headline: str
    lead: Sequence[str]
    """Lines below the headline."""
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    began: str = ""
    is_live: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "began": self.began,
            "is_live": self.is_live,
            "headline": self.headline,
            "lead": list(self.lead),
            "figures": [vars(tile) for tile in self.tiles],
            "sections": [
                {"key": part.key, "title": part.title, "blocks": [_plain(block) for block in part.blocks]}
                for part in self.sections
            ],
        }


def _plain(block: Block) -> dict[str, Any]:
    match block:
        case Text():
            return {"text": block.words}
        case Code():
            return {"code": block.text}
        case Table():
            return {"table": _rows(block)}
        case Chart():
            note = {"note": block.note} if block.note else {}
            return {"chart": block.title, **note, "table": _rows(block.table)}
        case Checklist():
            return {"checks": [vars(check) for check in block.checks]}


def _rows(table: Table) -> dict[str, Any]:
    rows = [[cell.value if isinstance(cell, Figure) else cell for cell in row] for row in table.rows]
    return {"title": table.title, "head": list(table.head), "rows": rows}


# --- figures -------------------------------------------------------------------------------------------


def seconds(value: float | None) -> Figure:
    """A time."""
    return Figure(value, "–" if value is None else show_seconds(value))


def size(value: float | None) -> Figure:
    """A number of bytes."""
    return Figure(value, "–" if value is None else show_bytes(value))


def share(value: float | None) -> Figure:
    """A part of a whole, in per cent."""
    return Figure(value, "–" if value is None else f"{100 * value:.3g} %")


def count(value: float | None) -> Figure:
    """A whole number."""
    return Figure(value, "–" if value is None else f"{value:,.0f}")


def score(value: float | None) -> Figure:
    """A score, in four digits."""
    return Figure(value, "–" if value is None else f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.4g}")
