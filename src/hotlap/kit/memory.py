"""Where the memory of a training goes: by kind and by layer, over an update, and what would bring it down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotlap.core.errors import TrainingError
from hotlap.core.job import Job
from hotlap.core.plan import Plan
from hotlap.core.terminal import clean
from hotlap.core.units import show_bytes
from hotlap.data.columns import tensors_in
from hotlap.engine.step import Window
from hotlap.kit.bench import Bench, know_training, opened, parameters_of
from hotlap.kit.growing import Held, Turns
from hotlap.kit.live import LiveTensors
from hotlap.kit.looks import BEGINS_S, Wish
from hotlap.kit.picture import draw_course
from hotlap.kit.savings import ModelFacts, Saving, Tried, Update, model_facts, savings, table
from hotlap.kit.script_savings import LAP_S, LAPS, ScriptTrials, words_on
from hotlap.kit.search import TooShortError
from hotlap.kit.telling import silent
from hotlap.kit.visiting import RUNS, visit
from hotlap.kit.watching import KINDS, Watch
from hotlap.script.running import Target

LAYERS = 10
"""So many layers are shown."""
Say = Callable[[str], None]
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
    held: tuple[Held, ...] = ()
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
        self._size = min(bench.course.batch_size, bench.most)
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
        know_training(live, self._rig)
        live.know((tensor for piece in window.pieces for tensor in tensors_in(piece)), "batch")
        return live

    def _watched(self, window: Window) -> tuple[LiveTensors, dict[str, int]]:
        """What lived over an update, and the bytes that each module gave."""
        live = self._live(window)
        live.forget_peak()
        with Watch(live, parameters_of(self._rig), self._rig.modules) as watch:
            self._rig.step(window)
            self._rig.wait()
        return live, watch.outputs

    def _grows(self) -> list[Held]:
        turns = Turns(self._live(self._window, lines=True))
        with Watch(turns.live, parameters_of(self._rig), self._rig.modules):
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
    first = Wish(laps=LAPS, lap_s=LAP_S, counts=True, watches=True)
    seen = visit(target, replace(first, lengths=True, begins_s=max(seconds, BEGINS_S)))
    if seen.varies and seen.loader is not None and seen.out_of_memory is None:
        say("memory     again with its longest samples")
        seen = replace(
            visit(target, replace(first, loader=seen.loader, longest=True)), longest=seen.longest, varies=True
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
        held=tuple(Held(**one) for one in account["held"]),
        notes=tuple(notes),
    )
