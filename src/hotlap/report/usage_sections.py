"""What GPU and host did over the time of a training, from `samples.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotlap.core.units import GIB, show_seconds
from hotlap.plots.axes import Line, Points, thinned
from hotlap.plots.trainings import lines_picture
from hotlap.report.document import Block, Chart, Figure, Table, Text
from hotlap.report.reading import Training, listing, mapping, number, words

MOST_GPUS, MOST_EVENTS, LISTED = 4, 12, 40


@dataclass(frozen=True)
class _Shown:
    """A figure of the samples as a chart shows it."""

    title: str
    unit: str
    names: tuple[str, ...]
    """The figures by their names in the samples; several share a chart."""
    scale: float = 1.0
    most: str = ""
    """The figure that says how much there is."""


GPU = (
    _Shown("GPU in use", "%", ("busy",), 100.0),
    _Shown("GPU memory", "GiB", ("memory_used_bytes",), 1 / GIB, "memory_bytes"),
    _Shown("GPU power", "W", ("power_w",)),
)
HOST = (
    _Shown("Cores in use", "cores", ("cores_busy", "own_cores"), 1.0, "cores"),
    _Shown("Memory of the host", "GiB", ("ram_used_bytes", "own_ram_bytes"), 1 / GIB, "ram_bytes"),
)
NAMES = {"cores_busy": "all processes", "own_cores": "this training", "ram_used_bytes": "all processes"}
NAMES |= {"own_ram_bytes": "this training"}


def usage(training: Training, name: str = "") -> list[Block]:
    """Charts of what was used, with the moments that matter."""
    samples = [sample for sample in training.samples if number(sample.get("at")) is not None]
    if len(samples) < 3:
        return bound(training)
    begin = number(samples[0].get("at")) or 0.0
    events = _events(training, samples, begin)
    blocks: list[Block] = []
    for shown in GPU:
        series = [
            (f"GPU {at}", _points(samples, begin, shown, shown.names[0], at))
            for at in range(min(MOST_GPUS, _gpus(samples)))
        ]
        blocks += _chart(shown, series, samples, events)
    for shown in HOST:
        series = [(NAMES[one], _points(samples, begin, shown, one, None)) for one in shown.names]
        blocks += _chart(shown, series, samples, events)
    if not blocks:
        return []
    gaps = sum(number(sample.get("gap_s")) or 0.0 for sample in samples)
    said = f"{len(samples):,} samples"
    said += f"; none for {show_seconds(gaps)}" if gaps else ""
    marked = "; ".join(f"{show_seconds(at)}: {what}" for at, what in events)
    first = Text(f"{name}: {said}." if name else f"{said[:1].upper()}{said[1:]}.")
    return [*bound(training), first, *blocks, *_marks(marked)]


def bound(training: Training) -> list[Block]:
    """What bound the training when it was last looked at, and what answers that."""
    found = mapping(training.live.get("bound"))
    if not found.get("by"):
        return []
    answer = f" Answer: {words(found['answer'])}." if found.get("answer") else ""
    return [Text(f"Bound by {words(found['by'])} at the end: {words(found.get('why'))}.{answer}")]


def _marks(marked: str) -> list[Block]:
    return [Text(f"Dotted lines: {marked}.")] if marked else []


def _gpus(samples: Sequence[Mapping[str, Any]]) -> int:
    return max((len(listing(sample.get("gpus"))) for sample in samples), default=0)


def _figures(sample: Mapping[str, Any], gpu: int | None) -> dict[str, Any]:
    if gpu is None:
        return mapping(sample.get("host"))
    found = listing(sample.get("gpus"))
    return mapping(found[gpu]) if gpu < len(found) else {}


def _points(samples: Sequence[Mapping[str, Any]], begin: float, shown: _Shown, name: str, gpu: int | None) -> Points:
    known = [(number(sample.get("at")), number(_figures(sample, gpu).get(name))) for sample in samples]
    return [(at - begin, shown.scale * value) for at, value in known if at is not None and value is not None]


def _chart(
    shown: _Shown,
    series: Sequence[tuple[str, Points]],
    samples: Sequence[Mapping[str, Any]],
    events: Sequence[tuple[float, str]],
) -> list[Block]:
    series = [(name, points) for name, points in series if len(points) > 2]
    if not series:
        return []
    lines = [Line(name=name, points=thinned(points), colour=at) for at, (name, points) in enumerate(series)]
    gpu = None if shown in HOST else 0
    there = [found for sample in samples if shown.most and (found := number(_figures(sample, gpu).get(shown.most)))]
    rules = [("there is", shown.scale * max(there))] if there else []
    title = f"{shown.title} ({shown.unit})"
    picture = lines_picture(title, lines, unit="seconds", height=150, zero=True, rules=rules, events=events)
    rows = [
        (name, Figure(at, show_seconds(round(at, 1))), Figure(value, f"{value:.4g}"))
        for name, points in series
        for at, value in points[:: max(1, -(-len(points) // LISTED))]
    ]
    table = Table(title=title, head=("", "after", shown.unit), rows=rows)
    return [Chart(title=title, picture=picture, table=table)]


def _events(training: Training, samples: Sequence[Mapping[str, Any]], begin: float) -> list[tuple[float, str]]:
    """When tuning ended, and faults, at the first sample that has come so far."""
    entries = list(training.ledger) if training.ledger is not None else []
    moments = [(entry.step, "tuning ends") for entry in entries if entry.kind == "tuned"][:1]
    moments += [(entry.step, words(entry.what)) for entry in entries if entry.outcome == "fault"]
    known = [(number(sample.get("step")), number(sample.get("at"))) for sample in samples]
    places = [(step, at - begin) for step, at in known if step is not None and at is not None]
    found = [
        (next((at for reached, at in places if reached >= step), None), what) for step, what in moments[:MOST_EVENTS]
    ]
    return [(at, what) for at, what in found if at is not None]
