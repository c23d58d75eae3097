"""What bounds a training now: the step, or what comes between its steps, or another process on the same machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotlap.core.plan import Plan
from hotlap.core.units import show_bytes, show_seconds
from hotlap.machine.catalogue import GpuModel
from hotlap.machine.host import SWAPS
from hotlap.monitor.bound import Diagnosis

MOST_OF_IT = 0.5
"""The share of the time from which on it is what bounds a training."""
OTHERS_BUSY = 0.2
"""The part of the time in which another process computes on the GPU, from which on it holds the training up."""
SLOWER = 0.85
"""Of the highest clock, where a lower one counts as throttled: less than that happens at full load anyway."""
FULL = 0.95
"""The part of the cores at work from which on none is free."""

ANSWERS = {
    "feeding": "hold the data in memory or on the GPU, or add workers: `hotlap workers`",
    "pageable copies": "pin the memory (pin_memory=True), or hold the data on the GPU",
    "launching": "capture the step (plan auto does), or take a larger batch: `hotlap batch`",
    "synchronising": "read values back less often: .item(), .cpu(), print",
    "memory traffic": "16 bits, channels last, a fused optimizer, torch.compile",
    "arithmetic": "TF32 or 16 bits; beyond that only a smaller model or a faster GPU helps",
    "another process": "end it or wait for it; of several GPUs choose a free one (CUDA_VISIBLE_DEVICES)",
    "throttling": "see to cooling and power: `nvidia-smi -q -d PERFORMANCE,POWER`",
    "swapping": "free memory on the host: end other work, take fewer workers, hold less data in memory",
    "battery": "plug the power supply in",
    "evaluation": "evaluate less often (eval_every), on fewer samples, or in larger batches (eval_batch)",
    "saving": "save less often (save_every), or into a folder on a faster disk",
    "computing": "make a step faster: plan auto tries what may help",
}
"""What can bound a training, and the move that answers it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What bounds a training, the figures behind it, and what to do."""

    bound: str
    """One of `ANSWERS`."""
    why: str
    """The figures, in words."""
    share: float | None = None
    """The part of the time that it takes, where that is known."""

    @property
    def answer(self) -> str:
        """The move that answers it."""
        return ANSWERS[self.bound]

    @property
    def line(self) -> str:
        """The verdict in one line."""
        return f"bound by {self.bound}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of a training over some seconds."""

    seconds: float
    steps: float
    """Updates made."""
    feeding_s: float = 0.0
    """How long the host waited for batches."""
    evaluation_s: float = 0.0
    saving_s: float = 0.0
    """How long training stood still for evaluations, and for checkpoints."""
    on_gpu: bool = False
    samples: Sequence[Mapping[str, Any]] = ()
    """Samples of this time, as `read_samples` gives them."""
    plan: Plan | None = None
    """The plan in force."""
    diagnosed: tuple[Diagnosis, Plan] | None = None
    """What was found of a step, and the plan that it was made under."""

    def mean(self, part: str, name: str) -> float | None:
        """The mean of a figure of the host, or of the training's GPU, over the samples that have it."""
        parts = [_part(sample, part) for sample in self.samples]
        found = [value for figures in parts if isinstance(value := figures.get(name), (int, float))]
        return sum(found) / len(found) if found else None


def verdict(seen: Seen) -> Verdict | None:
    """What bounds a training now; None where too little was seen.

    First a host that swaps. On a GPU then what is not its own either: another process, and clocks that were lowered.
    Then what stands between its steps, and at last the step itself. On a CPU other work is looked for last: every wait
    of the training is there for all to use.
    """
    if seen.seconds <= 0 or not (seen.steps or seen.evaluation_s or seen.saving_s):
        return None
    if not seen.on_gpu:
        return swapping(seen) or _between_steps(seen) or another_process(seen) or _of_a_step(seen)
    others = swapping(seen) or another_process(seen) or throttled(seen)
    return others or _between_steps(seen) or _of_a_step(seen)


def swapping(seen: Seen) -> Verdict | None:
    """Whether the host moves memory to its disk and back."""
    rate = seen.mean("host", "swap_bytes_per_s")
    if rate is None or rate < SWAPS:
        return None
    return Verdict(bound="swapping", why=f"the host moves {show_bytes(rate)} a second in and out of swap")


def on_battery(seen: Seen) -> Verdict | None:
    """Whether the machine runs on its battery."""
    charge = _part(seen.samples[-1], "host").get("battery") if seen.samples else None
    if not isinstance(charge, (int, float)):
        return None
    return Verdict(bound="battery", why=f"the power supply is not plugged in, {_percent(charge)} are left")


def another_process(seen: Seen) -> Verdict | None:
    """Whether somebody else computes on the training's GPU, or takes the cores that it would."""
    if seen.on_gpu:
        busy = seen.mean("gpu", "others_busy")
        if busy is None or busy < OTHERS_BUSY:
            return None
        last = _part(seen.samples[-1], "gpu")
        held, pids = last.get("others_bytes"), last.get("other_pids")
        whose = f" (pid {', '.join(map(str, pids))})" if isinstance(pids, list) and pids else ""
        memory = f" and holds {show_bytes(held)}" if isinstance(held, (int, float)) else ""
        why = f"another process{whose} computes on the GPU {_percent(busy)} of the time{memory}"
        return Verdict(bound="another process", why=why, share=busy)
    cores, busy, own = (seen.mean("host", name) for name in ("cores", "cores_busy", "own_cores"))
    has_workers = seen.plan is not None and bool(seen.plan.feed.workers)
    if cores is None or busy is None or own is None or has_workers or busy < FULL * cores or busy - own < cores / 4:
        return None
    why = f"other work takes {busy - own:.1f} of {cores:.0f} cores, and none is free"
    return Verdict(bound="another process", why=why, share=(busy - own) / cores)


def throttled(seen: Seen) -> Verdict | None:
    """Whether the clocks of the GPU were lowered while it had work to do."""
    if not seen.on_gpu or not seen.samples:
        return None
    reasons = [words for sample in seen.samples for words in _part(sample, "gpu").get("throttled") or ()]
    clock, most = seen.mean("gpu", "sm_mhz"), seen.mean("gpu", "most_sm_mhz")
    busy = seen.mean("gpu", "busy")
    if len(reasons) < MOST_OF_IT * len(seen.samples) or not clock or not most or clock > SLOWER * most:
        return None
    if busy is not None and busy < MOST_OF_IT:  # a GPU that has little to do clocks down by itself
        return None
    words = ", ".join(dict.fromkeys(reasons))
    heat, power = seen.mean("gpu", "temperature_c"), seen.mean("gpu", "power_w")
    figures = [*([f"{heat:.0f} °C"] if heat else []), *([f"{power:.0f} W"] if power else [])]
    why = f"the GPU runs at {clock:,.0f} of {most:,.0f} MHz ({words}{''.join(f', {one}' for one in figures)})"
    return Verdict(bound="throttling", why=why, share=1 - clock / most)


def _between_steps(seen: Seen) -> Verdict | None:
    for bound, took_s, what in (
        ("evaluation", seen.evaluation_s, "evaluations take"),
        ("saving", seen.saving_s, "checkpoints hold training up for"),
        ("feeding", seen.feeding_s, "the host waits for batches"),
    ):
        share = min(1.0, took_s / seen.seconds)
        if share >= MOST_OF_IT:
            return Verdict(bound=bound, why=f"{what} {_percent(share)} of the time", share=share)
    return None


def _of_a_step(seen: Seen) -> Verdict:
    diagnosis, plan = seen.diagnosed or (None, None)
    if diagnosis is not None and plan == seen.plan:
        _, _, why = diagnosis.line().partition(": ")
        return Verdict(bound=diagnosis.bound, why=why, share=diagnosis.shares[diagnosis.bound])
    busy = seen.mean("gpu", "busy") if seen.on_gpu else None
    if busy is not None and busy < MOST_OF_IT:
        idle = f"the GPU has nothing to do {_percent(1 - busy)} of the time"
        if diagnosis is not None and diagnosis.waits and plan is not None and _issues_the_same(plan, seen.plan):
            why = f"{idle}, and the host waits for it {diagnosis.waits:g} times in a step"
            return Verdict(bound="synchronising", why=why, share=1 - busy)
        return Verdict(bound="launching", why=f"{idle}, and batches come fast enough", share=1 - busy)
    if seen.on_gpu and diagnosis is not None and seen.plan is not None and seen.steps:
        step_s, precision = seen.seconds / seen.steps, seen.plan.numerics.precision
        arithmetic_s = diagnosis.arithmetic_s.get(precision, diagnosis.arithmetic_s.get("fp32", 0.0))
        bound = "arithmetic" if arithmetic_s > diagnosis.traffic_s else "memory traffic"
        took_s = min(step_s, max(arithmetic_s, diagnosis.traffic_s))
        why = f"it takes about {show_seconds(took_s)} of {show_seconds(step_s)}"
        return Verdict(bound=bound, why=why, share=took_s / step_s)
    what = "the GPU computes" if busy is not None else "the step takes"
    share = busy if busy is not None else max(0.0, 1 - (seen.feeding_s + seen.evaluation_s) / seen.seconds)
    return Verdict(bound="computing", why=f"{what} {_percent(share)} of the time", share=share)


def _issues_the_same(diagnosed: Plan, plan: Plan | None) -> bool:
    """Whether steps of both plans ask the device for the same, one operation after the other."""
    return plan is not None and plan.execution.mode == diagnosed.execution.mode == "eager"


# --- how far from what the hardware can do -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Headway:
    """How much of what the device can do a training uses."""

    flops_per_s: float
    mfu: float | None
    """Of the published peak in its precision; None where the catalogue does not know the device."""
    floor_s: float | None
    """The least seconds of a step on this device in this precision; None where that was not found."""
    step_s: float

    @property
    def line(self) -> str:
        """It in one line."""
        parts = [f"{self.flops_per_s / 1e12:.3g} TFLOPS"]
        if self.mfu is not None:
            parts.append(f"{_percent(self.mfu)} of the peak (MFU)")
        if self.floor_s:
            floor, step = show_seconds(self.floor_s), show_seconds(self.step_s)
            parts.append(f"{self.step_s / self.floor_s:.3g}x its floor ({floor} of {step})")
        return " · ".join(parts)


def headway(diagnosis: Diagnosis, step_s: float, precision: str, model: GpuModel | None) -> Headway:
    """How much of the device a training uses whose steps take so long, in the precision that it computes in."""
    rate = diagnosis.flops / step_s
    peak = model.flops(precision) or model.fp32_flops if model is not None else None
    floor_s = diagnosis.floor_s.get(precision) or None
    return Headway(flops_per_s=rate, mfu=None if peak is None else rate / peak, floor_s=floor_s, step_s=step_s)


def _part(sample: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """The figures of the host, or of the first GPU, which is the training's."""
    found = (sample.get("gpus") or [{}])[0] if part == "gpu" else sample.get(part)
    return found if isinstance(found, Mapping) else {}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
