"""Where the memory of a training goes: by kind and by layer, over an update, and what would bring it down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from hotlap.core.errors import DataError, HotlapError, TrainingError
from hotlap.core.job import Job
from hotlap.core.plan import Plan
from hotlap.core.terminal import Say, clean, silent
from hotlap.core.units import show_bytes
from hotlap.data.sources import tensors_in
from hotlap.engine.step import Window
from hotlap.kit.bench import Bench, count_training, opened, trained_tensors
from hotlap.kit.probe import BEGINS_S, RUNS, ProbeRequest, ProbeResult, run_probe
from hotlap.kit.savings import ModelFacts, Saving, Tried, Update, model_facts, savings, table
from hotlap.kit.search import TooShortError
from hotlap.kit.tensor_memory import KINDS, GrowingMemory, GrowthWatch, LiveTensors, UpdateWatch
from hotlap.recipes.plots import round_marks
from hotlap.script.running import Target
from hotlap.store.files import write_text

LAYERS = 10
"""So many layers are shown."""
_TOLD = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "backward": "backward pass",
    "update": "the update itself",
    "batch": "batch, and all else",
    "before": "there before: data",
    "kernels": "within kernels",
    "libraries": "kept by cuBLAS",
    "unseen": "beside all tensors",
}


@dataclass(frozen=True, kw_only=True)
class MemoryFound:
    """Where a training's memory goes."""

    name: str
    device: str
    samples: int
    """Samples that go through the model at once."""
    peak_bytes: int
    """The most that tensors took in an update; on a GPU by torch's allocator, else counted."""
    counted_bytes: int
    """The most that tensors and operations were seen to take: what `kinds` add up to."""
    reserved_bytes: int | None
    """What torch had taken from the GPU at most; None on the CPU."""
    room_bytes: int
    """What the process may take."""
    kinds: Mapping[str, int]
    """At the peak, by what it is for."""
    layers: Mapping[str, int]
    """Activations at the peak, by the module that made them."""
    course: tuple[tuple[str, int], ...]
    """Over one update: what was being done, and the bytes that lived."""
    step_s: float | None
    savings: tuple[Saving, ...] = ()
    held: tuple[GrowingMemory, ...] = ()
    """Memory that grows from update to update."""
    notes: tuple[str, ...] = ()

    @property
    def lasting_bytes(self) -> int:
        """What tensors take between two updates."""
        return self.course[-1][1] if self.course else 0

    @property
    def unseen_bytes(self) -> int:
        """What the allocator gave beside all that was seen: what libraries keep for themselves, and its rounding."""
        return max(0, self.peak_bytes - self.counted_bytes)

    def draw(self, path: str | Path) -> None:
        """Draw memory over one update into an SVG file."""
        draw_course(self.course, Path(path), f"Memory over one update of {self.name}")

    def summary(self) -> str:
        """The account, for people."""
        at_once = f"{self.samples:,} samples at once, " if self.samples else ""  # no loader says how many
        lines = [f"{'peak':<21} {show_bytes(self.peak_bytes):>10}  {at_once}after the first update"]
        whole = {**self.kinds, "unseen": self.unseen_bytes}
        for kind in (*KINDS, "unseen"):
            if whole.get(kind):
                share = whole[kind] / max(1, self.peak_bytes)
                bar = "#" * round(24 * share)
                lines.append(f"  {_TOLD[kind]:<19} {show_bytes(whole[kind]):>10}  {share:>4.0%} {bar}".rstrip())
        lines.append(f"{'between updates':<21} {show_bytes(self.lasting_bytes):>10}  allocated all the time")
        if self.reserved_bytes is not None:
            beside = show_bytes(self.reserved_bytes - self.peak_bytes)
            lines.append(f"{'taken by torch':<21} {show_bytes(self.reserved_bytes):>10}  {beside} of it kept for later")
        left = self.room_bytes - (self.reserved_bytes if self.reserved_bytes is not None else 0)
        lines.append(
            f"{'left':<21} {show_bytes(left):>10}  of {show_bytes(self.room_bytes)} that this process may take"
        )
        top = sorted(self.layers.items(), key=lambda one: -one[1])[:LAYERS]
        if top:
            lines += ["", "activations at the peak, by layer"]
            lines += [f"  {show_bytes(size):>10}  {name}" for name, size in top if size]
        if self.savings:
            lines += ["", *table(self.savings, self.peak_bytes, self.step_s)]
        lines.append("")
        lines += [f"grows      {one}" for one in self.held] or [
            "grows      nothing: no memory is held from update to update"
        ]
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
            "savings": [dataclasses.asdict(one) for one in self.savings],
            "grows": [dataclasses.asdict(one) for one in self.held],
            "notes": list(self.notes),
        }


def memory_of_job(job: Job, *, name: str, say: Say) -> MemoryFound:
    """As `hotlap.memory` has it, of a job, in this process."""
    with opened(job) as bench:
        return _Account(bench, say).found(name)


class _Account:
    """The account of one rig."""

    def __init__(self, bench: Bench, say: Say) -> None:
        self._bench, self._rig, self._say = bench, bench.rig, say
        self._size = min(bench.dataset.batch_size, bench.most)
        self._window = bench.window(self._size, bench.job.accumulate)

    def found(self, name: str) -> MemoryFound:
        bench, rig = self._bench, self._rig
        self._say(f"memory     updates of {sum(self._window.sizes):,} samples, {self._size:,} at once")
        why_not = bench.trains(self._window)
        if why_not is not None:
            raise TrainingError(
                f"an update with {self._size:,} samples at once does not fit: {why_not}; see what does: hotlap batch"
            )
        peak, reserved = bench.peak_bytes(self._window)
        step_s = bench.step_s(self._window)
        live, outputs = self._watched(self._window)
        kinds = {kind: live.at_peak.get(kind, 0) for kind in KINDS}
        on_gpu = rig.device.type == "cuda"
        update = Update(
            samples=self._size,
            effective_batch=sum(self._window.sizes),
            peak_bytes=peak if on_gpu else live.peak_bytes,
            step_s=step_s,
            kinds=kinds,
            layers={layer: size for layer, size in live.layers_at_peak.items() if size},
            outputs=outputs,
        )
        held = self._grows()
        for one in held:
            self._say(f"memory     grows: {one}")
        notes = [] if on_gpu else ["on the CPU memory is counted from the sizes of tensors, not measured"]
        return MemoryFound(
            name=name,
            device=str(rig.device),
            samples=self._size,
            peak_bytes=update.peak_bytes,
            counted_bytes=live.peak_bytes,
            reserved_bytes=reserved if on_gpu else None,
            room_bytes=bench.room_bytes,
            kinds=update.kinds,
            layers=update.layers,
            course=tuple(live.course),
            step_s=step_s,
            savings=tuple(savings(update, model_facts(rig.model, self._window.pieces[0], rig.device), self)),
            held=tuple(held),
            notes=tuple(notes),
        )

    def _live(self, window: Window, *, lines: bool = False) -> LiveTensors:
        """Counts what is there before an update: its batch too, where it is on the device already."""
        self._bench.tidy()
        live = LiveTensors(self._rig.device, lines=lines)
        live.know_libraries()
        count_training(live, self._rig)
        live.know((tensor for piece in window.pieces for tensor in tensors_in(piece)), "batch")
        return live

    def _watched(self, window: Window) -> tuple[LiveTensors, dict[str, int]]:
        """What lived over an update, and the bytes that each module gave."""
        live = self._live(window)
        live.forget_peak()
        with UpdateWatch(live, trained_tensors(self._rig), self._rig.modules) as watch:
            self._rig.step(window)
            self._rig.wait()
        return live, watch.outputs

    def _grows(self) -> list[GrowingMemory]:
        turns = GrowthWatch(self._live(self._window, lines=True))
        with UpdateWatch(turns.live, trained_tensors(self._rig), self._rig.modules):
            while not turns.are_done:
                self._rig.step(self._window)
                self._rig.wait()
                turns.end()
        return turns.growth()

    # --- what would bring it down ------------------------------------------------------------------

    def in_pieces(self, size: int) -> Tried:
        """Updates of the same samples, of which so many go through the model at once."""
        plan, pieces = self._rig.plan.but(micro_batch=size), -(-sum(self._window.sizes) // size)
        tried = self._tried(plan, self._bench.window(size, pieces))
        return replace(tried, changes="; ".join(self._rig.cautions(plan)))

    def checkpointed(self, blocks: int) -> Tried:
        """Updates with all blocks checkpointed."""
        return self._tried(self._rig.plan.but(checkpoint=blocks), self._window)

    def in_precision(self, precision: str) -> Tried:
        """Updates under autocast."""
        return self._tried(self._rig.plan.but(precision=precision), self._window)

    def _tried(self, plan: Plan, window: Window) -> Tried:
        """Peak and pace under a plan, of real updates."""
        before = self._rig.plan
        why_not = self._rig.supports(plan)
        if why_not is not None:
            return Tried(why_not=why_not)
        self._rig.use(plan, outcome="measured")
        try:
            why_not = self._bench.trains(window)
            if why_not is not None:
                return Tried(why_not=why_not)
            return Tried(peak_bytes=self._bench.peak_bytes(window)[0], step_s=self._bench.step_s(window))
        finally:
            self._rig.use(before, outcome="measured")


# --- scripts ---------------------------------------------------------------------------------------------


def memory_of_script(target: Target, *, seconds: float = 120.0, say: Say = silent) -> MemoryFound:
    """The same of somebody's script, which is run for some updates in a process of its own, and so for each try."""
    say(f"memory     {target.name} is run for some updates")
    first = ProbeRequest(laps=LAPS, lap_s=LAP_S, counts=True, watches=True)
    seen = run_probe(target, replace(first, lengths=True, begins_s=max(seconds, BEGINS_S)))
    if seen.varies and seen.loader is not None and seen.out_of_memory is None:
        say("memory     again with its longest samples")
        seen = replace(
            run_probe(target, replace(first, loader=seen.loader, longest=True)), longest=seen.longest, varies=True
        )
    if seen.out_of_memory is not None:
        raise TrainingError(f"{target.name} runs out of memory as it is: {seen.out_of_memory}; lower its batch size")
    if not seen.account:
        raise TooShortError(f"{target.name} is over before its memory was looked at; let it train longer")
    on_gpu, account = seen.device != "cpu", seen.account
    update = Update(
        samples=seen.batch_size or seen.samples_an_update,
        effective_batch=seen.samples_an_update,
        peak_bytes=seen.peak_bytes if on_gpu else account["peak_bytes"],
        step_s=seen.step_s,
        kinds=account["kinds"],
        layers=account["layers"],
        outputs=account["outputs"],
        why_whole=seen.why_fixed,
    )
    found = savings(update, ModelFacts(**seen.model), ScriptTrials(target, seen, say)) if seen.model else []
    notes = [
        RUNS,
        *([seen.longest] if seen.varies and seen.longest else []),
        *words_on(found),
        *([] if on_gpu else ["on the CPU memory is counted from the sizes of tensors, not measured"]),
    ]
    return MemoryFound(
        name=target.name,
        device=seen.device,
        samples=update.samples,
        peak_bytes=update.peak_bytes,
        counted_bytes=account["peak_bytes"],
        reserved_bytes=seen.taken_bytes if on_gpu else None,
        room_bytes=seen.room_bytes,
        kinds=update.kinds,
        layers=update.layers,
        course=tuple((kind, size) for kind, size in account["course"]),
        step_s=update.step_s,
        savings=tuple(found),
        held=tuple(GrowingMemory(**one) for one in account["held"]),
        notes=tuple(notes),
    )


# --- memory over one update, drawn into an SVG file ----------------------------------------------------------


MOST_POINTS = 1500
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 330, 76, 58, 280
_COLOURS = {"batch": "#8a8f98", "activations": "#2f6fde", "backward": "#c2570c", "update": "#1d8a4a"}
_WORDS = {"batch": "batch", "activations": "forward", "backward": "backward", "update": "update"}


def draw_course(course: Sequence[tuple[str, int]], path: Path, title: str) -> None:
    """Draw the bytes that lived after each operation of an update. Raises DataError where there is none."""
    if len(course) < 2:
        raise DataError("no operation of an update was seen, so there is nothing to draw")
    every = max(1, len(course) // MOST_POINTS)
    # Of each part the largest: the peak must not fall between two points.
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


# --- what would lower the peak of a script, each tried in a process of its own -------------------------------


LAPS, LAP_S = 3, 0.05
"""Laps of each look, of which the middle one counts, and what each takes at least."""


class ScriptTrials:
    """Tries things in a script: each takes a process of its own."""

    def __init__(self, target: Target, own: ProbeResult, say: Callable[[str], None]) -> None:
        self._target, self._own, self._say = target, own, say
        self._request = ProbeRequest(laps=LAPS, lap_s=LAP_S, counts=True, loader=own.loader, longest=own.varies)

    def in_pieces(self, size: int) -> Tried:
        """Batches of this size, with an update after each; gradients stay in memory as while they are accumulated."""
        request = replace(self._request, change={"batch_size": size}, keeps_gradients=True)
        tried = self._tried(f"micro-batches of {size:,}", request)
        norms = "batch norms see micro-batches, so their statistics differ"
        return replace(tried, changes=norms) if self._own.model["least"] > 1 else tried

    def checkpointed(self, blocks: int) -> Tried:
        """Updates with all blocks checkpointed."""
        return self._tried(f"all {blocks} blocks checkpointed", replace(self._request, checkpoint=True))

    def in_precision(self, precision: str) -> Tried:
        """Updates under autocast, as `hotlap run --plan` has it."""
        return self._tried(f"{precision} autocast", replace(self._request, precision=precision))

    def _tried(self, what: str, request: ProbeRequest) -> Tried:
        self._say(f"memory     {what}: tried")
        try:
            seen = run_probe(self._target, request)
        except HotlapError as error:
            return Tried(why_not=str(error).partition("\n")[0])
        over = None if seen.peak_bytes else f"{self._target.name} is over before its memory was looked at"
        why_not = seen.why_not or seen.out_of_memory or over
        if why_not is not None:
            return Tried(why_not=why_not)
        # Of smaller batches, as many as have the samples of an update.
        step_s = seen.step_s if seen.sample_s is None else seen.sample_s * self._own.samples_an_update
        return Tried(peak_bytes=seen.peak_bytes, step_s=step_s)


def words_on(found: Iterable[Saving]) -> list[str]:
    """How somebody gets in a script what was found to be had, in lines."""
    told = {
        "micro-batches": "micro-batches: the loader's batch_size, an update every so many (timed with one for each)",
        "blocks checkpointed": "checkpointing: torch.utils.checkpoint around each block; hotlap run leaves that to you",
        "autocast": "autocast: hotlap run tries it by itself, and keeps it where it is faster and gradients agree",
    }
    had = [one.what for one in found if one.peak_bytes is not None]
    return [line for word, line in told.items() if any(word in what for what in had)]
