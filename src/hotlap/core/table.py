"""The table at the end of a run: what hotlap tried, what it gave, and what became of it, from the ledger alone."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.terminal import clean
from hotlap.core.units import show_seconds

SIGNS = {"kept": "+", "rejected": "-", "undecided": "-", "not tried": "-"}
"""Outcomes of a move, in the order in which the table has them."""
ALARMS = ("canary", "trial", "data changed")
"""How faults begin that the tuning met; others are no matter of this table."""
LONGEST_TEXT = 300
LONGEST_NAME = 30
HEADER = ("step", "speed-up", "95 % interval", "noise")
"""Above the figures."""
NO_TERMINAL = 120
"""Columns if the terminal does not say how many it has."""
LEAST_WHY = 26
"""With less room than this beside the figures, reasons go beneath them."""
GAP = "  "


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; a number that was not measured, or is none, is None."""

    sign: str
    """`+` kept, `-` not kept, `!` a fault, nothing for the baseline and the total."""
    what: str
    step_s: float | None = None
    ratio: float | None = None
    """How many times as fast."""
    low: float | None = None
    high: float | None = None
    """The interval of the ratio."""
    noise: float | None = None
    """The spread of laps, as a part of their length."""
    outcome: str
    why: str = ""
    unfit: bool = False
    """Whether it was not tried since there is nothing that it could do here."""
    known: bool = False
    """Whether an earlier run says so."""
    needs_s: float | None = None
    """Seconds that trying it would have cost, where no more than that kept it from being tried."""
    saved_s: float | None = None
    """Seconds that it saved by itself, where that was measured apart from steps."""
    cost_s: float = 0.0
    """Seconds spent on it beyond the training, over all entries of its name; of the total, on all the tuning."""


def rows(ledger: Ledger) -> list[Row]:
    """The baseline, moves kept, rejected and not tried, faults of the tuning, and the total, as far as there are any.

    The last entry of a move counts. All text is in one line of printable characters: a ledger may be a stranger's.
    """
    moves: dict[str, Row] = {}
    for entry in ledger:
        if entry.outcome in SIGNS:
            moves[entry.what] = _move(entry, moves.get(entry.what))
    faults = [entry for entry in ledger if entry.outcome == "fault" and entry.what.startswith(ALARMS)]
    baseline, tuned = _chosen(ledger, "baseline"), _chosen(ledger, "tuned")
    return [
        *([_row(baseline, sign="")] if baseline else []),
        *(row for outcome in SIGNS for row in moves.values() if row.outcome == outcome),
        *(_row(entry, sign="!") for entry in faults),
        *([_total(tuned)] if tuned else []),
    ]


def table(ledger: Ledger, width: int | None = None) -> list[str]:
    """The rows as lines of text for people, and a last one where nothing helped; none where nothing was tuned.

    They fit `width` columns, or the terminal's. Figures are never cut: in less than 80 columns lines may be longer.
    """
    found = rows(ledger)
    width = max(LEAST_WHY, width or shutil.get_terminal_size((NO_TERMINAL, 24)).columns)
    layout = _Layout(found, width)
    lines = [*layout.header(), *(line for row in found if not row.unfit for line in layout.lines(row))]
    unfit = ", ".join(row.what for row in found if row.unfit)
    last = [*([f"does not apply here: {unfit}"] if unfit else []), _verdict(found)]
    return [*lines, *(part.rstrip() for line in last for part in textwrap.wrap(line, width))] if lines else []


def as_json(ledger: Ledger) -> dict[str, Any]:
    """The same for machines: `baseline` and `total` or null, lists of `moves` and `faults`, and `nothing_helped`."""
    found = rows(ledger)
    tuned = _chosen(ledger, "tuned")
    named = {row.what: asdict(row) for row in found if not row.sign}
    return {
        "baseline": named.get("baseline"),
        "moves": [asdict(row) for row in found if row.sign in SIGNS.values()],
        "faults": [asdict(row) for row in found if row.sign == "!"],
        "total": {**named["total"], **{name: _number(tuned, name) for name in ("saved_s", "own_s")}} if tuned else None,
        "nothing_helped": tuned is not None and not any(row.outcome == "kept" for row in found),
    }


# --- rows ----------------------------------------------------------------------------------------------


def _chosen(ledger: Ledger, kind: str) -> Entry | None:
    """The last entry of this kind."""
    return next((entry for entry in reversed(list(ledger)) if entry.kind == kind), None)


def _row(entry: Entry, *, sign: str) -> Row:
    step_s, ratio, low, high, noise = (_amount(entry, name) for name in ("step_s", "ratio", "low", "high", "noise"))
    return Row(
        sign=sign,
        what=_plain(entry.what),
        step_s=step_s,
        ratio=ratio,
        low=low,
        high=high,
        noise=noise,
        outcome=entry.outcome,
        why=_plain(entry.why),
        cost_s=float(entry.cost_s),
    )


def _move(entry: Entry, earlier: Row | None) -> Row:
    """The row of a move, after an earlier one of its name."""
    row = _row(entry, sign=SIGNS[entry.outcome])
    cosine = _number(entry, "cosine")
    if cosine is not None and entry.outcome == "kept" and "gradient" not in row.why:
        row = replace(row, why="; ".join(filter(None, (row.why, f"gradients agree to {_cosine(cosine)}"))))
    without_s = _amount(entry, "without_s")
    if without_s is not None:
        row = replace(row, why="; ".join(filter(None, (row.why, f"{_seconds(without_s)}/step without it"))))
    elif (_number(entry, "together") or 1) > 1:
        row = replace(row, why="; ".join(filter(None, (row.why, "measured together with others"))))
    share, low, high = (_amount(entry, f"share_{name}") for name in ("ratio", "low", "high"))
    if share is not None and low is not None and high is not None:
        alone = f"beside the others {_ratio(share)} {_interval(share, low, high)}, which shows no gain"
        row = replace(row, why="; ".join(filter(None, (row.why, alone))))
    if entry.known:
        row = replace(row, known=True, why="; ".join(filter(None, (row.why, "known from an earlier run"))))
    row = replace(row, unfit=entry.unfit, needs_s=_amount(entry, "needs_s"), saved_s=_number(entry, "saved_s"))
    if earlier is None:
        return row
    # Whatever was spent on it is spent; and a kept move that is measured again is kept for the same reason.
    same = not row.why and earlier.outcome == row.outcome
    spent_s = earlier.cost_s + row.cost_s
    # Two finite numbers of a stranger may add up to one that JSON does not have.
    cost_s = spent_s if math.isfinite(spent_s) else row.cost_s
    return replace(row, cost_s=cost_s, why=earlier.why if same else row.why)


def _total(tuned: Entry) -> Row:
    row = _row(tuned, sign="")
    cost_s, saved_s = _number(tuned, "cost_s"), _number(tuned, "saved_s")
    parts = [row.why] if row.why else []
    if cost_s is not None:
        parts.append(f"tuning cost {_seconds(cost_s)}")
        if saved_s:  # of which that is taken off already
            parts.append(f"net {'saving' if saved_s > 0 else 'loss'} {_seconds(abs(saved_s))}")
    return replace(row, what="total", why="; ".join(parts), cost_s=row.cost_s if cost_s is None else cost_s)


def _number(entry: Entry | None, name: str) -> float | None:
    """A figure, where it is a number."""
    value = entry.figures.get(name, math.nan) if entry else math.nan
    return value if math.isfinite(value) else None


def _amount(entry: Entry, name: str) -> float | None:
    """A figure that cannot be negative."""
    value = _number(entry, name)
    return value if value is not None and value >= 0 else None


def _plain(text: str) -> str:
    """One line, not too long, that a terminal shows and does not obey."""
    # Cut before it is looked at: a stranger's text may have any length.
    words = " ".join(text[: 4 * LONGEST_TEXT].split())
    words = clean(words)
    return words if len(words) <= LONGEST_TEXT else f"{words[: LONGEST_TEXT - 2]} …"


# --- figures -------------------------------------------------------------------------------------------


def _figures(row: Row) -> list[str]:
    """Step, ratio, interval and noise as people read them."""
    step = f"{_seconds(row.step_s)}/step" if row.step_s is not None else "–"
    ratio, interval = "", ""
    if row.ratio is not None:
        ratio = _ratio(row.ratio)
        if row.low is not None and row.high is not None:
            interval = _interval(row.ratio, row.low, row.high)
    noise = f"±{_fixed(100 * row.noise, 1)} %" if row.noise is not None else ""
    return [step, ratio, interval, noise]


def _ratio(ratio: float) -> str:
    return f"{_fixed(ratio, _digits(ratio))}x"


def _interval(ratio: float, low: float, high: float) -> str:
    digits = _digits(ratio)
    ends = _fixed(low, digits), _fixed(high, digits)
    if ends[0] == ends[1] and low != high:  # an interval narrower than the digits of its ratio
        ends = _fixed(low, digits + 1), _fixed(high, digits + 1)
    return f"[{ends[0]}, {ends[1]}]"


def _digits(ratio: float) -> int:
    """Digits after the point: 1.07, 3.2, 12."""
    if ratio < 1.995:
        return 2
    return 1 if ratio < 9.95 else 0


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.1e}"


def _seconds(s: float) -> str:
    return show_seconds(s) if abs(s) < 1e9 else f"{s:.1e} s"


def _cosine(value: float) -> str:
    """With as many digits as it takes to tell it from 1."""
    for digits in (4, 6, 8):
        told = f"{value:.{digits}f}"
        if float(told) != 1:
            return told
    return "1"


# --- lines ---------------------------------------------------------------------------------------------


class _Layout:
    """How wide each column has to be, and whether reasons fit beside the figures or go beneath them."""

    def __init__(self, found: Sequence[Row], width: int) -> None:
        self._width = width
        aligned = [row for row in found if row.sign != "!" and not row.unfit]
        cells = [_figures(row) for row in aligned]
        self._name = min(LONGEST_NAME, max((len(_name(row)) for row in aligned), default=0))
        self._has_figures = any(row.step_s is not None or row.ratio is not None for row in aligned)
        headed = [HEADER, *cells] if self._has_figures else cells
        # A column that is empty in all rows is left out, its header too.
        self._figures = [
            max(map(len, column)) if any(column[-len(cells) :]) else 0 for column in zip(*headed, strict=True)
        ]
        self._outcome = max((len(row.outcome) for row in aligned if row.sign), default=0)
        taken = [self._name, *(w for w in (*self._figures, self._outcome) if w)]
        self._room = width - sum(taken) - len(GAP) * len(taken)
        self._wide = self._room >= min(LEAST_WHY, max((len(row.why) for row in aligned), default=0))

    def header(self) -> list[str]:
        """The names of the figures, if there are any."""
        if not self._has_figures:
            return []
        heads = [head if width else "" for head, width in zip(HEADER, self._figures, strict=True)]
        return [f"{'':<{self._name}}{GAP}{self._aligned(heads)}".rstrip()]

    def lines(self, row: Row) -> list[str]:
        """A row, in as many lines as it needs."""
        told = ": ".join(words for words in (row.outcome if row.sign else "", row.why) if words)
        if row.sign == "!":
            words = ": ".join(words for words in (_name(row), row.why) if words)
            return [part.rstrip() for part in textwrap.wrap(words, self._width, subsequent_indent="  ")]
        first, *rest = textwrap.wrap(_name(row), self._name, subsequent_indent="  ") or [""]
        head = f"{first:<{self._name}}{GAP}"
        figures = self._aligned(_figures(row))
        if self._wide:
            outcome = f"{row.outcome if row.sign else '':<{self._outcome}}{GAP}" if self._outcome else ""
            return _side_by_side(f"{head}{figures}{GAP}{outcome}", rest, textwrap.wrap(row.why, max(1, self._room)))
        if row.step_s is None and row.ratio is None:
            # The place of the figures is free.
            return _side_by_side(head, rest, textwrap.wrap(told, max(LEAST_WHY, self._width - len(head))))
        line, indent = f"{head}{figures}", " " * 4
        if len(line) + len(GAP) + len(told) <= self._width:
            return _side_by_side(f"{line}{GAP}", rest, [told])
        beneath = textwrap.wrap(told, self._width, initial_indent=indent, subsequent_indent=indent)
        return [part.rstrip() for part in (line, *rest, *beneath)]  # where a word is too long, textwrap leaves a space

    def _aligned(self, cells: Sequence[str]) -> str:
        """Figures below those of other rows; a column that is empty in all of them is left out."""
        step, ratio, interval, noise = self._figures
        padded = (cells[0].rjust(step), cells[1].rjust(ratio), cells[2].ljust(interval), cells[3].rjust(noise))
        return GAP.join(cell for cell in padded if cell)


def _name(row: Row) -> str:
    return f"{row.sign} {row.what}" if row.sign else row.what


def _side_by_side(head: str, left: Sequence[str], right: Sequence[str]) -> list[str]:
    """A first line, and below it what is left of the name and of the reason."""
    pairs = zip_longest(left, right[1:], fillvalue="")
    lines = [head + (right[0] if right else ""), *(f"{name:<{len(head)}}{why}" for name, why in pairs)]
    return [line.rstrip() for line in lines]


def _verdict(found: Sequence[Row]) -> str:
    """In words that nothing helped, or that it is not known; nothing where a move was kept."""
    outcomes = [row.outcome for row in found]
    if "kept" in outcomes:
        return ""
    # A move is one however often it was tried; those of a bundle are named in one row.
    judged = [row.what for row in found if row.outcome in ("rejected", "undecided") and not row.known]
    tried = len({name for what in judged for name in what.split(", ")})
    if not tried:
        # Under a fixed plan moves may be listed as not tried, but nobody meant to.
        return "nothing was tried" if "chosen" in outcomes else ""
    moves = f"{tried} move{'s' if tried > 1 else ''} tried"
    if any(row.what == "total" and not row.sign for row in found):
        return f"nothing helped: {moves}, none kept"
    return f"nothing kept so far: {moves}, and the tuning did not come to its end"
