"""The sections of one training: moves, learning curves, step times, phases, and settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hotlap.core.ledger import Ledger
from hotlap.core.table import Row, rows
from hotlap.core.table import as_json as table_as_json
from hotlap.core.units import show_rate, show_seconds
from hotlap.plots.axes import Line, thinned
from hotlap.plots.bars import Bar, bars_picture, parts_picture
from hotlap.plots.trainings import NO_METRICS, lines_picture, loss_lines, metric_lines, points_of
from hotlap.report.document import Block, Cell, Chart, Figure, Table, Text, count, score, seconds
from hotlap.report.reading import Training, mapping, number, words

MOST_METRICS, MOST_LISTED = 4, 60
"""Charts of metrics, and rows of a chart's table."""
NEAR, CLOSE = 0.02, 0.15
"""Parts by which the same step may differ, and the ratio of two steps from a ratio that laps gave."""
MOST_BOTH = 3
"""Trainings whose training loss is drawn beside that on validation."""
ROUND = "round"


# --- numbers -------------------------------------------------------------------------------------------


def ratio_words(value: float) -> str:
    """How many times as fast: 1.07x, 3.2x, 12x."""
    return f"{value:.2f}x" if value < 1.995 else f"{value:.1f}x" if value < 9.95 else f"{value:,.0f}x"


def interval_words(low: float | None, high: float | None) -> str:
    """An interval of a speed-up; empty where there is none."""
    if low is None or high is None:
        return ""
    digits = 2 if high < 9.95 else 1
    return f"[{low:.{digits}f}, {high:.{digits}f}]" if high < 1e6 else ""


def total_of(ledger: Ledger | None) -> dict[str, Any]:
    """What tuning came to; empty where nothing was tuned."""
    return mapping(table_as_json(ledger)["total"]) if ledger is not None else {}


# --- moves ---------------------------------------------------------------------------------------------


def moves(training: Training, name: str = "") -> list[Block]:
    """A waterfall of the moves, and a table of all with what became of each and why."""
    found = rows(training.ledger) if training.ledger is not None else []
    if not found:
        return []
    baseline = next((row for row in found if row.outcome == "chosen" and row.step_s is not None), None)
    head = ("", "move", "step", "speed-up", "95 % interval", "noise", "cost", "result")
    fit = [row for row in found if not row.unfit]
    cells = [_move(row) for row in fit]
    used = [at for at in range(len(head)) if at < 2 or any(_is_said(row[at]) for row in cells)]
    table = Table(
        title="Moves",
        head=tuple(head[at] for at in used),
        rows=[tuple(row[at] for at in used) for row in cells],
        marked=tuple(at for at, row in enumerate(fit) if row.outcome == "kept"),
    )
    unfit = [(row.what, row.why) for row in found if row.unfit]
    blocks: list[Block] = [Text(name)] if name else []
    bars = _waterfall(found, baseline)
    if bars:
        picture = bars_picture("Time of a step, move by move", bars, width=760)
        notes = ["Hatched bars were measured and not kept"] if any(bar.colour is None for bar in bars) else []
        notes += ["A bar with + shows the time that its moves took off"] if any(bar.begins for bar in bars) else []
        blocks.append(
            Chart(
                title="Time of a step, move by move",
                picture=picture,
                table=table,
                note=". ".join(notes),
                is_wide=True,
                is_open=True,
            )
        )
    else:
        blocks.append(table)
    if unfit:
        title = f"{len(unfit)} moves that do not apply here"
        blocks.append(Table(title=title, head=("move", "why"), rows=unfit, is_folded=True))
    why = baseline.why if baseline is not None else ""
    if why:
        blocks.insert(len(name) > 0, Text(f"The baseline: {why}."))
    return blocks


def _move(row: Row) -> tuple[Figure | str, ...]:
    step = Figure(row.step_s, "–" if row.step_s is None else f"{show_seconds(row.step_s)}")
    ratio = Figure(row.ratio, "" if row.ratio is None else ratio_words(row.ratio))
    noise = Figure(row.noise, "" if row.noise is None else f"±{100 * row.noise:.1f} %")
    cost = Figure(row.cost_s, show_seconds(row.cost_s) if row.cost_s else "")
    outcome = "" if not row.sign else row.outcome
    said = ": ".join(part for part in (outcome, row.why) if part)
    return (row.sign, row.what, step, ratio, interval_words(row.low, row.high), noise, cost, said)


def _is_said(cell: Cell) -> bool:
    return bool(cell if isinstance(cell, str) else cell.words)


def _waterfall(found: Sequence[Row], baseline: Row | None) -> list[Bar]:
    """The baseline, what each kept move took off, what rejected ones would have come to, and the total."""
    if baseline is None or baseline.step_s is None:
        return []
    bars = [Bar(name="baseline", value=baseline.step_s, words=show_seconds(baseline.step_s), colour=5)]
    now = baseline.step_s
    kept = [row for row in found if row.outcome == "kept" and row.step_s is not None]
    total = next((row for row in found if row.what == "total" and not row.sign and row.step_s is not None), None)
    for group in _bundles(kept, baseline, total):
        step_s, first = group[0].step_s or 0.0, group[0]
        said = f"{ratio_words(first.ratio)} {interval_words(first.low, first.high)}" if first.ratio else ""
        name = "+ " + ", ".join(row.what for row in group)
        bars.append(Bar(name=name, value=now, begins=step_s, words=said.strip(), colour=2))
        now = step_s
    for row in found:
        if row.outcome in ("rejected", "undecided") and row.step_s is not None:
            said = ratio_words(row.ratio) if row.ratio is not None else ""
            bars.append(Bar(name=f"- {row.what}", value=row.step_s, words=f"{said} {row.outcome}".strip(), colour=None))
    if total is not None and total.step_s is not None and kept:
        low, high = (baseline.step_s / end if end else None for end in (total.high, total.low))
        bars.append(Bar(name="now", value=total.step_s, words=show_seconds(total.step_s), low=low, high=high))
    return bars if len(bars) > 1 else []


def _bundles(kept: Sequence[Row], baseline: Row, total: Row | None) -> list[list[Row]]:
    """Kept moves, those together that were measured together.

    Where their steps do not lead from the baseline to the total, each was measured against another plan: then they are
    one bundle, with the figures of the total.
    """
    groups: list[list[Row]] = []
    for row in kept:
        if groups and (groups[-1][0].step_s, groups[-1][0].ratio) == (row.step_s, row.ratio):
            groups[-1].append(row)
        else:
            groups.append([row])
    first = [baseline, *(group[0] for group in groups)]
    leads_on = all(
        before.step_s and row.step_s and row.ratio and abs(before.step_s / row.step_s / row.ratio - 1) < CLOSE
        for before, row in itertools.pairwise(first)
    )
    last = first[-1].step_s or 0.0
    if total is None or total.step_s is None or (leads_on and abs(last - total.step_s) < NEAR * total.step_s):
        return groups
    step_s, ratio, low, high = total.step_s, total.ratio, total.low, total.high
    return [[replace(row, step_s=step_s, ratio=ratio, low=low, high=high) for row in kept]] if kept else []


# --- learning curves -----------------------------------------------------------------------------------


def curves(
    trainings: Sequence[Training],
    rules: Mapping[str, Mapping[str, Any]] | None = None,
    others: Sequence[Training] = (),
) -> list[Block]:
    """Losses and metrics of trainings over their steps or rounds.

    `rules` are the scores of simple rules; `others` are trainings whose lowest and highest are drawn as a band.
    """
    steps = {one.name: one.history for one in trainings if one.history and ROUND not in one.history[0]}
    rounds = {one.name: one.history for one in trainings if one.history and ROUND in one.history[0]}
    blocks: list[Block] = []
    lines = loss_lines(steps)
    if len(steps) > MOST_BOTH and any(not line.is_train for line in lines):
        lines = [line for line in lines if not line.is_train]
    if lines:
        names = ("train_loss", "valid_loss")
        band = _band(others, "valid_loss")
        blocks.append(_curve("Loss", lines, steps, names, "step", band=band))
    for metric in _metrics(steps):
        level = _rules(rules or {}, metric)
        lines = metric_lines(steps, metric)
        if lines:
            band = _band(others, metric)
            blocks.append(_curve(f"{metric} on validation", lines, steps, (metric,), "step", rules=level, band=band))
    for metric in _metrics(rounds):
        lines = [
            Line(name=name, points=points_of(run, metric, ROUND), colour=at)
            for at, (name, run) in enumerate(rounds.items())
        ]
        if any(line.points for line in lines):
            drawn = [line for line in lines if line.points]
            blocks.append(_curve(metric, drawn, rounds, (metric,), ROUND))
    return blocks


def _metrics(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    names: dict[str, None] = {}
    for run in runs.values():
        for record in (*run[:1], *run[-1:]):
            names |= {name: None for name in record if name not in NO_METRICS and name != ROUND}
    return [name for name in names if any(number(record.get(name)) is not None for r in runs.values() for record in r)][
        :MOST_METRICS
    ]


def _curve(
    title: str,
    lines: Sequence[Line],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    names: Sequence[str],
    over: str,
    rules: Sequence[tuple[str, float]] = (),
    band: Sequence[tuple[float, float, float]] = (),
) -> Chart:
    picture = lines_picture(title, lines, unit=over, rules=rules, band=band)
    listed: list[tuple[Figure | str, ...]] = []
    for name, run in runs.items():
        every = max(1, -(-len(run) // MOST_LISTED))
        chosen = [*run[::every], *([run[-1]] if (len(run) - 1) % every else [])]
        for record in chosen:
            cells = (count(number(record.get(over))), *(score(number(record.get(one))) for one in names))
            listed.append((name, *cells))
    many = any(len(run) > MOST_LISTED for run in runs.values())
    notes = ["The table has a part of the records; metrics.jsonl has all" if many else ""]
    notes.append("The grey band spans the runs compared with" if band else "")
    table = Table(title=title, head=("training", over, *names), rows=listed)
    return Chart(title=title, picture=picture, table=table, note=". ".join(filter(None, notes)))


def _rules(rules: Mapping[str, Mapping[str, Any]], metric: str) -> list[tuple[str, float]]:
    """The best simple rule by a metric that it has."""
    known = [(name, found) for name, said in rules.items() if (found := number(mapping(said).get(metric))) is not None]
    return [max(known, key=lambda one: one[1])] if known else []


def _band(others: Sequence[Training], name: str) -> list[tuple[float, float, float]]:
    """The lowest and the highest of other trainings at the steps that all of them have."""
    tables = [dict(points_of(other.history, name)) for other in others]
    tables = [table for table in tables if table]
    if not tables:
        return []
    common = sorted(set.intersection(*(set(table) for table in tables)))
    return [(step, min(t[step] for t in tables), max(t[step] for t in tables)) for step in common]


# --- step times ----------------------------------------------------------------------------------------


def pace(training: Training, name: str = "") -> list[Block]:
    """The step before and after tuning, and the pace between evaluations."""
    blocks: list[Block] = [Text(name)] if name else []
    found = rows(training.ledger) if training.ledger is not None else []
    baseline = next((row for row in found if row.what == "baseline" and row.step_s), None)
    total = next((row for row in found if row.what == "total" and row.step_s), None)
    if (
        baseline is not None
        and total is not None
        and baseline.step_s
        and total.step_s
        and baseline.step_s != total.step_s
    ):
        low, high = (baseline.step_s / end if end else None for end in (total.high, total.low))
        bars = [
            Bar(name="before", value=baseline.step_s, words=show_seconds(baseline.step_s), colour=5),
            Bar(name="after", value=total.step_s, words=show_seconds(total.step_s), low=low, high=high),
        ]
        table = Table(
            title="Step before and after",
            head=("", "a step takes", "lowest", "highest"),
            rows=[
                ("before", seconds(baseline.step_s), seconds(None), seconds(None)),
                ("after", seconds(total.step_s), seconds(low), seconds(high)),
            ],
        )
        blocks.append(
            Chart(title="A step before and after", picture=bars_picture("A step before and after", bars), table=table)
        )
    points = _pace_points(training.history)
    if len(points) > 5:
        line = Line(name="seconds a step", points=thinned(points), colour=0)
        events = _events(training)
        picture = lines_picture(
            "Time of a step over the training", [line], events=events, zero=True, show=show_seconds, height=180
        )
        every = max(1, len(points) // MOST_LISTED)
        table = Table(
            title="Time of a step over the training",
            head=("up to step", "a step takes"),
            rows=[(count(step), seconds(value)) for step, value in points[::every]],
        )
        note = "From evaluation to evaluation, evaluations and checkpoints included"
        note += f". Dotted lines: {'; '.join(words for _, words in events)}" if events else ""
        blocks.append(Chart(title="Time of a step over the training", picture=picture, table=table, note=note))
    return blocks if len(blocks) > bool(name) else []


def _pace_points(history: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Seconds a step between one evaluation and the next."""
    marks = [(number(record.get("step")), number(record.get("elapsed_s"))) for record in history]
    known = [(step, at) for step, at in marks if step is not None and at is not None]
    pairs = itertools.pairwise(known)
    return [(b[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairs if b[0] > a[0] and b[1] >= a[1]]


def _events(training: Training) -> list[tuple[float, str]]:
    """When tuning ended, and faults."""
    entries = list(training.ledger) if training.ledger is not None else []
    tuned = next((entry for entry in entries if entry.kind == "tuned"), None)
    found = [(float(tuned.step), f"tuning ends at step {tuned.step:,}")] if tuned is not None else []
    faults = [entry for entry in entries if entry.outcome == "fault"][:8]
    return found + [(float(fault.step), f"{words(fault.what)} at step {fault.step:,}") for fault in faults]


# --- phases --------------------------------------------------------------------------------------------


def phases_of(training: Training) -> list[tuple[str, float]]:
    """What the time of one training went to, in order; empty where its files do not say."""
    ended, total = training.ended, total_of(training.ledger)
    all_s, train_s = number(ended.get("total_s")), number(ended.get("train_s"))
    if all_s is None or train_s is None or "cache" in str(ended.get("stopped")):
        return []
    tuning_s = min(number(total.get("cost_s")) or 0.0, train_s)
    setup_s, evaluation_s = number(ended.get("setup_s")), number(ended.get("evaluation_s"))
    known = [("setup", setup_s), ("tuning", tuning_s), ("training", train_s - tuning_s), ("evaluation", evaluation_s)]
    found = [(name, spent) for name, spent in known if spent is not None and spent > 0]
    rest = all_s - sum(spent for _, spent in found)
    is_whole = setup_s is not None and evaluation_s is not None
    left = "files" if is_whole else "setup, evaluation and files"
    return [*found, *([(left, rest)] if rest > 0.005 * all_s else [])]


def phases_chart(parts: Sequence[tuple[str, float]]) -> Chart:
    """Phases one after the other."""
    whole = sum(spent for _, spent in parts) or 1.0
    table = Table(
        title="Phases",
        head=("phase", "time", "share"),
        rows=[(name, seconds(spent), Figure(spent / whole, f"{100 * spent / whole:.1f} %")) for name, spent in parts],
    )
    return Chart(
        title="Where the time went", picture=parts_picture("Where the time went", parts, show_seconds), table=table
    )


# --- tiles ----------------------------------------------------------------------------------------------


def speed_tiles(training: Training) -> list[tuple[str, str, str]]:
    """Speed-up, step and rate of a training: names, words and notes."""
    total, found = total_of(training.ledger), []
    ratio, step_s = number(total.get("ratio")), number(total.get("step_s"))
    baseline = table_as_json(training.ledger)["baseline"] if training.ledger is not None else None
    before = number(mapping(baseline).get("step_s"))
    if ratio is not None:
        between = interval_words(number(total.get("low")), number(total.get("high")))
        found.append(("Speed of a step", ratio_words(ratio), f"{between} 95 % interval".strip()))
    unit = "round" if training.tree_plan else "step"
    if step_s is not None and before is not None and ratio is not None:
        found.append((f"A {unit}", show_seconds(step_s), f"{show_seconds(before)} before"))
    elif before is not None:
        found.append((f"A {unit}", show_seconds(before), "as it was"))
    ended = training.ended
    samples, train_s = number(ended.get("samples")), number(ended.get("train_s"))
    if samples and train_s:
        found.append(("Rate", f"{show_rate(samples / train_s)}/s", "samples, tuning included"))
    return found
