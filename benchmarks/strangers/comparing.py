"""Whether two runs of a script did the same: exit codes, files written and figures printed."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?(?![\w])|\b(?:nan|inf)\b")
UNIT = r"(?:ms|µs|us|s|secs?|seconds?|mins?|minutes?|hours?|it/s|s/it|imgs?/s|/s|MB|GB|MiB|GiB)"
TIMES = re.compile(
    rf"""
    \d[\d.,:]*\s*{UNIT}(?![\w])                                   # 12.3 ms, 1:02 s, 51.2 it/s
    | \w*(?:time|took|elapsed|runtime|speed|per_second|ms/batch|eta|throughput)\w*['"]?[\s:=('"]*\d[\d.,:]*
    | \d\d:\d\d(?::\d\d)?(?:[.,]\d+)?                             # a clock
    | \d{{4}}-\d\d-\d\d | \d\d/\d\d/\d{{4}}                       # a day
    """,
    re.VERBOSE | re.IGNORECASE,
)
SMALLEST = 1e-12
ROOM = 1.5
"""How much further than two runs by themselves others may lie apart: three of each show the spread only roughly."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    same: bool
    """Whether it is as it should be."""
    words: str


def without_times(text: str, ignore: str = "") -> str:
    """Take times, speeds and clocks out of what a script printed."""
    lines = text.replace("\b", "").replace("\r", "\n").splitlines()
    plain = "\n".join(line.rstrip() for line in lines if line.strip())
    if ignore:
        plain = re.sub(ignore, "TIME", plain)
    return TIMES.sub("TIME", plain)


def numbers(text: str) -> list[float]:
    """All figures, in their order."""
    return [float(found) for found in NUMBER.findall(text)]


def form(text: str) -> str:
    """The text with its figures left out."""
    return re.sub(r"\s+", " ", NUMBER.sub("#", text))


def difference(one: Sequence[float], other: Sequence[float], at: Sequence[int]) -> float:
    """How far figures lie apart on average, as a share of the larger, over these positions."""
    return statistics.fmean(apart(one[place], other[place]) for place in at) if at else 0.0


def apart(one: float, other: float) -> float:
    """How far two figures lie apart, from 0 to 1."""
    if one == other or (one != one and other != other):
        return 0.0
    if one != one or other != other or abs(one) == float("inf") or abs(other) == float("inf"):
        return 1.0
    return min(1.0, abs(one - other) / max(abs(one), abs(other), SMALLEST))


def compare_figures(alone: Sequence[str], hotlap: Sequence[str], other_seed: str | None = None) -> Verdict:
    """Compare what runs under hotlap printed with what runs without it did, times taken out already."""
    if len({*alone, *hotlap}) == 1:
        return Verdict(True, "same")
    everything = [*alone, *hotlap]
    forms = {form(text) for text in everything}
    found = [numbers(text) for text in everything]
    if len(forms) > 1 or len({len(one) for one in found}) > 1:
        if {form(text) for text in hotlap} <= {form(text) for text in alone} or len({*map(form, alone)}) > 1:
            return Verdict(True, "other lines, also from run to run")
        return Verdict(False, f"OTHER LINES: {first_difference(alone[0], hotlap[0])}")
    places = [at for at in range(len(found[0])) if len({str(one[at]) for one in found}) > 1]
    by_itself, under = found[: len(alone)], found[len(alone) :]
    here = statistics.median(difference(a, h, places) for a, h in zip(by_itself, under, strict=True))
    between = [difference(a, b, places) for a, b in itertools.combinations(by_itself, 2)]
    words = f"{100 * here:.2g} % apart"
    if here == 0.0:
        return Verdict(True, "same")
    if between and here <= ROOM * max(between):
        return Verdict(True, f"{words}; two runs by themselves {100 * max(between):.2g} %")
    if between:
        words += f"; two runs by themselves {100 * max(between):.2g} %"
    if other_seed is not None:
        seeded = numbers(other_seed)
        if len(seeded) == len(found[0]):
            seeds = statistics.median(difference(a, seeded, places) for a in by_itself)
            return Verdict(
                here <= seeds, f"{words}; two seeds {100 * seeds:.2g} %{'' if here <= seeds else ': DIFFER'}"
            )
    return Verdict(False, f"{words}: DIFFER")


def first_difference(one: str, other: str) -> str:
    """The first line that is of another form."""
    for mine, yours in itertools.zip_longest(one.splitlines(), other.splitlines(), fillvalue=""):
        if form(mine) != form(yours):
            return f"{mine[:60]!r} by itself, {yours[:60]!r} under hotlap"
    return "figures alone"


def compare_files(alone: Sequence[dict[str, str]], hotlap: Sequence[dict[str, str]]) -> Verdict:
    """Compare the files written (name to hash) by runs without hotlap and under it."""
    before, after = ({*one} for one in (alone[0], hotlap[0]))
    if len({frozenset(one) for one in (*alone, *hotlap)}) > 1:
        if len({frozenset(one) for one in alone}) > 1:
            return Verdict(True, "other names, also from run to run")
        lost, new = sorted(before - after), sorted(after - before)
        return Verdict(False, f"OTHER FILES: lost {', '.join(lost[:3]) or 'none'}; new {', '.join(new[:3]) or 'none'}")
    if not before:
        return Verdict(True, "none")
    changed = [name for name in sorted(before) if len({one[name] for one in (*alone, *hotlap)}) > 1]
    if not changed:
        return Verdict(True, f"same {len(before)}")
    unsteady = [name for name in changed if len({one[name] for one in alone}) > 1]
    if len(unsteady) == len(changed):
        return Verdict(True, f"same names; {len(changed)} of {len(before)} differ, also from run to run")
    return Verdict(True, f"same names; {len(changed)} of {len(before)} differ, e.g. {changed[0]}")
