"""hotlap's fast plans against the trainings people write, and what they do to the numbers.

    python -m benchmarks.fast_path [--device cuda|cpu] [--only NAME] [--columns by_hand,hotlap,…] [--json FILE]
    python -m benchmarks.fast_path --texts FILE

Samples a second of whole steps in the steady state, the same batch in every column of a row. hotlap and its rival by
hand take turns in laps (A B B A), with one wait for the device a lap, and the ratio is the median over pairs with its
95 % interval. Nobody clips gradients but the guides' last loop. `fit` is one whole call: its rate while training, and
from call to return, run folder, capture and checkpoints included. Quality: the same training of 200 steps under the
fast plan and under the plainest one in fp32, and the cosine of the gradient of one batch in both precisions.

On a GPU the columns are guide_before, guide_after, lightning, by_hand, hotlap, compiled, fit and quality; on the CPU
loader, by_hand, gather, resident and quality, for the small works. `compiled` is hotlap's plan with the model compiled
under the capture, for two of the works; it takes turns with `hotlap`, and the seconds of compiling are told apart. A
column that fails says why, the others go on, and the exit code is 1.

Texts have dynamic and hf_trainer instead of lightning. The guides' loops pad to the longest of all texts, `dynamic` to
the longest of each batch; hf_trainer is the best of three settings. hotlap may reorder; a lap of it and of its rival
by hand is a whole epoch, since its batches are of several widths. With --texts, BERT-base is trained on the texts of a
CSV file (class, title, description; no header), and two columns show what the widths do: `one_width` is hotlap's plan
with all batches as wide as the longest text, `by_width` with a few widths but in shuffled order. Without a GPU it only
tells how much is padding, unless columns are named. Two columns run only where they are named, beside `hotlap`:
`not_overlapped` is its plan with each weight cast by itself and all gradients on one stream, and `torch_attention`, of
texts, its plan with the kernels of attention that torch chooses.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import hotlap
from benchmarks import rivals, text_rivals
from benchmarks.laps import SHORTEST_LAP_S, Column, Lap, Laps, Ratio, in_turn
from benchmarks.quality import quality, quality_lines
from benchmarks.rivals import Steps, UnavailableError
from benchmarks.texts import Paddings, TextWork, file_work, text_works
from benchmarks.trainings import steps_of, told_by, whole_fit
from benchmarks.versions import versions
from benchmarks.work import WORKS, Work, called
from hotlap.core.errors import PlanError
from hotlap.core.plan import HOME

LOADERS = ("guide_before", "guide_after", "dynamic", "lightning", "hf_trainer")
"""These come first for all works: worker processes forked after a capture may die of what they inherit."""
GPU = (*LOADERS, "by_hand", "hotlap", "compiled", "fit", "quality")
CPU = ("loader", "by_hand", "gather", "resident", "quality")
TEXTS = ("guide_before", "dynamic", "by_hand", "one_width", "by_width", "hotlap", "quality")
"""Of the texts of a file."""
NAMED_ALONE = ("torch_attention", "not_overlapped")
"""Columns that run only where they are named."""
TEXTS_ALONE = ("dynamic", "hf_trainer", "one_width", "by_width", "torch_attention")
OTHERS_ALONE = ("lightning", "loader")
"""Columns that other works do not have, and those that texts do not have."""
CONTESTS = {
    "cuda": [("by_hand", "hotlap"), ("hotlap", "compiled"), ("not_overlapped", "hotlap")],
    "cpu": [("loader", "gather"), ("loader", "resident")],
    "texts": [
        *(("by_hand", "hotlap"), ("hotlap", "compiled"), ("not_overlapped", "hotlap")),
        *((rival, "hotlap") for rival in ("one_width", "by_width", "torch_attention")),
    ],
}
"""Which columns take turns: the rival first."""
DYNAMIC_BATCHES = 16
"""In a lap of batches that are as wide as their longest text: one alone says little."""


def applies(column: str, work: Work) -> bool:
    """Whether a work has a column."""
    if column == "compiled":
        return work.compiles != "no" and "compile" in HOME
    return column not in (OTHERS_ALONE if isinstance(work, TextWork) else TEXTS_ALONE)


def contests(work: Work, device: torch.device) -> list[tuple[str, str]]:
    """Which columns of a work take turns: the rival first."""
    return CONTESTS["texts" if isinstance(work, TextWork) else device.type]


def steps_a_round(work: Work, column: str) -> int:
    """Laps are of whole rounds: of what workers bring in a burst, or of batches of all widths."""
    if isinstance(work, TextWork) and column not in ("guide_before", "guide_after"):
        return DYNAMIC_BATCHES if column == "dynamic" else work.epoch_batches
    return rivals.WORKERS.get(column, 1)


# --- the report ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """All that is known of a work."""

    columns: dict[str, Column] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    fit: dict[str, float] | None = None
    quality: dict[str, Any] | None = None
    padding: Paddings | None = None


class RivalError(Exception):
    """A rival failed when it was to run beside hotlap: its failure, not hotlap's."""

    def __init__(self, rival: str) -> None:
        super().__init__(rival)
        self.rival = rival


class Bench:
    """Runs columns, and goes on where one fails."""

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self._device, self._options = device, options
        self.rows: dict[str, Row] = {}
        self.failures: list[str] = []

    def run(self, works: Sequence[Work], columns: Sequence[str]) -> None:
        """All columns of all works."""
        self.rows = {
            work.name: Row(padding=Paddings.of(work) if isinstance(work, TextWork) else None) for work in works
        }
        for work in works:
            for column in (c for c in columns if c in LOADERS and applies(c, work)):
                self._try(work, column, self._alone)
        for work in works:
            theirs = [column for column in columns if applies(column, work)]
            for pair in contests(work, self._device):
                if set(pair) <= set(theirs):
                    self._try(work, pair[1], functools.partial(self._contest, rival=pair[0]))
            for column in theirs:
                if column in ("fit", "quality"):
                    self._try(work, column, self._fit if column == "fit" else self._quality)
                elif column not in self._row(work).columns:
                    # No contest for it, or one that the other side's failure ended.
                    self._try(work, column, self._alone)

    def _row(self, work: Work) -> Row:
        return self.rows[work.name]

    def _try(self, work: Work, column: str, what: Callable[[Work, str], str]) -> None:
        begun = time.perf_counter()
        try:
            told = what(work, column)
        except Exception as error:  # whatever it was, the others go on
            cause: BaseException = error
            if isinstance(error, RivalError) and error.__cause__:
                column, cause = error.rival, error.__cause__
            # A rival that is not there, or a feed that is not built for this device, is no failure.
            missing = isinstance(cause, UnavailableError) or (column == "resident" and isinstance(cause, PlanError))
            told = str(cause) if missing else f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
            self._row(work).columns[column] = Column(note=told, failed=not missing)
            if not missing:
                self.failures.append(f"{work.name}, {column}: {told}")
        self._clean()
        took = time.perf_counter() - begun
        print(f"{work.name:<28} {column:<13} {told}   ({took:.1f} s)", file=sys.stderr, flush=True)

    def _clean(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _laps(self, steps: Steps, column: str, work: Work) -> Laps:
        lap_s = max(self._options.seconds, work.lap_s)
        warm_s, rounds = self._options.warm_seconds, steps_a_round(work, column)
        return Laps(steps, self._device, lap_s=lap_s, warm_s=warm_s, rounds=rounds)

    def _alone(self, work: Work, column: str) -> str:
        if column == "lightning":
            done = self._lightning(work)
        elif column == "hf_trainer":
            assert isinstance(work, TextWork)
            done = self._hf_trainer(work)
        else:
            rigs: list[hotlap.Rig] = []
            steps = steps_of(column, work, self._device, rigs.append)
            try:
                laps = self._laps(steps, column, work)
                done = Column([laps.lap() for _ in range(self._options.laps)], told_by(rigs))
            finally:
                steps.close()
        self._row(work).columns[column] = done
        return f"{done} samples/s{f'; {done.note}' if done.note else ''}"

    def _lightning(self, work: Work) -> Column:
        options = self._options
        found = rivals.lightning(
            work,
            work.build(),
            work.data(),
            self._device,
            laps=options.laps,
            lap_s=options.seconds,
            warm_s=options.warm_seconds,
        )
        return Column([Lap(*lap) for lap in found])

    def _hf_trainer(self, work: TextWork) -> Column:
        """The best of its settings; the others are told."""
        options, found = self._options, {}
        for way in text_rivals.TRAINER_WAYS:
            laps = text_rivals.hf_trainer(
                work,
                way,
                self._device,
                laps=options.laps,
                lap_s=max(options.seconds, work.lap_s),
                warm_s=options.warm_seconds,
            )
            found[way] = Column([Lap(*lap) for lap in laps])
            self._clean()
        best = max(found.values(), key=lambda column: column.rate)
        best.note = "best of " + ", ".join(f"{column} {way}" for way, column in found.items())
        return best

    def _contest(self, work: Work, mine: str, rival: str) -> str:
        row, options = self._row(work), self._options
        their_rigs: list[hotlap.Rig] = []
        our_rigs: list[hotlap.Rig] = []
        theirs = steps_of(rival, work, self._device, their_rigs.append)
        ours = steps_of(mine, work, self._device, our_rigs.append)
        try:
            # The rival by hand sets torch's switches while it captures, so it comes first.
            try:
                a = self._laps(theirs, rival, work)
            except Exception as error:
                raise RivalError(rival) from error
            b = self._laps(ours, mine, work)
            their_laps, our_laps, ratio = in_turn(a, b, options.pairs)
            notes = told_by(their_rigs), told_by(our_rigs)
        finally:
            theirs.close()
            ours.close()
        for column, laps, note in ((rival, their_laps, notes[0]), (mine, our_laps, notes[1])):
            done = row.columns.setdefault(column, Column())
            done.laps, done.note = done.laps + laps, note
        row.ratios[f"{mine}/{rival}"] = ratio
        told = f"{row.columns[mine]} samples/s, {ratio} of {rival}'s {row.columns[rival]}"
        return "; ".join(filter(None, (told, *notes)))

    def _fit(self, work: Work, column: str) -> str:
        row = self._row(work)
        known = [row.columns[name].rate for name in ("hotlap", "gather", "by_hand") if _timed(row, name)]
        each = work.replay_steps
        rate = known[0] if known else 1000.0
        steps = max(1, round(rate * self._options.fit_seconds / work.batch / each)) * each
        row.fit = whole_fit(work, self._device, steps)
        return f"{row.fit['steady']:,.0f} samples/s, {row.fit['whole']:,.0f} from call to return, {steps:,} steps"

    def _quality(self, work: Work, column: str) -> str:
        row = self._row(work)
        row.quality = quality(work, self._device, self._options.quality_steps)
        return "done"


def _timed(row: Row, name: str) -> bool:
    return name in row.columns and bool(row.columns[name].laps)


def table(rows: dict[str, Row], columns: Sequence[str]) -> Iterator[str]:
    """The report, for people."""
    timed = [name for name in columns if any(name in row.columns for row in rows.values())]
    timed = [name for name in timed if name not in ("fit", "quality")]
    ratios = list(dict.fromkeys(name for row in rows.values() for name in row.ratios))
    head = ["samples/s", *timed, *ratios, *(["fit, steady", "fit, whole run"] if "fit" in columns else [])]
    lines = [head]
    for name, row in rows.items():
        cells = [str(row.columns[c]) if _timed(row, c) else "–" for c in timed]
        cells += [str(row.ratios[r]) if r in row.ratios else "–" for r in ratios]
        if "fit" in columns:
            cells += [f"{row.fit['steady']:,.0f}", f"{row.fit['whole']:,.0f}"] if row.fit else ["–", "–"]
        lines.append([name, *cells])
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    for name, *cells in lines:
        yield "  ".join([name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))])
    for name, row in rows.items():
        for column, done in row.columns.items():
            if done.note:
                yield f"{name}, {column}: {done.note}"
    yield from (line for name, row in rows.items() if row.padding for line in row.padding.lines(name))
    yield from (line for name, row in rows.items() for line in alone_lines(name, row))
    if any(row.quality for row in rows.values()):
        yield ""
    for name, row in rows.items():
        if row.quality:
            yield from quality_lines(name, row.quality)


def alone_lines(name: str, row: Row) -> Iterator[str]:
    """How fast hotlap is as a multiple of those that were timed alone, for texts: by medians, without an interval."""
    others = [other for other in LOADERS if _timed(row, other)]
    for mine, words in {"hotlap": "hotlap is", "compiled": "hotlap, compiled, is"}.items():
        if row.padding is not None and others and _timed(row, mine):
            rate = row.columns[mine].rate
            told = ", ".join(f"{rate / row.columns[other].rate:.2f}x as fast as {other}" for other in others)
            yield f"{name}: {words} {told}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="words, or their beginnings, in a work's name")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="train BERT-base on a CSV file's texts instead")
    parser.add_argument("--columns", default="", help="some columns only, with commas between")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a lap, at least")
    parser.add_argument("--warm-seconds", type=float, default=1.0, help="of work before a column is timed")
    parser.add_argument("--pairs", type=int, default=12, help="of laps, hotlap against its rival")
    parser.add_argument("--laps", type=int, default=4, help="of a column that is timed alone")
    parser.add_argument("--fit-seconds", type=float, default=6.0, help="of training in a whole fit")
    parser.add_argument("--quality-steps", type=int, default=200)
    parser.add_argument("--threads", type=int, help="CPU threads; one has far less noise than all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    known = TEXTS if options.texts else GPU if options.device == "cuda" else CPU
    too_slow = options.texts and options.device == "cpu"
    options.columns = options.columns.split(",") if options.columns else [] if too_slow else list(known)
    unknown = [name for name in options.columns if name not in {*GPU, *CPU, *TEXTS, *NAMED_ALONE}]
    if unknown:
        parser.error(f"no column is called {', '.join(unknown)}; there are {', '.join(known)}")
    if options.seconds < SHORTEST_LAP_S:
        parser.error(f"a lap of {options.seconds} s is too short to time; the least is {SHORTEST_LAP_S} s")
    return options


def all_works(texts: tuple[int, int] | None = None) -> tuple[Work, ...]:
    """All that is trained, on so many texts; where the texts' models cannot be made, that is said."""
    of_texts = text_works(texts) if texts else text_works()
    if not of_texts:
        print("texts are left out: transformers is not installed", file=sys.stderr)
    return *WORKS, *of_texts


def main(arguments: Sequence[str] | None = None, works: Sequence[Work] | None = None) -> int:
    """Print the report; 1 where a column failed, 2 where nothing can be measured of what was asked for."""
    options = parsed(arguments)
    if works is None:
        try:
            works = [file_work(options.texts)] if options.texts else all_works()
        except (OSError, ValueError, ImportError) as error:
            print(f"--texts {options.texts}: {error}", file=sys.stderr)
            return 2
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    # Large works on a CPU would take minutes, and hotlap does nothing for them there.
    there = [work for work in works if on_gpu or work.small or options.texts]
    chosen = called(there, options.only)
    if not chosen:
        names = "; ".join(work.name for work in there)
        print(f"no work here is called {options.only}; there are {names}", file=sys.stderr)
        return 2
    where = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} CPU threads"
    begun = time.perf_counter()
    bench = Bench(device, options)
    bench.run(chosen, options.columns)
    took = time.perf_counter() - begun
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"fast path on {where}, {told}; laps of {options.seconds} s, {options.pairs} pairs, {took:.0f} s in all")
    for line in table(bench.rows, options.columns):
        print(line)
    for failure in bench.failures:
        print(f"failed: {failure}")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        settings["texts"] = str(options.texts) if options.texts else None
        raw = {
            name: asdict(row) | {"samples_per_s": {c: row.columns[c].rate for c in row.columns if _timed(row, c)}}
            for name, row in bench.rows.items()
        }
        report = {"machine": where, "versions": versions(), "settings": settings, "seconds": took, "works": raw}
        options.json.write_text(json.dumps({**report, "failures": bench.failures}, indent=2, ensure_ascii=False) + "\n")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
