"""How often a comparison of two plans is wrong, and how many laps it takes, over many kinds of machine.

    python -m benchmarks.tuner_stats [--comparisons 2000] [--tossed] [--json FILE]

Laps are made up, so the true gain is known. Exit code 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tests.tuner.traces import KINDS, Laps, beating, quads, steady

from hotlap.tuner.stats import LEAST_GAIN, MOST_QUADS, Comparison, Estimate

RATIOS = (0.8, 0.95, 0.99, 1.0, 1.02, 1.05, 1.1, 2.0, 10.0)
SPREADS = (0.005, 0.01, 0.02)
CALM = ("steady", "drifting", "wandering")  # where every gain worth having must be found
LOOSE = ("uneven gain", "beating")  # for the record: no limit can be kept


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of many comparisons of one kind; all but the mean of quads are counts or truths."""

    kind: str
    ratio: float
    spread: float
    comparisons: int
    accepted: int
    rejected: int
    slower: int
    undecided: int
    covered: int
    """How often the interval given at the end held the true ratio."""
    quads: float


def compare(laps: Laps) -> tuple[str, Estimate]:
    """One comparison, fed quad after quad until it decides."""
    comparison = Comparison()
    for quad in laps.tolist():
        comparison.add(*quad)
        if comparison.verdict is not None:
            break
    return comparison.verdict or "cut short", comparison.estimate


def row(kind: str, ratio: float, spread: float, comparisons: int, *, seed: int, tossed: bool) -> Row:
    """Many comparisons of one kind, ratio and spread."""
    make = beating if kind == "beating" else KINDS.get(kind, steady)
    laps = quads(
        make,
        ratio=ratio,
        spread=spread,
        comparisons=comparisons,
        count=MOST_QUADS,
        rng=np.random.default_rng(seed),
        uneven=0.02 if kind == "uneven gain" else 0.0,
        tossed=tossed,
    )
    return summed([compare(of_one) for of_one in laps], kind=kind, ratio=ratio, spread=spread)


def summed(ends: list[tuple[str, Estimate]], *, kind: str, ratio: float, spread: float) -> Row:
    """The row for ends of comparisons whose true ratio is known."""
    verdicts = Counter(verdict for verdict, _ in ends)
    return Row(
        kind=kind,
        ratio=ratio,
        spread=spread,
        comparisons=len(ends),
        accepted=verdicts["accepted"],
        rejected=verdicts["rejected"],
        slower=verdicts["slower"],
        undecided=verdicts["no difference seen"],
        covered=sum(end.low <= ratio <= end.high for _, end in ends),
        quads=sum(end.quads for _, end in ends) / len(ends),
    )


def broken(row: Row) -> list[str]:
    """The limits this row does not keep, in words."""
    if row.kind in LOOSE:
        return []
    accepted, covered = row.accepted / row.comparisons, row.covered / row.comparisons
    most = 0.0 if row.ratio < 1 else 0.01 if row.ratio == 1 else 0.05 if row.ratio <= LEAST_GAIN else 1.0
    problems = []
    if accepted > most:
        problems.append(f"accepted in {accepted:.2%}, limit {most:.0%}")
    if row.kind in CALM and row.ratio > LEAST_GAIN and accepted < 0.95:
        problems.append(f"found in {accepted:.1%} only, limit 95 %")
    if covered < 0.93:
        problems.append(f"interval right in {covered:.1%} only, limit 93 %")
    if row.ratio >= 2 and row.kind in CALM and row.quads > 3.5:
        problems.append(f"{row.quads:.1f} quads, limit 3.5")
    return [f"{row.kind}, ratio {row.ratio:g}, spread {row.spread:.1%}: {problem}" for problem in problems]


def shown(row: Row) -> str:
    """A line of the table."""
    counts = (row.accepted, row.rejected, row.slower, row.undecided, row.covered)
    shares = "".join(f"{100 * count / row.comparisons:>10.2f}" for count in counts)
    return f"{row.kind:<16}{row.ratio:>6g}{100 * row.spread:>8.1f}{shares}{row.quads:>8.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=2000, help="of each kind, ratio and spread")
    parser.add_argument("--tossed", action="store_true", help="a coin says whether a quad is A B B A or B A A B")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = ("accepted", "rejected", "slower", "undecided", "covered")
    print(f"{'':<16}{'true':>6}{'spread':>8}{'in % of comparisons'.center(50, '-'):>50}{'':>8}")
    print(f"{'kind':<16}{'ratio':>6}{'%':>8}{''.join(f'{name:>10}' for name in names)}{'quads':>8}")
    rows: list[Row] = []
    for kind in (*KINDS, *LOOSE):
        for ratio in RATIOS:
            for spread in SPREADS:
                seed = options.seed + len(rows)
                rows.append(row(kind, ratio, spread, options.comparisons, seed=seed, tossed=options.tossed))
                print(shown(rows[-1]), flush=True)
    problems = [problem for row in rows for problem in broken(row)]
    print(*problems or ["all limits kept"], sep="\n")
    if options.json:
        facts = {"tossed": options.tossed, "seed": options.seed, "broken": problems}
        options.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
