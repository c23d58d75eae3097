"""`hotlap workers`: how batches should come, timed by the real step."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from hotlap.core.errors import HotlapError
from hotlap.core.job import Job
from hotlap.core.plan import Feed, Plan
from hotlap.core.terminal import Say, clean, silent
from hotlap.core.units import show_seconds
from hotlap.data.sequences import lengths_in
from hotlap.engine.rig import Place
from hotlap.engine.step import Window
from hotlap.kit.batch import MOST_S
from hotlap.kit.bench import Bench, opened
from hotlap.kit.probe import BEGINS_S, FEEDS, LAP_ROUNDS, RUNS, ProbeRequest, ProbeResult, run_probe
from hotlap.kit.samples import Cost, costs_of
from hotlap.machine.limits import read_cpu
from hotlap.script.running import Target
from hotlap.tuner.stats import LEAST_GAIN, Comparison, Estimate

LAP_S, LEAST_WINDOWS = 0.1, 4
"""Least seconds and least updates of a lap."""
MOST_WINDOWS = 256
MOST_QUADS = 12
NEAR = 1.05
"""If the steps of two settings differ by less, the one with fewer workers counts as better."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to bring batches, and its timings."""

    words: str
    feed: Feed
    is_own: bool = False
    start_s: float | None = None
    """Until the first batch: the start of workers, the copy of data to the device."""
    step_s: float | None = None
    """An update in steady state, with its batch; None if not tried."""
    why_not: str | None = None


@dataclass(frozen=True, kw_only=True)
class WorkersFound:
    """How the batches of a training should come."""

    name: str
    device: str
    cores: int
    settings: tuple[Setting, ...]
    bare_s: float | None
    """An update with its batch ready, which no feed makes faster; None if unknown."""
    compared: Estimate | None
    """How many times as fast the best is as the training's own setting, from laps in turn."""
    verdict: str | None
    """See `Comparison.verdict`."""
    transforms: tuple[Cost, ...] = ()
    """The time of each of the dataset's transforms for a sample, and of the rest."""
    notes: tuple[str, ...] = ()
    writes: Callable[[Feed], str] = field(repr=False, default=str)

    @property
    def own(self) -> Setting:
        """The training's own setting."""
        return next(setting for setting in self.settings if setting.is_own)

    @property
    def best(self) -> Setting:
        """The fastest; among settings near it, the one with the fewest workers."""
        return best_of(self.settings)

    @property
    def best_count(self) -> int | None:
        """The best number of workers of a DataLoader; None if hotlap has tried none."""
        by_loader = [one for one in self.settings if one.feed.kind == "loader" and one.step_s is not None]
        return best_of(by_loader).feed.workers if by_loader else None

    @property
    def matters(self) -> bool:
        """Whether another setting is faster by more than chance."""
        return self.verdict == "accepted" and not self.best.is_own

    @property
    def advice(self) -> str:
        """What to write, or that nothing has to be."""
        own, best, one = self.own, self.best, self.compared
        bare = self.bare_s
        if self.matters and one is not None:
            gain = f"{one.ratio:.3g}x [{one.low:.3g}, {one.high:.3g}]"
            return f"{self.writes(best.feed)}: {gain} as fast as {own.words}"
        if bare is not None and own.step_s is not None and own.step_s < LEAST_GAIN * bare:
            return f"nothing: with {own.words} the step does not wait for batches"
        if all(other.step_s is None for other in self.settings if not other.is_own):
            return f"nothing: hotlap has timed no other setting than {own.words}"
        if one is not None and not best.is_own and one.ratio > 1:
            chance = f"{best.words}: {one.ratio:.3g}x [{one.low:.3g}, {one.high:.3g}] as fast, which may be chance"
            return f"nothing: no setting is certainly faster than {own.words}; {chance}"
        return f"nothing: no setting is faster than {own.words}"

    def summary(self) -> str:
        """The settings in a table, and the advice, in lines for people."""
        width = max(len(setting.words) for setting in self.settings)
        lines = [f"{'':<{width}}  {'step':>9}  {'start-up':>9}"]
        for one in self.settings:
            if one.step_s is None:
                lines.append(f"{one.words:<{width}}  {'–':>9}  {'–':>9}  not tried: {one.why_not}")
                continue
            start = "–" if one.start_s is None else show_seconds(one.start_s)
            best = "best" if self.matters or self.best.is_own else "best by these laps"
            marks = [word for word, is_so in (("as it is", one.is_own), (best, one == self.best)) if is_so]
            lines.append(
                f"{one.words:<{width}}  {show_seconds(one.step_s):>9}  {start:>9}  {', '.join(marks)}".rstrip()
            )
        if self.bare_s is not None:
            lines.append(f"{'batch ready':<{width}}  {show_seconds(self.bare_s):>9}  {'':>9}  no setting can be faster")
        lines += ["", f"cores      {self.cores}: hotlap tries no more workers than that"]
        if self.best_count is not None and self.best.feed.kind != "loader":
            lines.append(f"workers    best DataLoader setting: {_counted(self.best_count)} (another feed is faster)")
        if self.transforms:
            whole = show_seconds(sum(transform.sample_s for transform in self.transforms))
            lines.append(f"a sample   {whole} in one process: {', '.join(map(str, self.transforms))}")
        lines.append(f"write      {self.advice}")
        return "\n".join(map(clean, [*lines, *(f"note       {note}" for note in self.notes)]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        compared = {} if self.compared is None else dataclasses.asdict(self.compared)
        compared = {name: one if math.isfinite(one) else None for name, one in compared.items()}  # for JSON
        return {
            "training": self.name,
            "device": self.device,
            "cores": self.cores,
            "settings": [dataclasses.asdict(setting) for setting in self.settings],
            "bare_step_s": self.bare_s,
            "transforms": [dataclasses.asdict(transform) for transform in self.transforms],
            "best": self.best.words,
            "best_workers": self.best_count,
            "best_feed": dataclasses.asdict(self.best.feed),
            "compared_with_own": compared or None,
            "verdict": self.verdict,
            "matters": self.matters,
            "write": self.advice,
            "notes": list(self.notes),
        }


def _counted(workers: int) -> str:
    return f"{workers} worker{'s'[: workers != 1]}" if workers else "no workers"


def best_of(settings: Sequence[Setting]) -> Setting:
    """The fastest; among settings near it the one with the fewest workers, and then the training's own."""
    timed = [setting for setting in settings if setting.step_s is not None]
    least = min(one.step_s or 0.0 for one in timed)
    near = [one for one in timed if (one.step_s or 0.0) <= NEAR * least]
    return min(near, key=lambda one: (one.feed.workers, not one.is_own, one.step_s or 0.0))


def counts(cores: int) -> list[int]:
    """The numbers of workers to try first: 0, 1, 2, 4 … and the number of cores."""
    powers = [2**n for n in range(cores.bit_length()) if 2**n <= cores]
    return sorted({0, *powers, cores})


def by(count: int, *, on_gpu: bool) -> Feed:
    """A loader with so many workers."""
    return Feed(kind="loader", workers=count, persistent=count > 0, pinned=on_gpu)


def nearer(settings: Sequence[Setting], *, on_gpu: bool) -> list[Feed]:
    """Numbers of workers half way from the best to its tried neighbours."""
    by_loader = [setting for setting in settings if setting.feed.kind == "loader" and setting.step_s is not None]
    if not by_loader:
        return []
    best, tried = best_of(by_loader).feed.workers, {one.feed.workers for one in by_loader}
    beside = [max((n for n in tried if n < best), default=best), min((n for n in tried if n > best), default=best)]
    return [by(count, on_gpu=on_gpu) for count in sorted({(best + other) // 2 for other in beside} - tried)]


def workers_of_job(job: Job, *, name: str, seconds: float, say: Say) -> WorkersFound:
    """`hotlap.workers` for a job, in this process; every setting goes over the same batches."""
    with opened(job) as bench:
        return _JobFeeds(bench, seconds, say).found(name)


class _JobFeeds:
    """Tries the feeds of a job, in this process."""

    def __init__(self, bench: Bench, seconds: float, say: Say) -> None:
        self._bench, self._rig, self._say = bench, bench.rig, say
        self._until, self._seconds = time.monotonic() + seconds, seconds
        self._cores, self._on_gpu = read_cpu().cores, self._rig.device.type == "cuda"
        self._rig.keep_plans()
        self._windows: Iterator[Window] = self._rig.windows()
        self._plan: Plan = self._rig.plan
        self._varies = lengths_in(self._bench.dataset.source) is not None
        """Whether batches differ in width: then laps compare only over the same batches."""

    def found(self, name: str) -> WorkersFound:
        own = self._rig.plan.feed
        bare_s = self._bare_s()
        settings = [self._first(feed, feed == own, bare_s) for feed in self._feeds(own)]
        settings += [self._first(feed, False, bare_s) for feed in nearer(settings, on_gpu=self._on_gpu)]
        others = finer(best_of(settings).feed, on_gpu=self._on_gpu)
        settings += [self._first(feed, False, bare_s) for feed in others if all(one.feed != feed for one in settings)]
        # In the opposite order, so that a drift hits all settings alike.
        settings = [self._again(setting) for setting in reversed(settings)][::-1]
        self._rig.use(self._plan, outcome="measured")
        bare_s = min(bare_s, self._bare_s())
        best = best_of(settings)
        comparison = self._compared(own, best.feed) if best.feed != own else None
        notes = ["every setting brings the same samples in the same order"]
        if self._rig.device.type == "cpu":
            notes.append("on the CPU workers take cores from the training itself")
        return WorkersFound(
            name=name,
            device=str(self._rig.device),
            cores=self._cores,
            settings=tuple(settings),
            bare_s=bare_s,
            compared=comparison.estimate if comparison is not None else None,
            verdict=comparison.verdict if comparison is not None else None,
            transforms=costs_of(self._bench.dataset.source.samples) if self._bench.dataset.source.computes else (),
            notes=tuple(notes),
            writes=loader_words if isinstance(self._bench.job.data, DataLoader) else _plan_words,
        )

    def _feeds(self, own: Feed) -> list[Feed]:
        """The job's own feed, then the others."""
        by_workers = [by(count, on_gpu=self._on_gpu) for count in counts(self._cores)]
        whole = [Feed(kind=kind) for kind in FEEDS]
        return [own, *(feed for feed in (*by_workers, *whole) if feed != own)]

    def _bare_s(self) -> float:
        """Seconds an update with its batch ready: one update of the laps, or all of them if they differ in width.

        If laps go through several epochs, the shorter last batch of each counts as in the laps.
        """
        warm, least = self._lengths(self._cores)
        here = self._rig.windows_here
        chosen = sorted({number % here for number in range(warm, warm + least)}) if self._varies else [0]
        windows = list(self._rig.look(self._plan, chosen))
        for window in (windows * 2)[:2]:
            self._rig.step(window)
        step_s = self._bench.step_s(*windows)
        if self._varies or not 1 < here <= least:
            return step_s
        (last,) = self._rig.look(self._plan, [here - 1])
        if sum(last.sizes) == sum(windows[0].sizes):
            return step_s
        self._rig.step(last)
        return ((here - 1) * step_s + self._bench.step_s(last)) / here

    def _lengths(self, workers: int) -> tuple[int, int]:
        """How many updates come before a lap, and how many a lap has at least."""
        most = self._cores if self._varies else workers
        return 2 * most + 1, max(LEAST_WINDOWS, LAP_ROUNDS * most)

    def _first(self, feed: Feed, is_own: bool, bare_s: float) -> Setting:
        """Start a setting, and time one lap."""
        one = Setting(words=words_of(feed), feed=feed, is_own=is_own)
        plan = self._plan.with_feed(feed)
        why_not = self._rig.supports(plan)
        if why_not is None and not is_own and time.monotonic() > self._until:
            why_not = f"{self._seconds:g} s were spent"
        if why_not is not None:
            return dataclasses.replace(one, why_not=why_not)
        begun = time.perf_counter()
        try:
            self._go_to_start(plan)
            self._rig.advance(next(self._windows))
            self._rig.wait()
            start_s = time.perf_counter() - begun - bare_s
            step_s = self._lap_s(feed)
        except HotlapError as error:
            return dataclasses.replace(one, why_not=str(error))
        self._say(f"workers    {one.words}: {show_seconds(step_s)} a step, {show_seconds(max(0.0, start_s))} to start")
        return dataclasses.replace(one, start_s=max(0.0, start_s), step_s=step_s)

    def _again(self, one: Setting) -> Setting:
        if one.step_s is None or time.monotonic() > self._until:
            return one
        return dataclasses.replace(one, step_s=(one.step_s + self._lap_s(one.feed)) / 2)

    def _compared(self, own: Feed, best: Feed) -> Comparison:
        """Laps of both in turn, until the comparison decides."""
        self._say(f"workers    {words_of(best)} against {words_of(own)}, in turns")
        comparison = Comparison(most_quads=MOST_QUADS)
        while comparison.verdict is None:
            a1, b1, b2, a2 = (self._lap_s(feed) for feed in (own, best, best, own))
            comparison.add(a1, b1, b2, a2)
        return comparison

    def _go_to_start(self, plan: Plan) -> None:
        """Go to the first update under this plan, so that all laps go over the same batches."""
        self._rig.use(plan, outcome="measured")
        self._rig.place = Place()

    def _lap_s(self, feed: Feed) -> float:
        """Seconds an update over a lap of this feed from the first batch on, without the first updates."""
        self._go_to_start(self._plan.with_feed(feed))
        warm, least = self._lengths(feed.workers)
        for _ in range(warm):
            self._rig.advance(next(self._windows))
        self._rig.wait()
        begun, made = time.perf_counter(), 0
        # Whole rounds of the workers: between two bursts a lap would be too long or too short.
        while made < least or (not self._varies and time.perf_counter() - begun < LAP_S and made < MOST_WINDOWS):
            for _ in range(max(1, feed.workers)):
                self._rig.advance(next(self._windows))
                made += 1
        self._rig.wait()
        return (time.perf_counter() - begun) / made


def finer(feed: Feed, *, on_gpu: bool) -> list[Feed]:
    """Other settings of the best number of workers: prefetching and pinning."""
    if feed.kind != "loader":
        return []
    found = [dataclasses.replace(feed, pinned=not feed.pinned)] if on_gpu else []
    return [*found, dataclasses.replace(feed, prefetch=4)] if feed.workers else found


def words_of(feed: Feed) -> str:
    """A feed in a few words."""
    if feed.kind != "loader":
        return {"gather": "gathered here", "stream": "copied ahead (stream)", "resident": "held on the device"}[
            feed.kind
        ]
    words = [_counted(feed.workers)]
    words += [f"prefetch {feed.prefetch}"] if feed.prefetch is not None else []
    return ", ".join([*words, *(["pinned"] if feed.pinned else [])])


def loader_words(feed: Feed) -> str:
    if feed.kind != "loader":
        return f"fit(job, plan={{'kind': '{feed.kind}'}}); without a plan, fit tries it by itself"
    found = [f"num_workers={feed.workers}"]
    found += ["persistent_workers=True"] if feed.persistent else []
    found += [f"prefetch_factor={feed.prefetch}"] if feed.prefetch is not None else []
    found += ["pin_memory=True"] if feed.pinned else []
    return f"DataLoader({', '.join(found)})"


def _plan_words(feed: Feed) -> str:
    changed = {name: value for name, value in dataclasses.asdict(feed).items() if value != getattr(Feed(), name)}
    return f"fit(job, plan={changed or {'kind': feed.kind}}); without a plan, fit tries it by itself"


# --- scripts, each setting in a process of its own -----------------------------------------------------------


REPEATS = "each worker gives all samples of an IterableDataset that does not split them by get_worker_info"


def workers_of_script(target: Target, *, seconds: float = MOST_S, say: Say = silent) -> WorkersFound:
    """`hotlap.workers` for a script: each try runs it in a new process.

    hotlap changes the workers of its training loader, and brings its batches as under `hotlap run --plan`.
    """
    until = time.monotonic() + seconds
    say(f"workers    runs {target.name} unchanged, to find its loader")
    first = run_probe(target, ProbeRequest(transforms=True, begins_s=max(seconds, BEGINS_S)))
    if first.loader is None:
        raise HotlapError(f"{target.name} has no loader to give workers to: {first.why_fixed}")
    probes = _ScriptFeeds(target, first, seconds, until, say)
    on_gpu, cores, own = first.device != "cpu", read_cpu().cores, probes.own
    others = [by(n, on_gpu=on_gpu) for n in counts(cores)]
    others = [feed for feed in others if (feed.workers, feed.pinned) != (own.workers, own.pinned)]
    settings = probes.settings([own, *others, *(Feed(kind=kind) for kind in FEEDS)])
    settings = probes.settings(nearer(settings, on_gpu=on_gpu))
    settings = probes.settings(finer(best_of(settings).feed, on_gpu=on_gpu))
    best = best_of(settings)
    comparison = None if best.is_own else probes.compared(best.feed)
    return WorkersFound(
        name=target.name,
        device=first.device,
        cores=cores,
        settings=tuple(settings),
        bare_s=None,
        compared=None if comparison is None else comparison.estimate,
        verdict=None if comparison is None else comparison.verdict,
        transforms=tuple(Cost(name=name, sample_s=sample_s) for name, sample_s in first.transforms),
        notes=(RUNS,),
        writes=_writes(target),
    )


class _ScriptFeeds:
    """Tries the feeds of a script, in a new process each time."""

    def __init__(self, target: Target, first: ProbeResult, seconds: float, until: float, say: Say) -> None:
        """`first` is a probe of the unchanged script; `until` is the time at which `seconds` are over."""
        self._target, self._first, self._say = target, first, say
        self._seconds, self._until, self._feeds = seconds, until, list[Feed]()
        self.own = Feed(kind="loader", workers=first.workers, pinned=first.pinned and first.device != "cpu")
        self._seen: dict[Feed, list[ProbeResult]] = {self.own: [first]}
        self._why_not: dict[str, str] = {}
        """By kind of feed, why hotlap cannot bring its batches so."""
        self._most_workers = 1 if first.iterates and self.own.workers <= 1 else None
        """A script with more workers already has to split its samples among them."""

    def settings(self, feeds: Sequence[Feed]) -> list[Setting]:
        """Try each new feed twice, the second time in the opposite order; returns the settings of all feeds so far."""
        new = [feed for feed in feeds if feed not in self._feeds]
        self._feeds += new
        for feed in (*(feed for feed in new if feed not in self._seen), *reversed(new)):
            if time.monotonic() < self._until:
                self.look(feed)
        return [self.setting(feed) for feed in self._feeds]

    def look(self, feed: Feed) -> None:
        """Run the script under a feed once more; a feed that has failed is not tried again."""
        if feed.kind in self._why_not or self._repeats(feed):
            return
        if feed.kind == "loader":
            change = {} if feed == self.own else _change(feed)
            seen = run_probe(self._target, ProbeRequest(loader=self._first.loader, change=change))
        else:
            try:
                seen = run_probe(self._target, ProbeRequest(feed=feed.kind))
            except HotlapError as error:
                self._why_not[feed.kind] = str(error).partition("\n")[0]
                return
            self._why_not |= seen.refused
            reason = seen.why_not or seen.out_of_memory
            if reason is not None:
                self._why_not.setdefault(feed.kind, reason)
                return
        self._seen.setdefault(feed, []).append(seen)
        self._say(f"workers    {words_of(feed)}: {show_seconds(_step_s(self._seen[feed]))} a step")

    def _repeats(self, feed: Feed) -> bool:
        """Whether this feed may bring samples several times."""
        return feed.kind == "loader" and self._most_workers is not None and feed.workers > self._most_workers

    def setting(self, feed: Feed) -> Setting:
        """The setting of a feed, with its timings."""
        one = Setting(words=words_of(feed), feed=feed, is_own=feed == self.own)
        several = self._seen.get(feed, [])
        if not several or feed.kind in self._why_not:
            otherwise = REPEATS if self._repeats(feed) else f"{self._seconds:g} s were spent"
            return dataclasses.replace(one, why_not=self._why_not.get(feed.kind, otherwise))
        return dataclasses.replace(one, start_s=several[0].first_batch_s, step_s=_step_s(several))

    def compared(self, best: Feed) -> Comparison:
        """Laps of the best feed and of the script's own in turn, until the comparison decides.

        New probes, while there is time: those that chose the feed flatter it.
        """
        for feed in (self.own, best, best, self.own):
            if time.monotonic() < self._until or len(self._seen[feed]) < 2:
                self.look(feed)
        comparison = Comparison(most_quads=MOST_QUADS)
        own, other = self._seen[self.own][-2:], self._seen[best][-2:]
        for quad in zip(_laps(own[0]), _laps(other[0]), _laps(other[-1]), _laps(own[-1]), strict=False):
            if comparison.verdict is None:
                comparison.add(*quad)
        return comparison


def _writes(target: Target) -> Callable[[Feed], str]:
    """What to write for a feed: arguments of the loader, or a command."""
    command = shlex.join(["hotlap", "run", *target.words])
    return lambda feed: loader_words(feed) if feed.kind == "loader" else f"`{command}`, which tries it by itself"


def _change(feed: Feed) -> dict[str, Any]:
    change = {"num_workers": feed.workers, "persistent_workers": feed.persistent, "pin_memory": feed.pinned}
    return change if feed.prefetch is None else {**change, "prefetch_factor": feed.prefetch}


def _laps(seen: ProbeResult) -> list[float]:
    """Seconds an update of each lap."""
    if not seen.samples_an_update:
        return [spent / count for (spent, _), count in zip(seen.laps, seen.lap_updates, strict=True)]
    return [spent / (samples / seen.samples_an_update) for spent, samples in seen.laps if samples]


def _step_s(several: Sequence[ProbeResult]) -> float:
    return sum(seen.step_s for seen in several) / len(several)
