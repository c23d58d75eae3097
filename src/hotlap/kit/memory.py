"""`hotlap memory`: what holds the memory of an update, by kind and layer, and what would lower the peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from hotlap.core.errors import DataError, TrainingError
from hotlap.core.job import Job
from hotlap.core.terminal import Say, clean, silent
from hotlap.core.units import show_bytes
from hotlap.kit.batch import COUNTED, MOST_S
from hotlap.kit.bench import JobTrials, opened
from hotlap.kit.probe import BEGINS_S, LAP_S, LAPS, RUNS, ProbeRequest, ProbeResult, ScriptTrials, run_probe
from hotlap.kit.savings import Trials, savings, table
from hotlap.kit.search import TooShortError
from hotlap.kit.update_watch import KINDS
from hotlap.monitor.growing_memory import GrowingMemory
from hotlap.monitor.savings import ModelFacts, Saving, Update
from hotlap.plots import round_marks
from hotlap.script.running import Target
from hotlap.store.files import write_text

LAYERS = 10
"""Layers in the summary."""
_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "backward": "backward pass",
    "update": "optimizer step",
    "batch": "batch and the rest",
    "before": "data held before",
    "kernels": "inside kernels",
    "libraries": "cuBLAS workspace",
    "unseen": "outside of tensors",
}


@dataclass(frozen=True, kw_only=True)
class MemoryFound(Update):
    """What holds a training's memory."""

    name: str
    device: str
    counted_bytes: int
    """The counted peak of tensors and operations, which is the sum of `kinds`."""
    reserved_bytes: int | None
    """The most that torch has taken from the GPU; None on the CPU."""
    room_bytes: int
    """Memory that the process may take."""
    course: tuple[tuple[str, int], ...]
    """Over one update: its part, and the bytes that lived."""
    savings: tuple[Saving, ...] = ()
    held: tuple[GrowingMemory, ...] = ()
    """What grows from update to update."""
    notes: tuple[str, ...] = ()

    @property
    def lasting_bytes(self) -> int:
        """The memory of tensors between two updates."""
        return self.course[-1][1] if self.course else 0

    @property
    def unseen_bytes(self) -> int:
        """The allocator's memory beyond the counted: what libraries keep, and rounding."""
        return max(0, self.peak_bytes - self.counted_bytes)

    def draw(self, path: str | Path) -> None:
        """Draw memory over one update into an SVG file."""
        draw_course(self.course, Path(path), f"Memory over one update of {self.name}")

    def summary(self) -> str:
        """The figures in lines, for people."""
        at_once = (
            f"{self.samples:,} samples at once, " if self.samples else ""
        )  # without a loader the number is unknown
        lines = [f"{'peak':<21} {show_bytes(self.peak_bytes):>10}  {at_once}after the first update"]
        whole = {**self.kinds, "unseen": self.unseen_bytes}
        for kind in (*KINDS, "unseen"):
            if whole.get(kind):
                share = whole[kind] / max(1, self.peak_bytes)
                bar = "#" * round(24 * share)
                lines.append(f"  {_NAMES[kind]:<19} {show_bytes(whole[kind]):>10}  {share:>4.0%} {bar}".rstrip())
        lines.append(f"{'between updates':<21} {show_bytes(self.lasting_bytes):>10}  allocated all the time")
        if self.reserved_bytes is not None:
            kept = show_bytes(self.reserved_bytes - self.peak_bytes)
            lines.append(f"{'taken by torch':<21} {show_bytes(self.reserved_bytes):>10}  {kept} of it kept for later")
        left = self.room_bytes - (self.reserved_bytes if self.reserved_bytes is not None else 0)
        lines.append(f"{'left':<21} {show_bytes(left):>10}  of {show_bytes(self.room_bytes)} for this process")
        top = sorted(self.layers.items(), key=lambda one: -one[1])[:LAYERS]
        if top:
            lines += ["", "activations at the peak, by layer"]
            lines += [f"  {show_bytes(size):>10}  {name}" for name, size in top if size]
        if self.savings:
            lines += ["", *table(self.savings, self.peak_bytes, self.step_s)]
        lines.append("")
        lines += [f"grows      {one}" for one in self.held] or ["grows      nothing from update to update"]
        return "\n".join(map(clean, [*lines, *(f"note       {note}" for note in self.notes)]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {
            "training": self.name,
            "device": self.device,
            "samples": self.samples,
            "peak_bytes": self.peak_bytes,
            "counted_bytes": self.counted_bytes,
            "lasting_bytes": self.lasting_bytes,
            "reserved_bytes": self.reserved_bytes,
            "room_bytes": self.room_bytes,
            "kinds": dict(self.kinds),
            "layers": dict(self.layers),
            "step_s": self.step_s,
            "savings": [dataclasses.asdict(saving) for saving in self.savings],
            "grows": [dataclasses.asdict(one) for one in self.held],
            "notes": list(self.notes),
        }


def memory_of_job(job: Job, *, name: str, say: Say) -> MemoryFound:
    """`hotlap.memory` for a job, in this process."""
    with opened(job) as bench:
        trials = JobTrials(bench, say)
        return _found(name, trials.unchanged(), trials)


def update_of(seen: ProbeResult) -> Update:
    """A watched update of a training."""
    account = seen.account
    return Update(
        samples=seen.batch_size or seen.samples_an_update,
        effective_batch=seen.samples_an_update,
        peak_bytes=seen.peak_bytes if seen.device != "cpu" else account["peak_bytes"],
        step_s=seen.step_s,
        kinds=account["kinds"],
        layers=account["layers"],
        outputs=account["outputs"],
        why_whole=seen.why_fixed,
    )


def _found(name: str, seen: ProbeResult, trials: Trials) -> MemoryFound:
    """The memory of a watched training, with the savings that hotlap tries on it."""
    on_gpu, account, update = seen.device != "cpu", seen.account, update_of(seen)
    return MemoryFound(
        **vars(update),
        name=name,
        device=seen.device,
        counted_bytes=account["peak_bytes"],
        reserved_bytes=seen.taken_bytes if on_gpu else None,
        room_bytes=seen.room_bytes,
        course=tuple((kind, size) for kind, size in account["course"]),
        savings=tuple(savings(update, ModelFacts(**seen.model), trials) if seen.model else ()),
        held=tuple(GrowingMemory(**one) for one in account["held"]),
        notes=() if on_gpu else (COUNTED,),
    )


def memory_of_script(target: Target, *, seconds: float = MOST_S, say: Say = silent) -> MemoryFound:
    """`hotlap.memory` for a script: each try runs some of its updates in a new process."""
    say(f"memory     runs some updates of {target.name}")
    first = ProbeRequest(laps=LAPS, lap_s=LAP_S, counts=True, watches=True)
    seen = run_probe(target, replace(first, lengths=True, begins_s=max(seconds, BEGINS_S)))
    if seen.varies and seen.loader is not None and seen.out_of_memory is None:
        say("memory     runs it again with its longest samples")
        seen = replace(
            run_probe(target, replace(first, loader=seen.loader, longest=True)), longest=seen.longest, varies=True
        )
    if seen.out_of_memory is not None:
        raise TrainingError(f"{target.name} runs out of memory unchanged: {seen.out_of_memory}; lower its batch size")
    if not seen.account:
        raise TooShortError(f"{target.name} ended before hotlap had measured its memory; let it train longer")
    found = _found(target.name, seen, ScriptTrials(target, seen, say))
    longest = [seen.longest] if seen.varies and seen.longest else []
    return replace(found, notes=(RUNS, *longest, *how_to_write(found.savings), *found.notes))


# --- memory over one update, drawn into an SVG file ----------------------------------------------------------


MOST_POINTS = 1500
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 330, 76, 58, 280
_COLOURS = {"batch": "#8a8f98", "activations": "#2f6fde", "backward": "#c2570c", "update": "#1d8a4a"}
_WORDS = {"batch": "batch", "activations": "forward", "backward": "backward", "update": "update"}


def draw_course(course: Sequence[tuple[str, int]], path: Path, title: str) -> None:
    """Draw the bytes that lived after each operation of an update. Raises DataError without any operation."""
    if len(course) < 2:
        raise DataError("there is nothing to draw: hotlap has seen no operation of an update")
    every = max(1, len(course) // MOST_POINTS)
    # The largest of each part, so that the peak does not fall between two points.
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


def how_to_write(found: Iterable[Saving]) -> list[str]:
    """How to get each found saving in a script, in lines."""
    advice = {
        "micro-batches": "micro-batches: set the loader's batch_size, and update every few batches (timed: each)",
        "blocks checkpointed": "checkpointing: put torch.utils.checkpoint around each block; hotlap run does not",
        "autocast": "autocast: hotlap run tries it, and keeps it if it is faster and gradients agree",
    }
    possible = [one.what for one in found if one.peak_bytes is not None]
    return [line for word, line in advice.items() if any(word in what for what in possible)]
