"""The recipe `temporal`: bars of prices in several time frames → whether they fall, stay or rise."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError
from hotlap.core.job import Job
from hotlap.core.units import show_seconds
from hotlap.data.windows import Windows
from hotlap.recipes import bars as bars_module
from hotlap.recipes import indicators
from hotlap.recipes.bar_files import bars_in, is_called_as_files, with_symbols
from hotlap.recipes.bar_options import AUTO, TemporalOptions, seconds_of
from hotlap.recipes.bar_sides import (
    CLASSES,
    LEAST,
    Side,
    cut_of,
    labels_of,
    refuse_few,
    refuse_overlaps,
    shown_window,
    side_of,
    windows_of,
)
from hotlap.recipes.bars import Bars, frame_name
from hotlap.recipes.indicators import Features, Standard, features, standardised
from hotlap.recipes.networks import AttentiveLstm, LastStep, WindowTransformer
from hotlap.recipes.onnx_files import Served, write_onnx
from hotlap.recipes.reading import refuse_pictures, shown_table
from hotlap.recipes.recipe import Asked, Candidate, Fold, Numbers, Prepared, Recipe, Say
from hotlap.recipes.schedules import warm_up_and_cosine
from hotlap.recipes.scores import class_weights
from hotlap.recipes.tables import Table, read_table
from hotlap.store.cache import Cache, key_of

USUAL = (3600, 14400)
"""Longer bars that are made where none are named: h1 and h4."""
FRAMES = ("m5", "m15", "h1", "h4", "d1", "d7")
"""Usual ones, to be named to those who name one that cannot be made."""
EXAMPLES = 64
"""Windows that a written ONNX file is tried on."""


class BarReader:
    """Bars as the networks take them: windows of features, standardised as in training."""

    classes: tuple[str, ...] = CLASSES

    def __init__(
        self, frames: Sequence[int], length: int, standard: Standard, names: Sequence[str], seconds: int | None
    ) -> None:
        self._frames, self._length, self._standard, self._names = tuple(frames), length, standard, tuple(names)
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
            "standard": self._standard.to_dict(),
            "features": list(self._names),
            "seconds": self._seconds,
        }

    def keep_files(self, folder: Path) -> None:
        """There are none beside its state."""

    def model(self, name: str) -> nn.Module:
        """A network with its first weights."""
        count = len(self._names)
        if name == "lstm":
            return AttentiveLstm(count, len(CLASSES))
        if name == "transformer":
            return WindowTransformer(count, len(CLASSES), length=self._length)
        return LastStep(count, len(CLASSES))

    def served(self, model: nn.Module, windows: Tensor) -> tuple[nn.Module, Tensor]:
        """The network with all that comes before and after it, and these windows as it takes them."""
        mean, spread = (
            torch.from_numpy(np.asarray(numbers, dtype=np.float32))
            for numbers in (self._standard.mean, self._standard.spread)
        )
        return Served(model, mean, spread), windows * spread + mean

    def asked(self, table: Table, say: Say) -> Asked:
        """The bars that have enough before them; the others are said."""
        series, rows, most, before = [], [], 0, 0
        for one, found in zip(*known_features(table, self._frames, say, seconds=self._seconds), strict=True):
            if len(one) > most:
                most, before = len(one), min(found.first, len(one))
            if len(one) - found.first < self._length:
                continue
            series.append(self._standard(found.values[found.first :]))
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

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """A row of scores for each window."""
        scores: Tensor = model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        return scores

    @property
    def embedded(self) -> None:
        """There is none of use."""
        return None


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
    bars = bars_in(table, few=seconds)
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
    made = [seconds for seconds in USUAL if seconds > own and not seconds % own]
    without = [seconds for seconds in USUAL if seconds not in made]
    if without:
        names = " and ".join(map(frame_name, without))
        why = "not longer than" if max(without) <= own else "not to be made of"
        such = f"; name longer ones, such as --frames {','.join(_fitting(own)[:2])}" if _fitting(own) else ""
        say(f"frames    without {names}: {why} the file's own bars of {frame_name(own)}{such}")
    return made


def _fitting(own: int) -> list[str]:
    """Usual frames that can be made of bars."""
    return [name for name in FRAMES if (seconds_of(name) or 0) > own and not (seconds_of(name) or 0) % own]


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


def prepare(options: TemporalOptions, say: Say) -> Prepared:
    """Read the bars, make features of them, and hold the last part of each symbol out."""
    table = _shown_bars(options.data, say)
    if options.target in table:
        raise DataError(
            f"target={options.target} is a column of {options.data}; it is only how the answers are called, "
            "which are whether prices fall, stay or rise: choose a name that is no column, or leave it out"
        )
    bars = _read_bars(table)
    frames = _chosen_frames(options, max(bars, key=len).seconds, say)
    found = _features_of(bars, frames, table.path, say)
    names = found[0].names
    train, held = _sides(options, table, list(zip(bars, found, strict=True)), frames, say)
    standard = standardised(np.concatenate([side.values for side in train]))
    reader = BarReader(frames, options.length, standard, names, max(bars, key=len).seconds)
    made, judged = (windows_of(part, standard, options.length) for part in (train, held))
    labels, target = (labels_of(part, options.length) for part in (train, held))
    counts = np.bincount(labels, minlength=len(CLASSES))
    if (counts > 0).sum() < 2:
        only = CLASSES[int(counts.argmax())]
        raise DataError(f"every window goes {only}; choose another threshold than {options.threshold}, or ahead")
    told = ", ".join(f"{name} {share:.0%}" for name, share in zip(CLASSES, counts / counts.sum(), strict=True))
    say(f"windows   {len(labels):,} to train on ({told}), {len(target):,} later ones held out")
    weights = torch.from_numpy(class_weights(labels, len(CLASSES))).float() if options.balance else None
    return Prepared(
        reader=reader,
        candidates=[
            Candidate(name=name, job=partial(_job, options, reader, name, made, judged, weights))
            for name in dict.fromkeys(options.models)
        ],
        target_name=options.target,
        held_out=judged,
        target=target,
        shown=partial(shown_window, held),
        baselines=lambda: {
            "most frequent class": np.full(len(target), counts.argmax()),
            "what it did last": np.concatenate([side.naive for side in held]),
        },
        folds=partial(_folds, options, reader, list(zip(bars, found, strict=True))),
        finish=partial(_written_as_onnx, reader, judged) if options.onnx else None,
    )


def _shown_bars(path: str, say: Say, *, at_once: bool = False) -> Table:
    """The table of a file or folder of bars, shown; with what its files are called for symbols where it has none."""
    table = shown_table(path, say, needs_names=True)
    refuse_pictures(table)
    found = with_symbols(table, at_once=at_once)
    for note in found.notes[len(table.notes) :]:
        say(f"          note: {note}")
    return found


def _folds(
    options: TemporalOptions, reader: BarReader, known: Sequence[tuple[Bars, Features]], name: str
) -> list[Fold]:
    """Each symbol cut into stretches of equal length; each but the first is judged after training on all before it."""
    made = []
    for number in range(1, options.folds + 1):
        train, held = [], []
        for bars, its in known:
            first = its.first + options.length - 1
            places = [
                first + (len(bars) - options.ahead - first) * part // (options.folds + 1)
                for part in (number, number + 1)
            ]
            train.append(side_of(options, bars, its, 0, places[0] - options.ahead))
            held.append(side_of(options, bars, its, places[0], places[1]))
        seen, later = [side for side in train if side], [side for side in held if side]
        # A single window makes no batch that a batch norm can take.
        if not later or sum(len(side.naive) for side in seen) < 2:
            raise DataError(f"there are too few bars for {options.folds} folds; ask for fewer")
        standard = standardised(np.concatenate([side.values for side in seen]))
        data, judged = (windows_of(part, standard, options.length) for part in (seen, later))
        labels = labels_of(seen, options.length)
        weights = torch.from_numpy(class_weights(labels, len(CLASSES))).float() if options.balance else None
        job = partial(_job, options, reader, name, data, judged, weights)
        target = labels_of(later, options.length)
        made.append(Fold(name=f"fold {number} of {options.folds}", job=job, held_out=judged, target=target))
    return made


def _written_as_onnx(reader: BarReader, held: Windows, name: str, model: nn.Module, folder: Path, say: Say) -> None:
    path = folder / "model.onnx"
    windows = torch.stack([held[at][0] for at in range(min(len(held), EXAMPLES))])
    state = {key: json.dumps(value) for key, value in reader.state().items()}
    about = {"model": name, "classes": json.dumps(CLASSES), "input": "windows of features, not standardised", **state}
    gap = write_onnx(*reader.served(model, windows), path, about)
    say(f"onnx      {path}: its answers are the model's to {gap:.1g}")


def _job(
    options: TemporalOptions,
    reader: BarReader,
    name: str,
    data: Windows,
    valid: Windows,
    weights: Tensor | None,
) -> Job:
    torch.manual_seed(options.seed)
    model = reader.model(name)
    return Job(
        model=model,
        data=data,
        valid=valid,
        loss=nn.CrossEntropyLoss(weight=weights, label_smoothing=options.smoothing),
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.lr or 1e-3, weight_decay=options.weight_decay),
        schedule=warm_up_and_cosine(options.warm_up),
        clip=options.clip,
        batch_size=options.batch_size,
        # The MLP has batch norms; all models leave the sample out, which is another in every epoch, so that they are
        # compared on the same data.
        drop_last=options.leaves_one(len(data)) or None,
        eval_batch=options.judged_at_once,
        epochs=options.epochs or 20,
        metrics=["accuracy", "macro_f1"],
        monitor="macro_f1",
        patience=options.patience,
        seed=options.seed,
        device=options.device,
    )


def _sides(
    options: TemporalOptions, table: Table, known: Sequence[tuple[Bars, Features]], frames: Sequence[int], say: Say
) -> tuple[list[Side], list[Side]]:
    """What is trained on and what is held out: of each symbol the last part, or a file of its own."""
    later: list[tuple[Bars, Features]] = []
    if options.valid:
        length = max((one for one, _ in known), key=len).seconds
        # Symbols that are called as files are called so here, too: else bars that are trained on would not be known.
        judged_by = _shown_bars(options.valid, say, at_once=is_called_as_files(table))
        later = list(zip(*known_features(judged_by, frames, say, seconds=length), strict=True))
        refuse_overlaps([one for one, _ in known], [one for one, _ in later], options)
        train = [side_of(options, one, its, 0, len(one)) for one, its in known]
        held = [side_of(options, one, its, 0, len(one)) for one, its in later]
    else:
        cuts = [cut_of(options, one, its) for one, its in known]
        # The labels of the last bars before a cut look beyond it: as many bars are left out.
        train = [side_of(options, *one, 0, cut - options.ahead) for one, cut in zip(known, cuts, strict=True)]
        held = [side_of(options, *one, cut, len(one[0])) for one, cut in zip(known, cuts, strict=True)]
    refuse_few(options, options.data, "to train on", known, train, frames, say)
    # Of one file the same symbols are short, and were said.
    refuse_few(
        options, options.valid or options.data, "to hold out", later or known, held, frames, say if later else None
    )
    return [side for side in train if side], [side for side in held if side]


def revive(state: Mapping[str, Any], folder: Path) -> BarReader:
    """The reader of a finished run."""
    standard = Standard.from_dict(state["standard"])
    return BarReader(state["frames"], state["length"], standard, state["features"], state.get("seconds"))


RECIPE = Recipe(
    name="temporal",
    summary="direction of prices from bars in several time frames: LSTM, Transformer and MLP, the best is kept",
    expects="columns time, open, high, low, close; volume and symbol if there are any",
    options=TemporalOptions,
    prepare=prepare,
    revive=revive,
)
