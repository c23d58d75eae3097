"""The same script without hotlap and with it, one after the other, and what both came to side by side."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any, Final, Self

from hotlap.core.errors import shown
from hotlap.core.terminal import say
from hotlap.core.units import show_seconds
from hotlap.script.running import Target

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


def compare(target: Target, options: Sequence[str], *, seed: int) -> int:
    """Run it both ways, show what they print as it comes, and tell on stderr how they differ.

    `options` are those of `hotlap run`, for the second run. Returns 0 if both ended so, else the first code that is
    another; minus the number of a signal by which the user ended it. Neither run can read the terminal.
    """
    _say("the script runs twice here, first without hotlap; the second run finds the first's files and overwrites them")
    variables = {"HOTLAP_SEED": str(seed), "PYTHONHASHSEED": str(seed), "PYTHONUNBUFFERED": "1"}
    outcomes = []
    with _Child() as child:
        for title, how in (("without hotlap", ["--off"]), ("with hotlap", options)):
            _say(f"--- {title}")
            command = [sys.executable, "-m", "hotlap", "run", *how, *target.words]
            outcomes.append(child.run(command, {**os.environ, **variables}))
            if child.asked_to_end is not None:
                return -child.asked_to_end
    without, under = outcomes
    say(*told(without, under))
    return without.code or under.code


def told(without: Outcome, under: Outcome) -> list[str]:
    """Times, exit codes and last figures of both in columns, and whether they printed the same lines."""
    ratio = f"{without.wall_s / under.wall_s:.3g}x as fast" if under.wall_s else ""
    rows = [
        ("", "without hotlap", "with hotlap", ""),
        ("wall", show_seconds(without.wall_s), show_seconds(under.wall_s), ratio),
        ("exit code", str(without.code), str(under.code), "same" if without.code == under.code else "DIFFERENT"),
    ]
    rows += [(figure.name, figure.without, figure.under, figure.difference) for figure in figures(without, under)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"printed: {_structure(without.out, under.out)}"]


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

    def run(self, command: Sequence[str], environ: dict[str, str]) -> Outcome:
        """Run it to its end, and pass on what it prints."""
        begun = time.perf_counter()
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
        out, err = (pipe.text() for pipe in pipes)
        return Outcome(wall_s=wall_s, code=code if code >= 0 else 128 - code, out=out, err=err)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_end = number
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


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
