"""Where the memory of a training goes: by kind and by layer, over an update, and what would bring it down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap.core.errors import TrainingError
from hotlap.core.job import Job
from hotlap.core.plan import Plan
from hotlap.core.units import show_bytes, show_seconds
from hotlap.data.columns import tensors_in
from hotlap.engine.blocks import repeated_blocks
from hotlap.engine.precision import why_not_precision
from hotlap.engine.step import Window
from hotlap.kit.bench import Bench, know_training, opened, parameters_of
from hotlap.kit.catalogue import DENSE, RECURRENT, TEXT, UNITS, kind_of_model
from hotlap.kit.child import Wish
from hotlap.kit.growing import Held, Turns
from hotlap.kit.live import LiveTensors
from hotlap.kit.picture import draw_course
from hotlap.kit.telling import sayer
from hotlap.kit.visiting import visit
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
    "unseen": "within kernels",
}


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Something that would bring the peak down."""

    what: str
    predicted_bytes: int
    predicted_step_s: float | None = None
    """None where it cannot be told without trying."""
    peak_bytes: int | None = None
    """As it was measured; None where it was not tried."""
    step_s: float | None = None
    changes: str = ""
    """What it changes in the training beyond rounding, if anything."""


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
    """The most that the tensors that were seen took: what `kinds` add up to."""
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
        """What the allocator gave beside the tensors that were seen: working memory of kernels, and its rounding."""
        return max(0, self.peak_bytes - self.counted_bytes)

    def draw(self, path: str | Path) -> None:
        """Draw memory over one update into an SVG file."""
        draw_course(self.course, Path(path), f"Memory over one update of {self.name}")

    def summary(self) -> str:
        """The account, for people."""
        lines = [
            f"{'peak':<21} {show_bytes(self.peak_bytes):>10}  {self.samples:,} samples at once, after the first update"
        ]
        whole = {**self.kinds, "unseen": self.unseen_bytes}
        for kind in (*KINDS, "unseen"):
            if whole.get(kind):
                share = whole[kind] / max(1, self.peak_bytes)
                lines.append(
                    f"  {_TOLD[kind]:<19} {show_bytes(whole[kind]):>10}  {share:>4.0%} {'#' * round(24 * share)}"
                )
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
            lines += ["", "what would bring it down"]
            lines += [f"  {self._saving(one)}" for one in self.savings]
        lines.append("")
        lines += [f"grows      {one}" for one in self.held] or [
            "grows      nothing: no memory is held from update to update"
        ]
        return "\n".join([*lines, *(f"note       {note}" for note in self.notes)])

    def _saving(self, one: Saving) -> str:
        guess = f"{show_bytes(one.predicted_bytes)} predicted"
        if one.predicted_step_s is not None:
            guess += f", {show_seconds(one.predicted_step_s)} a step"
        if one.peak_bytes is None:
            seen = "not tried"
        else:
            pace = "" if one.step_s is None else f", {show_seconds(one.step_s)} a step"
            seen = f"{show_bytes(one.peak_bytes)} measured{pace}"
        return f"{one.what}: {guess}; {seen}" + (f"; {one.changes}" if one.changes else "")

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


def memory(job: Job, *, progress: bool = True, name: str = "job", say: Say | None = None) -> MemoryFound:
    """Find where the memory of a job goes, at its own batch size with its longest samples, after the first update.

    The job is left as it was. Raises TrainingError where not even one update fits.
    """
    say = say or sayer(progress)
    with opened(job) as bench:
        return _Account(bench, say).found(name)


class _Account:
    """The account of one rig."""

    def __init__(self, bench: Bench, say: Say) -> None:
        self._bench, self._rig, self._say = bench, bench.rig, say
        self._size = min(bench.course.batch_size, bench.most)
        self._window = bench.window(self._size, bench.job.accumulate)
        self._kinds: dict[str, int] = {}
        self._outputs: dict[str, int] = {}

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
        live = self._watched(self._window)
        self._kinds = {kind: live.at_peak.get(kind, 0) for kind in KINDS}
        on_gpu = rig.device.type == "cuda"
        held = self._grows()
        for one in held:
            self._say(f"memory     grows: {one}")
        notes = [] if on_gpu else ["on the CPU memory is counted from the sizes of tensors, not measured"]
        return MemoryFound(
            name=name,
            device=str(rig.device),
            samples=self._size,
            peak_bytes=peak if on_gpu else live.peak_bytes,
            counted_bytes=live.peak_bytes,
            reserved_bytes=reserved if on_gpu else None,
            room_bytes=bench.room_bytes,
            kinds=self._kinds,
            layers={layer: size for layer, size in live.layers_at_peak.items() if size},
            course=tuple(live.course),
            step_s=step_s,
            savings=tuple(self._savings(peak if on_gpu else live.peak_bytes, step_s)),
            held=tuple(held),
            notes=tuple(notes),
        )

    def _live(self, window: Window, *, lines: bool = False) -> LiveTensors:
        """Counts what is there before an update: its batch too, where it is on the device already."""
        self._bench.tidy()
        live = LiveTensors(self._rig.device, lines=lines)
        know_training(live, self._rig)
        live.know((tensor for piece in window.pieces for tensor in tensors_in(piece)), "batch")
        return live

    def _watched(self, window: Window) -> LiveTensors:
        live = self._live(window)
        live.forget_peak()
        with Watch(live, parameters_of(self._rig), self._rig.modules) as watch:
            self._rig.step(window)
            self._rig.wait()
        self._outputs = watch.outputs
        return live

    def _grows(self) -> list[Held]:
        turns = Turns(self._live(self._window, lines=True))
        with Watch(turns.live, parameters_of(self._rig), self._rig.modules):
            while not turns.are_done:
                self._rig.step(self._window)
                self._rig.wait()
                turns.end()
        return turns.growth()

    # --- what would bring it down ------------------------------------------------------------------

    def _savings(self, peak: int, step_s: float) -> list[Saving]:
        found = []
        if self._size > self._bench.least:
            found.append(self._smaller_pieces(peak, step_s))
        blocks = len(repeated_blocks(self._rig.model))
        plan = self._rig.plan.but(checkpoint=blocks)
        if blocks and self._rig.supports(plan) is None:
            found.append(self._checkpointed(plan, blocks, peak, step_s))
        for precision in ("bf16", "fp16"):
            if self._rig.plan.numerics.precision == "fp32" and why_not_precision(precision, self._rig.device) is None:
                kept = self._kinds["activations"] // 2 - self._kinds["parameters"] // 2
                found.append(Saving(what=f"{precision} autocast", predicted_bytes=peak - max(0, kept)))
                break
        return [*found, *self._smaller_samples(peak, step_s)]

    def _smaller_pieces(self, peak: int, step_s: float) -> Saving:
        half = max(self._bench.least, -(-self._size // 2))
        with_samples = self._kinds["activations"] + self._kinds["backward"] + self._kinds["batch"]
        cautions = self._rig.cautions(self._rig.plan.but(micro_batch=half))
        plan, pieces = self._rig.plan.but(micro_batch=half), -(-sum(self._window.sizes) // half)
        seen = self._tried(plan, self._bench.window(half, pieces))
        # All pieces but the first have the gradients of those before them beside their activations.
        gradients = self._kinds["parameters"] - self._kinds["gradients"]
        predicted = peak - round(with_samples * (1 - half / self._size)) + max(0, gradients)
        return Saving(
            what=f"micro-batches of {half:,}, the same effective batch",
            predicted_bytes=predicted,
            predicted_step_s=step_s,
            changes="; ".join(cautions),
            **seen,
        )

    def _checkpointed(self, plan: Plan, blocks: int, peak: int, step_s: float) -> Saving:
        names = {id(part): name for name, part in self._rig.model.named_modules()}
        rows = [names[id(block)] for block in repeated_blocks(self._rig.model)]
        live = self._watched(self._window)
        inside = {
            row: sum(s for layer, s in live.layers_at_peak.items() if layer == row or layer.startswith(f"{row}."))
            for row in rows
        }
        kept = sum(self._outputs.get(row, 0) for row in rows)
        saved = max(0, sum(inside.values()) - kept - max(inside.values()))
        share = sum(inside.values()) / max(1, self._kinds["activations"])
        return Saving(
            what=f"all {blocks} blocks checkpointed",
            predicted_bytes=peak - saved,
            predicted_step_s=step_s * (1 + min(1.0, share) / 3),
            **self._tried(plan, self._window),
        )

    def _tried(self, plan: Plan, window: Window) -> dict[str, Any]:
        """Peak and pace under a plan, of real updates."""
        before = self._rig.plan
        self._rig.use(plan, outcome="measured")
        try:
            if self._bench.trains(window) is not None:
                return {}
            return {"peak_bytes": self._bench.peak_bytes(window)[0], "step_s": self._bench.step_s(window)}
        finally:
            self._rig.use(before, outcome="measured")

    def _smaller_samples(self, peak: int, step_s: float) -> list[Saving]:
        """Shorter sequences or smaller pictures, of which less is kept; that is another training."""
        kind = kind_of_model(self._rig.model, self._window.pieces[0])
        if kind.name == DENSE:
            return []
        with_samples = self._kinds["activations"] + self._kinds["backward"] + self._kinds["batch"]
        # Half as many tokens, or three quarters of a side: about half of what is computed and kept.
        side = 0.5 if kind.name in (TEXT, RECURRENT) else 0.75
        part = side if kind.name in (TEXT, RECURRENT) else side**2
        return [
            Saving(
                what=f"{round(side * kind.size)} {UNITS[kind.name]} in place of {kind.size}",
                predicted_bytes=peak - round((1 - part) * with_samples),
                predicted_step_s=part * step_s,
                changes="it changes what is learnt",
            )
        ]


# --- scripts ---------------------------------------------------------------------------------------------


def memory_of_script(target: Target, *, progress: bool = True, say: Say | None = None) -> MemoryFound:
    """As `memory`, of somebody's script, which is run as it is for some updates in a process of its own."""
    say = say or sayer(progress)
    say(f"memory     {target.name} is run for some updates")
    seen = visit(target, Wish(laps=1, counts=True, watches=True))
    if seen.out_of_memory is not None:
        raise TrainingError(f"{target.name} runs out of memory as it is: {seen.out_of_memory}; lower its batch size")
    on_gpu = seen.device != "cpu"
    spent, samples = seen.laps[0]
    account = seen.account
    return MemoryFound(
        name=target.name,
        device=seen.device,
        samples=seen.batch_size or seen.samples_an_update,
        peak_bytes=seen.peak_bytes if on_gpu else account["peak_bytes"],
        counted_bytes=account["peak_bytes"],
        reserved_bytes=seen.taken_bytes if on_gpu else None,
        room_bytes=seen.room_bytes,
        kinds=account["kinds"],
        layers=account["layers"],
        course=tuple((kind, size) for kind, size in account["course"]),
        step_s=spent * seen.samples_an_update / samples if samples else None,
        held=tuple(Held(**one) for one in account["held"]),
        notes=(
            "the script was run for some updates and then ended; what it writes before them was written",
            "what would bring it down is told of a job alone; which batch fits a script: hotlap batch",
            *(() if on_gpu else ("on the CPU memory is counted from the sizes of tensors, not measured",)),
        ),
    )
