"""The Ledger records every change of plan: when, what, why, the figures, and what it cost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Self

from hotlap.core.errors import HotlapError, PlanError, did_you_mean, shown
from hotlap.core.plan import Plan

OUTCOMES = ("chosen", "kept", "rejected", "undecided", "not tried", "measured", "fault")
KINDS = ("change", "baseline", "move", "lap", "tuned", "fault")
"""What an entry is about: a change of plan, the pace of the user's own plan, what became of a move, a lap, what tuning
came to in all, or something that went wrong."""
_KIND_OF = {"chosen": "change", "measured": "lap", "fault": "fault"}
"""The kind of an entry that does not name one, by its outcome; every other outcome is that of a move."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the ledger."""

    step: int
    """The update before which it took effect, counted from 0."""
    what: str
    """The change in a few words, as a table shows it."""
    outcome: str
    """`chosen` by the user or as the start; `kept`, `rejected`, `undecided` or `not tried` by measurement; `measured`
    for a lap; `fault` answered."""
    plan: Plan
    """The plan in force from this step on."""
    why: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measured numbers, units in their names; the entry keeps a copy."""
    cost_s: float = 0.0
    """Seconds it took beyond the training itself."""
    kind: str = ""
    """One of `KINDS`. Default: what the outcome says."""
    known: bool = False
    """Whether an earlier run has found this out."""
    unfit: bool = False
    """Whether a move was not tried because it does not apply here."""

    def __post_init__(self) -> None:
        if self.kind == "":
            # An earlier hotlap wrote no kinds, and recognised these two by name.
            named = self.outcome == "chosen" and self.what in ("baseline", "tuned")
            object.__setattr__(self, "kind", self.what if named else _KIND_OF.get(str(self.outcome), "move"))
        wrong = _wrong_with(self)
        if wrong:
            raise ValueError("; ".join(wrong))
        object.__setattr__(self, "figures", {name: float(value) for name, value in self.figures.items()})

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON holds it."""
        # JSON has no NaN: a figure that is not finite is stored as null.
        figures = {name: value if math.isfinite(value) else None for name, value in self.figures.items()}
        return {**vars(self), "plan": self.plan.to_dict(), "figures": figures, "cost_s": float(self.cost_s)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], plans: dict[str, Plan] | None = None) -> Self:
        """An entry from JSON; a figure of null is read as NaN. Raises ValueError where it is none.

        `plans` are those that other entries have, by their text, to which this one's is added: most entries of a ledger
        have the same, and a plan takes ten times as long to check as all the rest.
        """
        if not isinstance(raw, Mapping):
            raise ValueError(f"an entry must be an object, not {shown(raw)}")
        if not _NEEDED <= raw.keys() <= _FIELDS:
            wrong = [f"no field is called {shown(n)}{did_you_mean(n, _FIELDS)}" for n in raw if n not in _FIELDS]
            wrong += [f"{name} is missing" for name in ("step", "what", "outcome", "plan") if name not in raw]
            raise ValueError("; ".join(wrong))
        plans, text = {} if plans is None else plans, repr(raw["plan"])  # not the value itself, in which 1 is True
        if text not in plans:
            plans[text] = Plan.from_dict(raw["plan"])
        read = {**raw, "plan": plans[text]}
        if "kind" not in raw:
            _read_flags(read)
        if isinstance(read.get("figures"), Mapping):
            read["figures"] = {name: math.nan if n is None else n for name, n in read["figures"].items()}
        return cls(**read)


def _read_flags(read: dict[str, Any]) -> None:
    """Complete an entry of an earlier hotlap, which kept flags among the figures."""
    figures = read.get("figures")
    if isinstance(figures, Mapping):
        read |= {flag: True for flag in ("known", "unfit") if figures.get(flag)}
        read["figures"] = {name: number for name, number in figures.items() if name not in ("known", "unfit")}


_FIELDS = {f.name for f in fields(Entry)}
_NEEDED = {"step", "what", "outcome", "plan"}


class Ledger:
    """All changes of plan of one run, oldest first."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._lines: list[str] = []
        """The lines of the first entries: a checkpoint asks for all of them each time, and only the last are new."""

    def record(self, entry: Entry) -> None:
        """Add an entry; steps never run backwards."""
        if self._entries and entry.step < self._entries[-1].step:
            raise ValueError(f"step {entry.step} comes before step {self._entries[-1].step}, recorded last")
        self._entries.append(entry)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def last_step(self) -> int:
        """The step of the newest entry; 0 where there is none."""
        return self._entries[-1].step if self._entries else 0

    def __len__(self) -> int:
        return len(self._entries)

    def plan_at(self, step: int) -> Plan:
        """The plan under which update `step` was made."""
        plan = None
        for entry in self._entries:
            if entry.step > step:
                break
            plan = entry.plan
        if plan is None:
            raise HotlapError(f"the ledger knows no plan at step {step}")
        return plan

    def to_lines(self) -> str:
        """One JSON object a line."""
        self._lines += [json.dumps(entry.to_dict()) + "\n" for entry in self._entries[len(self._lines) :]]
        return "".join(self._lines)

    @classmethod
    def from_lines(cls, text: str) -> Self:
        """A ledger from its lines."""
        ledger, plans = cls(), dict[str, Plan]()
        # Not splitlines(), which also breaks at characters that JSON allows inside a string.
        for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
            try:
                ledger.record(Entry.from_dict(json.loads(line), plans))
            except json.JSONDecodeError as error:
                why = f"no JSON at column {error.colno}"
            except RecursionError:
                why = "nested too deeply"
            except PlanError as error:
                why = "; ".join(error.problems)
            except ValueError as error:
                why = str(error)
            else:
                if number - 1 == len(ledger._lines) and "NaN" not in line and "Infinity" not in line:
                    ledger._lines.append(line + "\n")
                continue
            raise HotlapError(f"line {number} of the ledger cannot be read: {why}")
        return ledger


def _is_number(value: object) -> bool:
    if type(value) is float:
        return True
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False
    return True


def _wrong_with(entry: Any) -> list[str]:
    """What is wrong with an entry, whatever the types promise: it may come out of a file."""
    wrong = []
    if type(entry.step) is not int or not 0 <= entry.step < 2**63:
        wrong.append(f"step={shown(entry.step)} must be a whole number from 0 to 2**63 - 1")
    wrong += [
        f"{name}={shown(value)} must be text"
        for name, value in (("what", entry.what), ("why", entry.why))
        if not isinstance(value, str)
    ]
    if not isinstance(entry.outcome, str) or entry.outcome not in OUTCOMES:
        wrong.append(f"outcome {shown(entry.outcome)} is none of {', '.join(OUTCOMES)}")
    if entry.kind not in KINDS:
        wrong.append(f"kind {shown(entry.kind)} is none of {', '.join(KINDS)}")
    wrong += [
        f"{name}={shown(value)} must be true or false"
        for name, value in (("known", entry.known), ("unfit", entry.unfit))
        if not isinstance(value, bool)
    ]
    if not isinstance(entry.plan, Plan):
        wrong.append(f"plan={shown(entry.plan)} must be a Plan")
    if not _is_number(entry.cost_s) or not math.isfinite(entry.cost_s):
        wrong.append(f"cost_s={shown(entry.cost_s)} must be a finite number")
    if not isinstance(entry.figures, Mapping):
        wrong.append(f"figures={shown(entry.figures)} must be numbers by name")
    elif not all(isinstance(name, str) and _is_number(value) for name, value in entry.figures.items()):
        wrong.append(f"figures={shown(entry.figures)} holds what is no number")
    return wrong
