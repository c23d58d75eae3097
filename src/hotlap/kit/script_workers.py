"""How the batches of somebody's script should come: `workers`, in a process for each try."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

from hotlap.core.errors import HotlapError
from hotlap.core.plan import Feed
from hotlap.core.units import show_seconds
from hotlap.kit.looks import BEGINS_S, Seen, Wish
from hotlap.kit.obeying import FEEDS
from hotlap.kit.telling import silent
from hotlap.kit.transforms import Cost
from hotlap.kit.visiting import RUNS, visit
from hotlap.kit.workers import (
    MOST_QUADS,
    MOST_S,
    Say,
    Setting,
    WorkersFound,
    best_of,
    by,
    counts,
    finer,
    loader_words,
    nearer,
    words_of,
)
from hotlap.machine.limits import read_cpu
from hotlap.script.running import Target
from hotlap.tuner.stats import Comparison

REPEATS = "each would give all samples of an IterableDataset, unless it shares them out by get_worker_info"


def workers_of_script(target: Target, *, seconds: float = MOST_S, say: Say = silent) -> WorkersFound:
    """As `hotlap.workers` has it, of somebody's script, in a process each time.

    Its training loader is made with other workers; and hotlap brings its batches, as under `hotlap run --plan`.
    """
    until = time.monotonic() + seconds
    say(f"workers    {target.name} is run as it is, to find its loader")
    first = visit(target, Wish(transforms=True, begins_s=max(seconds, BEGINS_S)))
    if first.loader is None:
        raise HotlapError(f"{target.name} has no loader to give workers to: {first.why_fixed}")
    looks = _Looks(target, first, say)
    on_gpu, cores, own = first.device != "cpu", read_cpu().cores, looks.own
    others = [by(n, on_gpu=on_gpu) for n in counts(cores)]
    feeds = [own, *(feed for feed in others if (feed.workers, feed.pinned) != (own.workers, own.pinned))]
    feeds += [Feed(kind=kind) for kind in FEEDS]

    def looked_at(several: Sequence[Feed]) -> list[Setting]:
        for feed in several:
            if time.monotonic() < until:
                looks.look(feed)
        return [looks.setting(feed, seconds) for feed in feeds]

    def and_at(several: Sequence[Feed]) -> list[Setting]:
        others = [feed for feed in several if feed not in feeds]
        feeds.extend(others)
        return looked_at((*others, *reversed(others)))

    settings = looked_at((*feeds[1:], *reversed(feeds)))
    settings = and_at(nearer(settings, on_gpu=on_gpu))
    settings = and_at(finer(best_of(settings).feed, on_gpu=on_gpu))
    best = best_of(settings)
    comparison = None if best.is_own else looks.compared(best.feed, until)
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


class _Looks:
    """Looks at a script under several feeds, each in a process of its own."""

    def __init__(self, target: Target, first: Seen, say: Say) -> None:
        """`first` is the script as it is."""
        self._target, self._first, self._say = target, first, say
        self.own = Feed(kind="loader", workers=first.workers, pinned=first.pinned and first.device != "cpu")
        self._seen: dict[Feed, list[Seen]] = {self.own: [first]}
        self._why_not: dict[str, str] = {}
        """Of kinds of feed that its batches do not come by."""
        self._most_workers = 1 if first.iterates and self.own.workers <= 1 else None
        """Where the script has more already, its dataset has to share its samples out among them."""

    def look(self, feed: Feed) -> None:
        """Run the script under a feed once more; one that cannot be is not tried again."""
        if feed.kind in self._why_not or self._repeats(feed):
            return
        if feed.kind == "loader":
            change = {} if feed == self.own else _change(feed)
            seen = visit(self._target, Wish(loader=self._first.loader, change=change))
        else:
            try:
                seen = visit(self._target, Wish(feed=feed.kind))
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
        """Whether samples may come several times by this feed."""
        return feed.kind == "loader" and self._most_workers is not None and feed.workers > self._most_workers

    def setting(self, feed: Feed, seconds: float) -> Setting:
        """What was seen of a feed."""
        one = Setting(words=words_of(feed), feed=feed, is_own=feed == self.own)
        several = self._seen.get(feed, [])
        if not several or feed.kind in self._why_not:
            why_not = self._why_not.get(feed.kind, REPEATS if self._repeats(feed) else f"{seconds:g} s were spent")
            return dataclasses.replace(one, why_not=why_not)
        return dataclasses.replace(one, start_s=several[0].first_batch_s, step_s=_step_s(several))

    def compared(self, best: Feed, until: float) -> Comparison:
        """Laps of the best feed and of the script's own in turn, until it is decided.

        In looks of their own, while there is time: those by which it was chosen flatter it.
        """
        for feed in (self.own, best, best, self.own):
            if time.monotonic() < until or len(self._seen[feed]) < 2:
                self.look(feed)
        comparison = Comparison(most_quads=MOST_QUADS)
        own, other = self._seen[self.own][-2:], self._seen[best][-2:]
        for quad in zip(_laps(own[0]), _laps(other[0]), _laps(other[-1]), _laps(own[-1]), strict=False):
            if comparison.verdict is None:
                comparison.add(*quad)
        return comparison


def _writes(target: Target) -> Callable[[Feed], str]:
    """What to write for a feed: arguments of its loader, or a command."""
    command = shlex.join(["hotlap", "run", *target.words])
    return lambda feed: loader_words(feed) if feed.kind == "loader" else f"`{command}`, which tries that by itself"


def _change(feed: Feed) -> dict[str, Any]:
    change = {"num_workers": feed.workers, "persistent_workers": feed.persistent, "pin_memory": feed.pinned}
    return change if feed.prefetch is None else {**change, "prefetch_factor": feed.prefetch}


def _laps(seen: Seen) -> list[float]:
    """Seconds an update in each lap."""
    if not seen.samples_an_update:
        return [spent / count for (spent, _), count in zip(seen.laps, seen.lap_updates, strict=True)]
    return [spent / (samples / seen.samples_an_update) for spent, samples in seen.laps if samples]


def _step_s(several: Sequence[Seen]) -> float:
    return sum(seen.step_s for seen in several) / len(several)
