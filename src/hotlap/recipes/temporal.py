"""The recipe `temporal`: bars of prices in several time frames → whether they fall, stay or rise."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, JobError, did_you_mean, first_few, shown
from hotlap.core.job import Job
from hotlap.core.units import show_seconds
from hotlap.data.windows import Windows
from hotlap.recipes import bars as bars_module
from hotlap.recipes import indicators
from hotlap.recipes.bars import FRAME_UNITS, Bars, bars_of, frame_name, has_symbols_of_files, with_symbols
from hotlap.recipes.indicators import Features, Scaler, direction, features
from hotlap.recipes.networks import AttentiveLstm, LastStep, WindowTransformer
from hotlap.recipes.onnx_files import OnnxExport
from hotlap.recipes.options import MOST, Options, below_one, option, outside
from hotlap.recipes.recipe import Asked, Fold, Numbers, Reader, Say
from hotlap.recipes.tables import Table, read_table
from hotlap.recipes.tabular import TabularRecipe, refuse_pictures, shown_table
from hotlap.store.cache import Cache, key_of

MODELS = ("lstm", "transformer", "mlp")
LONGEST_S = 400 * 86400
"""Most seconds in a frame: more than a year."""
AUTO = "auto"
"""In place of frames."""
JUDGED_BARS = 2**17
"""Of all windows together that are answered at a time, unless four batches have more."""
CLASSES = ("down", "flat", "up")
LEAST = 50
"""Least windows on each side of a split."""
OWN_BARS, FRAME_BARS = 50, 20
"""That features look back over: of the bars themselves, and of the longest frame."""
DEFAULT_FRAMES = (3600, 14400)
"""Longer bars that hotlap makes where none are named: h1 and h4."""
SUGGESTED_FRAMES = (300, 900, 3600, 14400, 86400, 7 * 86400)
"""Usual frames, to suggest where one cannot be made of the bars."""
EXAMPLES = 64
"""Windows that a written ONNX file is tried on."""


@dataclass(frozen=True, kw_only=True)
class TemporalOptions(Options):
    """The options of the recipe."""

    target: str = option("direction", "the name of the answers' column")
    group: str = option("", "not for bars, of which the last part is held out")
    frames: tuple[str, ...] = option(
        (AUTO,),
        "longer bars that are made of the file's own and joined to them; auto: h1 and h4 where longer",
    )
    length: int = option(20, "bars in a window", most=10_000)
    ahead: int = option(4, "bars to look ahead")
    threshold: float = option(1.0, "how far is up or down: a multiple of the volatility, or a share of the price")
    volatility: int = option(96, "bars over which the volatility is taken; 0: the threshold is a share of the price")
    models: tuple[str, ...] = option(MODELS, "which to train; the best is kept")
    batch_size: int = option(256, "samples in an update")
    patience: int = option(5, "evaluations without improvement before the training stops")
    smoothing: float = option(0.05, "label smoothing")
    clip: float = option(0.5, "the largest norm of all gradients together")
    folds: int = option(0, "walk forward: as many times train on what came before, judge on what comes next", most=1000)

    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {"models": ("lstm", "mlp")},
        "best": {"patience": 10},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = below_one(self, "length", "ahead")
        wrong += outside(self, folds=(0, MOST), smoothing=(0, 1))
        wrong += [
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("threshold", "clip")
            if not 0 < getattr(self, name) <= MOST
        ]
        if self.volatility != 0 and self.volatility < 2:
            wrong.append(f"volatility={self.volatility} must be 0, or at least 2")
        if self.group:
            wrong.append(f"group={self.group} is not for bars, of which the last part is held out; leave it out")
        wrong += [
            f"no model is called {shown(name)}{did_you_mean(name, MODELS)}"
            for name in self.models
            if name not in MODELS
        ]
        if self.frames != (AUTO,):
            unknown = [name for name in self.frames if not seconds_of(name)]
            wrong += [f"frame {shown(name)} is none; write m30, h1, h4, d1" for name in unknown]
        if not self.models:
            wrong.append(f"models is empty; name some of {', '.join(MODELS)}")
        if wrong:
            raise JobError(wrong)

    @property
    def judged_at_once(self) -> int:
        """Windows that are answered at a time: they are small, and few of them at a time keep no GPU busy."""
        return self._judged_within(JUDGED_BARS, self.length)


class TemporalRecipe(TabularRecipe):
    """Directions of prices."""

    name = "temporal"
    summary = "direction of prices from bars in several time frames: LSTM, Transformer and MLP, the best is kept"
    expects = "columns time, open, high, low, close; volume and symbol if there are any"
    options_type = TemporalOptions
    classes = CLASSES

    options: TemporalOptions
    known: list[tuple[Bars, Features]]
    """The bars of each symbol with their features."""
    train: Any
    held: Any

    def read(self, path: str, *, always: bool = False) -> Table:
        """A table of bars, shown; without a column of symbols its files may name them."""
        table = shown_table(path, self.say, needs_names=True)
        refuse_pictures(table)
        found = with_symbols(table, always=always)
        for note in found.notes[len(table.notes) :]:
            self.say(f"          note: {note}")
        return found

    def look(self) -> None:
        """Read the bars and make features of them."""
        self.table, self.target = self.read(self.options.data), self.options.target
        if self.target in self.table:
            raise DataError(
                f"target={self.target} is a column of {self.options.data}; it is only how the answers are called, "
                "which are whether prices fall, stay or rise: choose a name that is no column, or leave it out"
            )
        bars = _read_bars(self.table)
        self.seconds = max(bars, key=len).seconds
        self.frames = _chosen_frames(self.options, self.seconds, self.say)
        self.known = list(zip(bars, _features_of(bars, self.frames, self.table.path, self.say), strict=True))

    def split(self) -> None:
        """Hold out the last part of each symbol, or a file of later bars."""
        options, known = self.options, self.known
        later: list[tuple[Bars, Features]] = []
        if options.valid:
            # Symbols named after files are named so here too: else bars that are trained on would not be known.
            judged_by = self.read(options.valid, always=has_symbols_of_files(self.table))
            later = list(zip(*known_features(judged_by, self.frames, self.say, seconds=self.seconds), strict=True))
            refuse_overlaps([one for one, _ in known], [one for one, _ in later], options)
            train = [side_of(options, one, its, 0, len(one)) for one, its in known]
            held = [side_of(options, one, its, 0, len(one)) for one, its in later]
        else:
            cuts = [cut_of(options, one, its) for one, its in known]
            # The labels of the last bars before a cut look beyond it: as many bars are left out.
            train = [side_of(options, *one, 0, cut - options.ahead) for one, cut in zip(known, cuts, strict=True)]
            held = [side_of(options, *one, cut, len(one[0])) for one, cut in zip(known, cuts, strict=True)]
        refuse_few(options, options.data, "to train on", known, train, self.frames, self.say)
        # In a single file the same symbols are short: one warning is enough.
        say = self.say if later else None
        refuse_few(options, options.valid or options.data, "to hold out", later or known, held, self.frames, say)
        self.train, self.held = (Windowed(list(filter(None, parts)), options.length) for parts in (train, held))
        counts = np.bincount(self.train.target, minlength=len(CLASSES))
        if (counts > 0).sum() < 2:
            only = CLASSES[int(counts.argmax())]
            raise DataError(f"every window goes {only}; choose another threshold than {options.threshold}, or ahead")
        shares = ", ".join(f"{name} {share:.0%}" for name, share in zip(CLASSES, counts / counts.sum(), strict=True))
        sizes = f"{len(self.train.target):,} to train on ({shares}), {len(self.held.target):,} later ones held out"
        self.say(f"windows   {sizes}")

    def reader_of(self) -> BarReader:
        """The reader with the scale of the training's features."""
        return BarReader(self.frames, self.options.length, self.train.scaler(), self.known[0][1].names, self.seconds)

    def data_of(self, side: Any) -> Windows:
        """Windows of standardised features, with their labels."""
        windows: Windows = side.windows(self.reader.scaler)
        return windows

    def models(self) -> Sequence[str]:
        """The networks that the options name."""
        return list(dict.fromkeys(self.options.models))

    def job(self, name: str, data: Windows, held: Windows, weights: Tensor | None = None) -> Job:
        """20 epochs; `weights` are those of a fold's classes."""
        options = self.options
        torch.manual_seed(options.seed)
        return self.adamw_job(
            self.reader.model(name),
            data,
            held,
            lr=1e-3,
            epochs=20,
            loss=nn.CrossEntropyLoss(
                weight=self.class_weights() if weights is None else weights, label_smoothing=options.smoothing
            ),
            clip=options.clip,
            # The MLP has batch norms; all models leave the sample out, which is another in every epoch, so that they
            # are compared on the same data.
            drop_last=options.leaves_one(len(data)) or None,
            eval_batch=options.judged_at_once,
        )

    def space(self) -> dict[str, Any]:
        """Also the smoothing of labels, and how far gradients are clipped."""
        return {**super().space(), "smoothing": (0.0, 0.2), "clip": (0.1, 2.0, "log")}

    def baselines(self) -> Mapping[str, Numbers]:
        """Also what the price did over the last bars."""
        return {**super().baselines(), "what it did last": np.concatenate([side.naive for side in self.held.parts])}

    def folds(self, name: str) -> Sequence[Fold]:
        """Equal stretches of each symbol; each but the first is judged after training on all before it."""
        options, made = self.options, []
        for number in range(1, options.folds + 1):
            train, held = [], []
            for bars, its in self.known:
                first = its.first + options.length - 1
                start, end = (
                    first + (len(bars) - options.ahead - first) * part // (options.folds + 1)
                    for part in (number, number + 1)
                )
                train.append(side_of(options, bars, its, 0, start - options.ahead))
                held.append(side_of(options, bars, its, start, end))
            seen, later = (Windowed(list(filter(None, parts)), options.length) for parts in (train, held))
            # A single window makes no batch that a batch norm can take.
            if not later.parts or sum(len(side.naive) for side in seen.parts) < 2:
                raise DataError(f"there are too few bars for {options.folds} folds; ask for fewer")
            scaler = seen.scaler()
            data, judged = seen.windows(scaler), later.windows(scaler)
            job = partial(self.job, name, data, judged, self.class_weights(seen.target))
            made.append(Fold(name=f"fold {number} of {options.folds}", job=job, held_out=judged, target=later.target))
        return made

    def example_of(self, at: int) -> str:
        """A held-out window by its last bar, with its symbol where there are several."""
        ends = np.cumsum([len(side.times) for side in self.held.parts])
        place = int(np.searchsorted(ends, at, side="right"))
        side = self.held.parts[place]
        of = f" of {side.symbol}" if len(ends) > 1 else ""
        return f"the window up to the bar of {side.times[at - ends[place]].astype('datetime64[s]')}{of}"

    def onnx_export(self, held: Windows, name: str, model: nn.Module) -> OnnxExport:
        """The network with its scaler, from features to probabilities, with some held-out windows."""
        scaler = self.reader.scaler
        mean, std = (torch.from_numpy(np.asarray(one, dtype=np.float32)) for one in (scaler.mean, scaler.std))
        windows = torch.stack([held[at][0] for at in range(min(len(held), EXAMPLES))])
        state = {key: json.dumps(value) for key, value in self.reader.state().items()}
        about = {"model": name, "classes": json.dumps(CLASSES), "input": "windows of features, not standardised"}
        return OnnxExport(
            model=Answering(model, mean, std),
            inputs=(windows * std + mean,),
            about={**about, **state},
            names=("bars", "probabilities"),
        )

    @classmethod
    def revive(cls, state: Mapping[str, Any], folder: Path) -> BarReader:
        """The reader of a finished run."""
        scaler = Scaler.from_dict(state["standard"])
        return BarReader(state["frames"], state["length"], scaler, state["features"], state.get("seconds"))


class BarReader(Reader):
    """Bars as the networks take them: windows of features, standardised as in training."""

    classes: tuple[str, ...] = CLASSES

    def __init__(
        self, frames: Sequence[int], length: int, scaler: Scaler, names: Sequence[str], seconds: int | None
    ) -> None:
        self._frames, self._length, self.scaler, self._names = tuple(frames), length, scaler, tuple(names)
        self._seconds = seconds
        """How long the bars were that were trained on; runs of an earlier hotlap do not say."""

    def table(self, data: Path) -> Table:
        """A file of bars, which show what they are."""
        return with_symbols(read_table(data))

    def state(self) -> dict[str, Any]:
        """All that it needs to be made again."""
        return {
            "frames": list(self._frames),
            "length": self._length,
            "standard": self.scaler.to_dict(),
            "features": list(self._names),
            "seconds": self._seconds,
        }

    def model(self, name: str) -> nn.Module:
        """A network with its first weights."""
        count = len(self._names)
        if name == "lstm":
            return AttentiveLstm(count, len(CLASSES))
        if name == "transformer":
            return WindowTransformer(count, len(CLASSES), length=self._length)
        return LastStep(count, len(CLASSES))

    def asked(self, table: Table, say: Say) -> Asked:
        """The bars that have enough before them; a line counts the others."""
        series, rows, most, before = [], [], 0, 0
        for one, found in zip(*known_features(table, self._frames, say, seconds=self._seconds), strict=True):
            if len(one) > most:
                most, before = len(one), min(found.first, len(one))
            if len(one) - found.first < self._length:
                continue
            series.append(self.scaler.transform(found.values[found.first :]))
            rows.append(one.rows[found.first + self._length - 1 :])
        if not series:
            raise DataError(
                f"{table.path} has no {self._length} bars in a row with all features: of the {most:,} of its longest "
                f"series {before:,} have too few before them; put those that came before into the file, too"
            )
        answered = np.concatenate(rows)
        if len(answered) < len(table):
            count = f"{len(table) - len(answered):,} of {len(table):,}"
            cure = "put those that came before in front of them"
            say(f"bars      {count} have too little before them for an answer; {cure}")
        return Asked(data=Windows(series, self._length), rows=answered)


class Answering(nn.Module):
    """Windows of unscaled features in, probabilities out: for ONNX."""

    mean: Tensor
    spread: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("spread", std)

    def forward(self, bars: Tensor) -> Tensor:
        """The probability of each class."""
        scores: Tensor = self.network((bars - self.mean) / self.spread)
        return scores.softmax(1)


@dataclass(frozen=True, kw_only=True)
class SymbolSide:
    """One symbol's part of a split: features and labels, row by row, of windows that end in it."""

    values: Numbers
    labels: Numbers
    naive: Numbers
    """For each window what it did over the last bars, as many as are looked ahead."""
    times: Numbers
    """For each window when its last bar begins, in seconds since 1970."""
    symbol: str


class Windowed:
    """The windows of all symbols that hotlap trains on, or that it holds out."""

    def __init__(self, parts: Sequence[SymbolSide], length: int) -> None:
        self.parts, self._length = parts, length

    @cached_property
    def target(self) -> Numbers:
        """The class of each window."""
        return np.concatenate([side.labels[self._length - 1 :] for side in self.parts])

    def scaler(self) -> Scaler:
        """The scaler of these features."""
        return Scaler.fit(np.concatenate([side.values for side in self.parts]))

    def windows(self, scaler: Scaler) -> Windows:
        """Windows of the scaled features, with their classes."""
        values = [scaler.transform(side.values) for side in self.parts]
        return Windows(values, self._length, target=[side.labels for side in self.parts])


def side_of(options: TemporalOptions, bars: Bars, known: Features, begin: int, end: int) -> SymbolSide | None:
    """The windows of one symbol whose last bar lies between two rows, and has a label."""
    window = options.volatility or None
    labels = direction(bars, options.ahead, options.threshold, volatility_window=window)
    is_known = np.flatnonzero(labels >= 0)
    if not len(is_known):
        return None
    first = max(known.first + options.length - 1, begin, int(is_known[0]))
    last = min(end, int(is_known[-1]) + 1)
    if last <= first:
        return None
    before = labels[np.maximum(np.arange(first, last) - options.ahead, 0)]
    rows = slice(first - options.length + 1, last)
    return SymbolSide(
        values=known.values[rows],
        labels=labels[rows],
        naive=np.where(before >= 0, before, 1),
        times=bars.times[first:last],
        symbol=bars.symbol,
    )


def cut_of(options: TemporalOptions, bars: Bars, known: Features) -> int:
    """The first bar of a symbol that is held out."""
    first = known.first + options.length - 1
    return first + round((len(bars) - options.ahead - first) * (1 - options.valid_share))


def refuse_few(
    options: TemporalOptions,
    path: str,
    what: str,
    known: Sequence[tuple[Bars, Features]],
    sides: Sequence[SymbolSide | None],
    frames: Sequence[int],
    say: Say | None,
) -> None:
    """Refuse too few windows, with how many bars make enough of them; a line names symbols that give none."""
    count = sum(len(side.naive) for side in sides if side is not None)
    warm_up = _warm_up(known, frames)
    if count < LEAST:
        lost = max(warm_up + options.length - 1, options.volatility)
        shorter = ", or name shorter --frames" if frames and warm_up > max(OWN_BARS, options.volatility) else ""
        raise DataError(
            f"{path} has {count} windows {what}, and {LEAST} are needed: the first {lost:,} bars of each symbol have "
            f"too little before them; give {_bars_for(options, warm_up, LEAST):,} bars of a symbol{shorter}"
        )
    short = [one for (one, _), side in zip(known, sides, strict=True) if side is None]
    if short and say is not None:
        names = first_few([f"{one.symbol or 'one without a name'} with {len(one):,}" for one in short])
        needed = f"a window {what} needs {_bars_for(options, warm_up, 1):,} of a symbol"
        say(f"warning   left out: bars of {names}: {needed}")


def _warm_up(known: Sequence[tuple[Bars, Features]], frames: Sequence[int]) -> int:
    """The first bar of a symbol with all features: as these have it, or, where none has, as the features need it."""
    firsts = [its.first for one, its in known if its.first < len(one)]
    seconds = max((one for one, _ in known), key=len).seconds
    return max(firsts) if firsts else max(OWN_BARS, FRAME_BARS * max(frames, default=0) // seconds)


def _bars_for(options: TemporalOptions, warm_up: int, windows: int) -> int:
    """How many bars of one symbol give so many windows to train on, and as many to hold out."""
    begin = warm_up + options.length - 1
    unlabelled = max(0, options.volatility - begin)
    if options.valid:
        return begin + unlabelled + windows + options.ahead
    train = (windows + options.ahead + unlabelled) / (1 - options.valid_share)
    held = windows / options.valid_share
    # One more, since the cut between them is rounded.
    return begin + math.ceil(max(train, held)) + 1 + options.ahead


def refuse_overlaps(trained: Sequence[Bars], held: Sequence[Bars], options: TemporalOptions) -> None:
    """Bars of a symbol that are trained on and held out make a score too good."""
    own = {one.symbol: one for one in trained}
    for one in held:
        if one.symbol not in own:
            continue
        theirs = own[one.symbol]
        # The first bar trained on that has not ended when one begins: does it begin before that one ends?
        next_one = np.searchsorted(theirs.ends, one.times, side="right")
        both = np.append(theirs.times, np.iinfo(np.int64).max)[next_one] < one.ends
        if both.any():
            of = f" of {one.symbol}" if one.symbol else ""
            first, last = one.times[both][[0, -1]].astype("datetime64[s]")
            raise DataError(
                f"{int(both.sum()):,} bars{of} in {options.valid}, from {first} to {last}, are of times that "
                f"{options.data} has too, and trains on; leave them out of one of the two, or, where they are of "
                "another symbol, name it in a column"
            )


def known_features(
    table: Table, frames: Sequence[int], say: Say, *, seconds: int | None = None
) -> tuple[list[Bars], list[Features]]:
    """The bars of a table by symbol, and their features: from the cache, where they were made before.

    Bars are to be as long as those trained on, which are `seconds` long; without it, as those of the longest symbol.
    """
    bars = _read_bars(table, seconds)
    return bars, _features_of(bars, frames, table.path, say)


def _read_bars(table: Table, seconds: int | None = None) -> list[Bars]:
    if len(table) < 2:
        raise DataError(f"{table.path} has a single bar; give more of them, at least {LEAST} windows are needed")
    bars = bars_of(table, default_seconds=seconds)
    own = seconds or max(bars, key=len).seconds
    for one in bars:
        if one.seconds != own:
            of = f" of {one.symbol}" if one.symbol else ""
            others = "those trained on" if seconds else "the others"
            raise DataError(
                f"the bars{of} in {table.path} are {frame_name(one.seconds)}, and {others} {frame_name(own)}; "
                f"give bars of {frame_name(own)}"
            )
    return bars


def _chosen_frames(options: TemporalOptions, own: int, say: Say) -> list[int]:
    """The lengths of longer bars: as they are named, else of the usual ones those that the file's bars make longer."""
    if options.frames != (AUTO,):
        return [seconds for name in options.frames if (seconds := seconds_of(name))]
    made = [seconds for seconds in DEFAULT_FRAMES if seconds > own and not seconds % own]
    without = [seconds for seconds in DEFAULT_FRAMES if seconds not in made]
    if without:
        names = " and ".join(map(frame_name, without))
        why = "not longer than" if max(without) <= own else "not to be made of"
        such = f"; name longer ones, such as --frames {','.join(_fitting(own)[:2])}" if _fitting(own) else ""
        say(f"frames    without {names}: {why} the file's own bars of {frame_name(own)}{such}")
    return made


def _fitting(own: int) -> list[str]:
    """The names of usual frames that can be made of bars of this length."""
    return [frame_name(seconds) for seconds in SUGGESTED_FRAMES if seconds > own and not seconds % own]


def _features_of(bars: Sequence[Bars], frames: Sequence[int], path: Path, say: Say) -> list[Features]:
    own = max(bars, key=len).seconds
    for longer in frames:
        if longer < own or longer % own:
            fitting = _fitting(own)
            such = (
                f"name multiples of it, such as --frames {','.join(fitting[:2])}, or none" if fitting else "name none"
            )
            raise DataError(
                f"frame {frame_name(longer)} cannot be made of bars of {frame_name(own)}, as in {path}; "
                f"{such}: --frames="
            )
    began = time.perf_counter()
    arrays = [[one.times, one.open, one.high, one.low, one.close, one.volume, one.seconds] for one in bars]
    key = key_of("bars", arrays, list(frames), indicators, bars_module)
    cache, made = Cache(), False

    def make() -> tuple[dict[str, Numbers], Any]:
        nonlocal made
        made = True
        found = [features(one, frames) for one in bars]
        about = {
            "names": list(found[0].names),
            "firsts": [one.first for one in found],
            "took_s": time.perf_counter() - began,
        }
        return {f"values{at}": one.values for at, one in enumerate(found)}, about

    tensors, about = cache.get_or_make("features", key, make)
    took = show_seconds(time.perf_counter() - began)
    count = f"{sum(map(len, bars)):,} bars of {frame_name(own)}, {len(bars)} symbol{'s'[: len(bars) > 1]}"
    how = f"in {took}" if made else f"from the cache, which saved {show_seconds(float(about['took_s']))}"
    say(f"features  {len(about['names'])} of {count}, {how}")
    return [
        Features(names=tuple(about["names"]), values=np.asarray(tensors[f"values{at}"]), first=int(about["firsts"][at]))
        for at in range(len(bars))
    ]


def seconds_of(frame: str) -> int | None:
    """The seconds in a frame such as h4; None where it is no frame."""
    found = re.fullmatch(r"([mhd])(\d+)|(\d+)([mhd])", frame.strip().lower())
    if not found:
        return None
    unit, number = found[1] or found[4], int(found[2] or found[3])
    seconds = number * FRAME_UNITS[unit]
    return seconds if 0 < seconds <= LONGEST_S else None


RECIPE = TemporalRecipe
