"""A report as a page of HTML that needs nothing else, as Markdown, or as JSON."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.core.terminal import clean
from hotlap.plots.bars import HATCHES
from hotlap.plots.svg import NIGHT_STYLE, STYLE
from hotlap.report.document import Block, Cell, Chart, Checklist, Code, Figure, Report, Table, Text
from hotlap.store.files import read_bytes, write_bytes

PAGE = "report.html"
MARK = '<meta name="generator" content="hotlap">'
"""In each page that hotlap writes: such a file may be replaced."""
HERE = Path(__file__).parent
SIGNS = {"ok": "✓", "look": "!", "unknown": "?"}
WORDS = {"ok": "right", "look": "look at this", "unknown": "not known"}


def write(report: Report, path: Path) -> Path:
    """Write a report; the ending of the file decides how: .html, .md or .json.

    Raises StoreError for another ending, and for a file that is there, unless it is a page of hotlap's.
    """
    made = {".html": html, ".htm": html, ".md": markdown, ".json": as_json}.get(path.suffix.lower())
    if made is None:
        raise StoreError(f"cannot write a report as {path.name!r}: name a file that ends in .html, .md or .json")
    if (path.exists() or path.is_symlink()) and not _is_page(path):
        raise StoreError(f"{path} exists, and is no report of hotlap's; name another file or remove it")
    write_bytes(path, made(report).encode("utf-8", "backslashreplace"))  # a path may hold any bytes
    return path


def _is_page(path: Path) -> bool:
    try:
        return not path.is_symlink() and MARK.encode() in read_bytes(path, 16 * 2**20)[:1000]
    except StoreError:
        return False


# --- HTML ----------------------------------------------------------------------------------------------


@cache
def _templates() -> Any:
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.filters["kind"] = lambda block: type(block).__name__
    made.filters["words"] = words_of
    made.filters["sortable"] = _sortable
    made.filters["drawn"] = _drawn
    made.globals |= {"sign": SIGNS, "sign_words": WORDS}
    return made


def html(report: Report, *, home: bool = False) -> str:
    """One page with its own style and script, and without anything from elsewhere; `home` links to a list of runs."""
    return page("report.html", report=report, reloads=report.is_live and home, home=home)


def page(template: str, **values: Any) -> str:
    """A page of a template; values are escaped."""
    import markupsafe

    style = (HERE / "page.css").read_text(encoding="utf-8")
    trusted = {
        "style": markupsafe.Markup(style.replace("/* PICTURES */", STYLE).replace("/* NIGHT */", NIGHT_STYLE)),
        "script": markupsafe.Markup(_script()),
        "hatches": markupsafe.Markup(HATCHES),
        "mark": markupsafe.Markup(MARK),
        "policy": page_policy(),
        "reloads": False,
    }
    return str(_templates().get_template(template).render(**{**trusted, **values}))


@cache
def _script() -> str:
    return (HERE / "sort.js").read_text(encoding="utf-8").strip()


def page_policy() -> str:
    """What a browser lets a page do: run its one script, and fetch nothing at all."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    own = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def words_of(cell: Cell) -> str:
    """A cell as people read it."""
    return clean(cell.words if isinstance(cell, Figure) else cell)


def _sortable(cell: Cell) -> str:
    """What a cell sorts by; empty for one without a number."""
    return f"{cell.value!r}" if isinstance(cell, Figure) and cell.value is not None else ""


def _drawn(chart: Chart) -> Any:
    """A picture of hotlap's own making, whose names are escaped already."""
    import markupsafe

    return markupsafe.Markup(chart.picture.inline())


# --- Markdown ------------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """The same for a repository or a chat: pictures as their tables."""
    lines = [f"# {_plain(report.headline)}", ""]
    lines += [f"{_plain(report.kind)} **{_plain(report.name)}**" + (f", {report.began}" if report.began else ""), ""]
    for line in report.lead:
        lines += [_plain(line), ""]
    lines += ["| | | |", "| --- | --- | --- |"]
    lines += [f"| {_cell(tile.name)} | **{_cell(tile.words)}** | {_cell(tile.note)} |" for tile in report.tiles]
    for part in report.sections:
        lines += ["", f"## {_plain(part.title)}"]
        for block in part.blocks:
            lines += ["", *_lines(block)]
    return "\n".join(lines) + "\n"


def _lines(block: Block) -> list[str]:
    match block:
        case Text():
            return [_plain(block.words)]
        case Code():
            fence = "`" * max(3, 1 + _longest_ticks(block.text))
            return [fence, *map(clean, block.text.split("\n")), fence]
        case Table():
            return _table(block)
        case Chart():
            note = [f"{_plain(block.note)}.", ""] if block.note else []
            return [f"### {_plain(block.title)}", "", *note, *_table(block.table)]
        case Checklist():
            rows = [
                f"| {check.when} | {SIGNS[check.outcome]} {WORDS[check.outcome]} | {_cell(check.what)} | "
                f"{_cell(check.found)} |"
                for check in block.checks
            ]
            return ["| when | | what | found |", "| --- | --- | --- | --- |", *rows]


def _table(table: Table) -> list[str]:
    head = "| " + " | ".join(_cell(name) for name in table.head) + " |"
    line = "| " + " | ".join("---" for _ in table.head) + " |"
    return [head, line, *("| " + " | ".join(_cell(words_of(cell)) for cell in row) + " |" for row in table.rows)]


_SPECIAL = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]#~|!"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"})


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return clean(text).translate(_SPECIAL)


def _cell(text: str) -> str:
    return _plain(text) or " "


def _longest_ticks(text: str) -> int:
    longest = now = 0
    for sign in text:
        now = now + 1 if sign == "`" else 0
        longest = max(longest, now)
    return longest


# --- JSON ----------------------------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """The same for programs."""
    return json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n"
