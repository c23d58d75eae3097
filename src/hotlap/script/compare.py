"""`hotlap run --compare`: the same script without and with hotlap in turns, and both results side by side."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, Self

from hotlap.core.errors import HotlapError, shown
from hotlap.core.ledger import Ledger
from hotlap.core.table import as_json
from hotlap.core.terminal import say
from hotlap.core.units import show_seconds
from hotlap.machine.limits import warn_if_busy
from hotlap.script.running import BEGAN, Target

LEDGER: Final = "ledger.jsonl"
"""The file's name in a run folder, repeated here because `store.run_folder` imports torch."""
FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_WORDS_S: Final = 5.0
"""How long to wait for output after a run has ended: a process it left behind may keep the pipe open forever."""

_NUMBER = re.compile(
    r"""(?<![\w.])
    (?: (?P<clock> \d{4}-\d\d-\d\d | \d+(?::\d\d)+(?:[.,]\d+)? )
      | 0x[0-9a-f]+
      | (?P<value> [-+]?(?:\d+(?:,\d{3})*\.?\d*|\.\d+)(?:e[-+]?\d+)? | nan\b | [-+]?inf\b )
        (?P<unit> \s?(?:[mµun]?s|secs?|seconds?|hours?|[\w/]+/s(?:ec)?|s/\w+)\b | (?:min|h)\b )?
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_OF_TIME = re.compile(
    r"(?<![a-z])(time|took|elapsed|eta|duration|runtime|secs?|seconds?|minutes?|hours?|ms|speed|throughput|fps)(?![a-z])",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one run."""

    wall_s: float
    code: int
    """The exit code as a shell shows it: 128 plus the number if a signal ended the run."""
    out: str
    err: str
    cpu_s: float = 0.0
    """User and system time of all its processes."""
    startup_s: float = 0.0
    """Seconds until the script itself began."""
    tuning_s: float = 0.0
    """Seconds of tuning, from the ledger."""
    is_changed: bool = False
    """Whether it ended with another plan than the script's own."""

    @property
    def rest_s(self) -> float:
        """Wall time of the script itself, without start-up and tuning."""
        return self.wall_s - self.startup_s - self.tuning_s


@dataclass(frozen=True)
class Figure:
    """A named number in its last value, as both runs printed it."""

    name: str
    without: str
    under: str
    """The value with hotlap."""

    @property
    def difference(self) -> str:
        """The difference with hotlap, or "same"."""
        if self.without == self.under:
            return "same"
        a, b = (float(text.replace(",", "")) for text in (self.without, self.under))
        return f"{b - a:+.3g}" + (f" ({(b - a) / abs(a):+.2%})" if a else "")


def compare(target: Target, options: Sequence[str], *, seed: int, out: Path | None = None, rounds: int = 2) -> int:
    """Run the script both ways in turns, pass on what the runs print, and print the comparison on stderr.

    `options` are those of `hotlap run`; the first run with hotlap leaves its run folder at `out`. Returns 0 if all runs
    do, else the first other exit code; minus the signal's number if the user interrupted. The runs cannot read the
    terminal. If a run of the first round fails, there is no second round.
    """
    ways = ("without hotlap", "with hotlap")
    _say(f"the script runs {2 * rounds} times here, first without hotlap; each finds the files of those before")
    warn_if_busy(_say)
    outcomes: dict[str, list[Outcome]] = {way: [] for way in ways}
    variables = {"HOTLAP_SEED": str(seed), "PYTHONHASHSEED": str(seed), "PYTHONUNBUFFERED": "1"}
    with _Child() as child, tempfile.TemporaryDirectory(prefix="hotlap-compare-") as notes:
        for number in range(rounds):
            if any(outcome.code for done in outcomes.values() for outcome in done):
                break
            # A B B A: drift affects both equally.
            for way in ways if number % 2 == 0 else reversed(ways):
                _say(f"--- {way}" + (f", run {number + 1} of {rounds}" if rounds > 1 else ""))
                began, before = Path(notes) / f"{way}-{number}", _ledgers(out)
                later = out.with_name(f"{out.name}-{number + 1}") if out is not None and number else out
                how = [*options, *(["--out", str(later)] if later is not None else [])] if way == ways[1] else ["--off"]
                command = [sys.executable, "-m", "hotlap", "run", *how, *target.words]
                done = child.run(command, {**os.environ, **variables, BEGAN: str(began)}, began=began)
                outcomes[way].append(_with_tuning(done, _ledgers(out) - before))
                if child.asked_to_end is not None:
                    return -child.asked_to_end
    without, under = (outcomes[way] for way in ways)
    say(*format_comparison(without, under))
    return next((outcome.code for outcome in (*without, *under) if outcome.code), 0)


def _ledgers(out: Path | None) -> set[Path]:
    """The ledgers in all run folders where runs may write: under `runs`, or at `out` and beside it."""
    folders = Path("runs").glob("*") if out is None else out.parent.glob(f"{out.name}*")
    return {file for folder in folders for file in folder.glob(f"**/{LEDGER}")}


def _with_tuning(outcome: Outcome, ledgers: Iterable[Path]) -> Outcome:
    """The outcome with tuning seconds and plan changes from the ledgers that the run left."""
    for file in ledgers:
        try:
            entries = list(ledger := Ledger.from_lines(file.read_text()))
        except (OSError, ValueError, HotlapError):  # the run was killed while writing it
            continue
        total = as_json(ledger)["total"]
        outcome = replace(
            outcome,
            tuning_s=outcome.tuning_s + (total["cost_s"] if total else 0.0),
            is_changed=outcome.is_changed or (bool(entries) and entries[-1].plan != entries[0].plan),
        )
    return outcome


def format_comparison(without: Sequence[Outcome], under: Sequence[Outcome]) -> list[str]:
    """The table of times with their spread, exit codes and last figures, then the verdict on time and output."""
    rows = [("", "without hotlap", "with hotlap", "")]
    for name, times in (
        ("wall", [[run.wall_s for run in runs] for runs in (without, under)]),
        ("CPU time", [[run.cpu_s for run in runs] for runs in (without, under)]),
        ("start-up", [[run.startup_s for run in runs] for runs in (without, under)]),
        ("tuning", [[0.0], [run.tuning_s for run in under]]),
        ("the rest", [[run.rest_s for run in runs] for runs in (without, under)]),
    ):
        is_speed = name in ("wall", "the rest") and min(times[1]) > 0
        rows.append((name, _spread(times[0]), _spread(times[1]), _ratio(*times) if is_speed else ""))
    codes = [", ".join(str(code) for code in sorted({run.code for run in runs})) for runs in (without, under)]
    rows.append(("exit code", codes[0], codes[1], "same" if codes[0] == codes[1] else "DIFFERENT"))
    first, other = without[0], under[0]
    rows += [(figure.name, figure.without, figure.under, figure.difference) for figure in figures(first, other)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, _verdict(without, under), f"printed: {_structure(first.out, other.out)}"]


def _spread(times: Sequence[float]) -> str:
    """The mean, and the range if there are several."""
    mean = show_seconds(statistics.fmean(times))
    return f"{mean} [{show_seconds(min(times))}, {show_seconds(max(times))}]" if len(times) > 1 else mean


def _ratio(without: Sequence[float], under: Sequence[float]) -> str:
    """The speed-up, with its least and greatest value over pairs of runs."""
    ratio = f"{statistics.fmean(without) / statistics.fmean(under):.3g}x as fast"
    if len(without) < 2 or len(under) < 2:
        return ratio
    return f"{ratio} [{min(without) / max(under):.3g}, {max(without) / min(under):.3g}]"


def _verdict(without: Sequence[Outcome], under: Sequence[Outcome]) -> str:
    """What the difference in time means."""
    if not any(run.is_changed for run in under):
        return "hotlap changed nothing in the end: a difference in time is noise plus the cost of watching and trials"
    if len(without) < 2 or len(under) < 2:
        return "one run each has no spread: it cannot show whether the difference is noise"
    ours, theirs = ([run.wall_s for run in runs] for runs in (without, under))
    if min(ours) <= max(theirs) and min(theirs) <= max(ours):
        return "runs of the same kind differ as much as both kinds do: the difference in time may be noise"
    faster = "faster" if max(theirs) < min(ours) else "SLOWER"
    return f"all {len(under)} runs with hotlap were {faster} than all runs without"


def figures(without: Outcome, under: Outcome) -> list[Figure]:
    """Figures that both runs print in lines equal but for their numbers, with the last value of each; no times."""
    found = {}
    for ours, theirs in ((without.out, under.out), (_before_traceback(without.err), _before_traceback(under.err))):
        before, after = _last_values(ours), _last_values(theirs)
        for place, (name, value) in before.items():
            if place in after:
                found[name] = Figure(name, value, after[place][1])
    return list(found.values())


# --- one run ---------------------------------------------------------------------------------------------


class _Child:
    """Runs commands one at a time, and forwards signals that would end this process to the command's process group."""

    def __init__(self) -> None:
        self.asked_to_end: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], environ: dict[str, str], *, began: Path) -> Outcome:
        """Run a command to its end, and pass on its output; the command writes its start time to the file `began`."""
        cpu_s, begun = _cpu_s(), time.perf_counter()
        # In a process group of its own: otherwise Ctrl-C in a terminal would reach it twice.
        self._process = process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        if self.asked_to_end is not None:
            self._forward(self.asked_to_end, None)
        pipes = [_Pipe(process.stdout, sys.stdout), _Pipe(process.stderr, sys.stderr)]
        code = process.wait()
        wall_s = time.perf_counter() - begun
        self._process = None
        cpu_s = _cpu_s() - cpu_s
        out, err = (pipe.text() for pipe in pipes)
        startup_s = 0.0
        with contextlib.suppress(OSError, ValueError):
            startup_s = max(0.0, float(began.read_text()) - begun)
        return Outcome(
            wall_s=wall_s,
            code=code if code >= 0 else 128 - code,
            out=out,
            err=err,
            cpu_s=cpu_s,
            startup_s=startup_s,
        )

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_end = number
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _cpu_s() -> float:
    """CPU seconds of all ended child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Pipe:
    """Passes on what comes through a pipe at once, and keeps a copy."""

    def __init__(self, pipe: IO[bytes] | None, stream: Any) -> None:
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._pass_on, args=(pipe, stream.buffer), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Everything that came through."""
        self._thread.join(LAST_WORDS_S)
        return self._kept.decode(errors="replace")

    def _pass_on(self, pipe: IO[bytes], sink: IO[bytes]) -> None:
        # If our output is closed, the script notices as it would alone.
        with pipe, contextlib.suppress(OSError, ValueError):
            while chunk := os.read(pipe.fileno(), 65536):
                self._kept += chunk
                sink.write(chunk)
                sink.flush()


# --- printed output ----------------------------------------------------------------------


def _lines(text: str) -> Iterator[str]:
    """Non-empty lines; each redraw of a progress bar counts as a line."""
    return filter(None, (" ".join(line.split()) for line in re.split(r"[\r\n]+", text)))


def _before_traceback(err: str) -> str:
    """stderr without the traceback, whose lines and numbers are no figures."""
    return err.partition("Traceback (most recent call last)")[0]


def _shape(line: str) -> str:
    return _NUMBER.sub("#", line)


def _last_values(text: str) -> dict[tuple[str, int], tuple[str, str]]:
    """By line shape and position in the line: the name of a figure and its last value, in order of appearance."""
    last: dict[tuple[str, int], tuple[str, str]] = {}
    for line in _lines(text):
        shape, end = _shape(line), 0
        for place, match in enumerate(_NUMBER.finditer(line)):
            name, end = _name(line[end : match.start()]), match.end()
            if name and match["value"] and not match["unit"] and not _OF_TIME.search(name):
                last.pop((shape, place), None)
                last[shape, place] = (name, match["value"])
    return last


def _name(before: str) -> str:
    """The name of a number, from at most the last three words before it."""
    parts = (part.strip(" :='\"*%-–→") for part in re.split(r"[,;|·()\[\]{}<>]", before))
    named = [part for part in parts if re.search(r"[^\W\d]", part)]
    return " ".join(named[-1].split()[-3:]) if named else ""


def _structure(without: str, under: str) -> str:
    if without == under:
        return "identical"
    ours, theirs = ([_shape(line) for line in _lines(text)] for text in (without, under))
    if ours == theirs:
        return f"the same {len(ours)} lines except for their numbers"
    missing, added = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
    if not missing and not added:
        return "DIFFERENT in structure: the same lines except for their numbers, in another order"
    parts = [
        f"{lines.total()} lines only {where}, the first: {shown(next(iter(lines)))}"
        for lines, where in ((missing, "without hotlap"), (added, "with it"))
        if lines
    ]
    return f"DIFFERENT in structure: {'; '.join(parts)}"


def _say(line: str) -> None:
    say(f"hotlap: {line}")
