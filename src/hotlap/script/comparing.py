"""The same script without hotlap and with it, in turns, and what both came to side by side."""

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
from hotlap.script.running import BEGAN, Target

LEDGER: Final = "ledger.jsonl"
"""As a run folder names it, whose own module imports torch."""
FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LAST_WORDS_S: Final = 5.0
"""How long output is waited for after a run has ended: a process that it left behind may hold the pipe for ever."""

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
    """What one run came to."""

    wall_s: float
    code: int
    """As a shell sees it: 128 and the number where a signal ended it."""
    out: str
    err: str
    cpu_s: float = 0.0
    """Of all its processes, in the user's and the system's mode."""
    startup_s: float = 0.0
    """Until the script itself began."""
    tuning_s: float = 0.0
    """What hotlap says that tuning has cost."""
    is_changed: bool = False
    """Whether it trained by another plan than its own in the end."""

    @property
    def rest_s(self) -> float:
        """Wall time of the script itself, without tuning."""
        return self.wall_s - self.startup_s - self.tuning_s


@dataclass(frozen=True)
class Figure:
    """A number with a name, as both runs printed it last."""

    name: str
    without: str
    under: str
    """Under hotlap."""

    @property
    def difference(self) -> str:
        """By how much it is another one under hotlap."""
        if self.without == self.under:
            return "same"
        a, b = (float(text.replace(",", "")) for text in (self.without, self.under))
        return f"{b - a:+.3g}" + (f" ({(b - a) / abs(a):+.2%})" if a else "")


def compare(target: Target, options: Sequence[str], *, seed: int, out: Path | None = None, rounds: int = 2) -> int:
    """Run it both ways in turns, show what they print as it comes, and tell on stderr how they differ.

    `options` are those of `hotlap run`, for the runs with hotlap, whose first leaves its run folder at `out`. Returns 0
    if all ended so, else the first code that is another; minus the number of a signal by which the user ended it. No
    run can read the terminal. Where one of the first round fails, there is no second.
    """
    ways = ("without hotlap", "with hotlap")
    _say(f"the script runs {2 * rounds} times here, first without hotlap; each finds the files of those before")
    outcomes: dict[str, list[Outcome]] = {way: [] for way in ways}
    variables = {"HOTLAP_SEED": str(seed), "PYTHONHASHSEED": str(seed), "PYTHONUNBUFFERED": "1"}
    with _Child() as child, tempfile.TemporaryDirectory(prefix="hotlap-compare-") as notes:
        for number in range(rounds):
            if any(outcome.code for done in outcomes.values() for outcome in done):
                break
            # A B B A: what drifts meanwhile hits both alike.
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
    say(*told(without, under))
    return next((outcome.code for outcome in (*without, *under) if outcome.code), 0)


def _ledgers(out: Path | None) -> set[Path]:
    """Those in all run folders where runs leave theirs: under `runs`, or at `out` and beside it."""
    folders = Path("runs").glob("*") if out is None else out.parent.glob(f"{out.name}*")
    return {file for folder in folders for file in folder.glob(f"**/{LEDGER}")}


def _with_tuning(outcome: Outcome, ledgers: Iterable[Path]) -> Outcome:
    """A run with what the ledgers that it has left say of tuning."""
    for file in ledgers:
        try:
            entries = list(ledger := Ledger.from_lines(file.read_text()))
        except (OSError, ValueError, HotlapError):  # it was killed while it wrote
            continue
        total = as_json(ledger)["total"]
        outcome = replace(
            outcome,
            tuning_s=outcome.tuning_s + (total["cost_s"] if total else 0.0),
            is_changed=outcome.is_changed or (bool(entries) and entries[-1].plan != entries[0].plan),
        )
    return outcome


def told(without: Sequence[Outcome], under: Sequence[Outcome]) -> list[str]:
    """Times with their spread, exit codes and last figures of both in columns, and whether they printed the same."""
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
    """The mean, and between which it lies where there are several."""
    mean = show_seconds(statistics.fmean(times))
    return f"{mean} [{show_seconds(min(times))}, {show_seconds(max(times))}]" if len(times) > 1 else mean


def _ratio(without: Sequence[float], under: Sequence[float]) -> str:
    """How many times as fast, with what it is between the runs that lie furthest apart."""
    ratio = f"{statistics.fmean(without) / statistics.fmean(under):.3g}x as fast"
    if len(without) < 2 or len(under) < 2:
        return ratio
    return f"{ratio} [{min(without) / max(under):.3g}, {max(without) / min(under):.3g}]"


def _verdict(without: Sequence[Outcome], under: Sequence[Outcome]) -> str:
    """What the difference in time is worth."""
    if not any(run.is_changed for run in under):
        return "hotlap changed nothing in the end: a difference in time is noise, and what watching and trials took"
    if len(without) < 2 or len(under) < 2:
        return "one run each has no spread: whether the difference is noise cannot be seen"
    ours, theirs = ([run.wall_s for run in runs] for runs in (without, under))
    if min(ours) <= max(theirs) and min(theirs) <= max(ours):
        return "runs of one kind differ by as much as the two kinds do: the difference in time may be noise"
    faster = "faster" if max(theirs) < min(ours) else "SLOWER"
    return f"all {len(under)} runs with hotlap were {faster} than all runs without"


def figures(without: Outcome, under: Outcome) -> list[Figure]:
    """The last value of each figure in lines that are equal but for their numbers, without those that tell a time."""
    found = {}
    for ours, theirs in ((without.out, under.out), (_said(without.err), _said(under.err))):
        before, after = _last_values(ours), _last_values(theirs)
        for place, (name, value) in before.items():
            if place in after:
                found[name] = Figure(name, value, after[place][1])
    return list(found.values())


# --- one run ---------------------------------------------------------------------------------------------


class _Child:
    """Runs commands one at a time; what would end this process ends the command that runs, with all it started."""

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
        """Run it to its end, and pass on what it prints; `began` is the file that it notes its start in."""
        cpu_s, begun = _cpu_s(), time.perf_counter()
        # In a group of its own: a terminal would interrupt both at once, and the forwarded signal come second.
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
    """What all processes that were waited for have taken so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Pipe:
    """Passes on what comes through a pipe, at once, and keeps it."""

    def __init__(self, pipe: IO[bytes] | None, stream: Any) -> None:
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._pass_on, args=(pipe, stream.buffer), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """All that came."""
        self._thread.join(LAST_WORDS_S)
        return self._kept.decode(errors="replace")

    def _pass_on(self, pipe: IO[bytes], sink: IO[bytes]) -> None:
        # Where nobody listens any more, the script finds out as it would alone.
        with pipe, contextlib.suppress(OSError, ValueError):
            while chunk := os.read(pipe.fileno(), 65536):
                self._kept += chunk
                sink.write(chunk)
                sink.flush()


# --- what was printed ------------------------------------------------------------------------------------


def _lines(text: str) -> Iterator[str]:
    """Lines that say something; a bar that is drawn anew is one each time."""
    return filter(None, (" ".join(line.split()) for line in re.split(r"[\r\n]+", text)))


def _said(err: str) -> str:
    """What came on stderr before an error ended it, of which lines and numbers are no figures."""
    return err.partition("Traceback (most recent call last)")[0]


def _shape(line: str) -> str:
    return _NUMBER.sub("#", line)


def _last_values(text: str) -> dict[tuple[str, int], tuple[str, str]]:
    """By the shape of a line and the place in it: the name of a figure and its last value, in the order of these."""
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
    """What a number is called by the text before it: at most the last three words."""
    parts = (part.strip(" :='\"*%-–→") for part in re.split(r"[,;|·()\[\]{}<>]", before))
    named = [part for part in parts if re.search(r"[^\W\d]", part)]
    return " ".join(named[-1].split()[-3:]) if named else ""


def _structure(without: str, under: str) -> str:
    if without == under:
        return "the same to the last character"
    ours, theirs = ([_shape(line) for line in _lines(text)] for text in (without, under))
    if ours == theirs:
        return f"the same {len(ours)} lines but for their numbers"
    missing, added = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
    if not missing and not added:
        return "DIFFERENT in structure: the same lines but for their numbers, in another order"
    said = [
        f"{lines.total()} lines only {where}, the first {shown(next(iter(lines)))}"
        for lines, where in ((missing, "without hotlap"), (added, "with it"))
        if lines
    ]
    return f"DIFFERENT in structure: {'; '.join(said)}"


def _say(line: str) -> None:
    say(f"hotlap: {line}")
