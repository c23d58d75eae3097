"""When the session of this process ends: by a variable, by Slurm's time limit, or by the rules of Kaggle and Colab."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Final

from hotlap.core.errors import MachineError, shown
from hotlap.core.units import read_seconds, show_seconds
from hotlap.machine.detect import detect
from hotlap.machine.runtimes import Runtime

VARIABLE: Final = "HOTLAP_SESSION_ENDS"
"""Names the end of the session: a time of day, a date and a time, a duration from the process's start on, or `off`."""
ASKING_S: Final = 3.0
"""Seconds that `squeue` and `scontrol` may take to answer."""
KNOWN_S, GUESSED_S = 30.0, 300.0
"""Seconds before the end that stay free: of a limit that was given, and of one that counts from an unknown moment."""
SHARE: Final = 0.05
"""Of the time that is left at first, the most that stays free."""
_JOB: Final = "SLURM_JOB_ID"
_LONGER_S: Final = 2.0
"""Times the usual limit that a session on Colab may last, for those who pay."""


@dataclass(frozen=True, kw_only=True)
class SessionEnd:
    """The end of a session."""

    at_s: float
    """By `time.time()`."""
    by: str
    """What sets it, in words."""
    margin_s: float = KNOWN_S
    """Seconds before it that stay free, beside what saving takes."""
    then: str = ""
    """What to do to go on elsewhere, beside the command; empty where nothing is special."""

    @property
    def left_s(self) -> float:
        """Seconds until then; below 0 where it is over."""
        return self.at_s - time.time()

    def __str__(self) -> str:
        at = datetime.fromtimestamp(self.at_s, UTC).astimezone()
        form = "%H:%M" if self.left_s < 20 * 3600 else "%d %b %H:%M"
        return f"{at:{form}} by {self.by}"

    @property
    def line(self) -> str:
        """It in one line, for a banner."""
        left_s = self.left_s
        return f"ends at {self}, in {show_seconds(left_s)}" if left_s > 0 else f"has ended at {self}"


def session_end(
    environ: Mapping[str, str] = os.environ,
    runtime: Callable[[], Runtime | None] = lambda: detect().runtime,
    begun_s: Callable[[], float | None] = lambda: _begun_s(1),
) -> SessionEnd | None:
    """The end of this session; None where none is known. Raises MachineError for a variable that names no time.

    `begun_s` says when the session began, by `time.time()`: by default when the first process of its container did.
    """
    asked = environ.get(VARIABLE, "").strip()
    if asked.lower() == "off":
        return None
    if asked:
        end: SessionEnd | None = SessionEnd(at_s=_asked(asked), by=VARIABLE)
    else:
        end = _slurm_end(environ) or _hosted_end(runtime(), begun_s)
    return None if end is None else replace(end, margin_s=min(end.margin_s, SHARE * max(0.0, end.left_s)))


def _asked(text: str) -> float:
    """The moment that the variable names; a time of day is the next one after this process began."""
    begun_s = _own_start_s()
    with suppress(ValueError):
        return begun_s + read_seconds(text)
    with suppress(ValueError):
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
            begun, parts = datetime.fromtimestamp(begun_s, UTC).astimezone(), [*map(int, text.split(":")), 0]
            at = begun.replace(hour=parts[0], minute=parts[1], second=parts[2], microsecond=0)
            return (at if at > begun else at + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    raise MachineError(
        f"{VARIABLE}={shown(text)} is no time: give a time of day (17:40), a date and a time (2026-11-19T17:40), "
        "how long from the start of the process on (3h 30m), or off"
    )


def _slurm_end(environ: Mapping[str, str]) -> SessionEnd | None:
    """The end of a job of Slurm; newer versions set it as a variable, older ones answer when asked."""
    job = environ.get(_JOB, "")
    at_s: float | None = None
    with suppress(ValueError):
        at_s = float(environ.get("SLURM_JOB_END_TIME", ""))
    if at_s is None and re.fullmatch(r"[\w.+-]{1,64}", job):
        for words, place in (
            (["squeue", "--noheader", "--jobs", job, "--format", "%e"], r"^\s*(\d{4}-\S+)"),
            (["scontrol", "show", "job", job], r"\bEndTime=(\d{4}-\S+)"),
        ):
            found = re.search(place, _answer(*words))
            with suppress(ValueError):
                at_s = datetime.fromisoformat(found[1]).timestamp() if found is not None else None
            if at_s is not None:
                break
    if at_s is None:
        return None
    return SessionEnd(at_s=at_s, by="Slurm's limit", then="in a new job: sbatch a script with this command")


@cache
def _answer(*words: str) -> str:
    if shutil.which(words[0]) is None:
        return ""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=ASKING_S, check=False).stdout
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""


def _hosted_end(runtime: Runtime | None, begun_s: Callable[[], float | None]) -> SessionEnd | None:
    """The end by a platform's rules; None where the session is older than these allow, and so began at another time."""
    if runtime is None or runtime.limit_s is None or (began_s := begun_s()) is None:
        return None
    age_s, limit_s = time.time() - began_s, float(runtime.limit_s)
    if runtime.name == "colab" and limit_s <= age_s < _LONGER_S * limit_s:
        limit_s *= _LONGER_S
    if not 0 <= age_s < limit_s:
        return None
    name = runtime.name.capitalize()
    keeps = "`hotlap pack RUN --checkpoints` writes all of the run into one file"
    where = "keep it as output" if runtime.name == "kaggle" else "copy it to your drive"
    return SessionEnd(
        at_s=began_s + limit_s,
        by=f"{name}'s {limit_s / 3600:.0f} hours",
        margin_s=GUESSED_S,
        then=f"before the session is gone, {keeps}: {where}",
    )


def _begun_s(pid: int) -> float | None:
    """When a process began; None where that cannot be seen."""
    import psutil

    with suppress(psutil.Error, OSError, ValueError):
        return float(psutil.Process(pid).create_time())
    return None


@cache  # a fork of this process counts from the same moment
def _own_start_s() -> float:
    return _begun_s(os.getpid()) or time.time()
