"""Two conditions of the host that slow everything down, a battery and swapping; and the age of this process."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from hotlap.core.units import MIB, show_bytes
from hotlap.machine.limits import ROOT
from hotlap.machine.problems import Problem, Severity

SWAPS: Final = 2 * MIB
"""Bytes a second, in and out of swap, from which on a host swaps: it moves a page now and then anyway."""


def process_age_s() -> float:
    """Seconds since this process began: a user waits for its imports too."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))


def battery_charge() -> float | None:
    """The charge of the battery, from 0 to 1, while the machine runs on it; None where it is plugged in or has none."""
    import psutil

    with suppress(Exception):  # some systems have no such question, and some batteries no answer
        seen = psutil.sensors_battery()
        if seen is not None and seen.power_plugged is False:
            return min(1.0, max(0.0, float(seen.percent) / 100))
    return None


def swapped_bytes(root: Path = ROOT) -> int | None:
    """Bytes that the host has moved in and out of swap since it started; None where it does not say."""
    try:
        text = (root / "proc/vmstat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _swapped_elsewhere() if root == ROOT else None
    pages = [int(count) for count in re.findall(r"^pswp(?:in|out) (\d+)$", text, re.MULTILINE)]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") if pages else None


def host_problems(charge: float | None, swapped_bytes_s: float | None) -> list[Problem]:
    """What a battery and swapping do to a training."""
    found = []
    if charge is not None:
        found.append(
            Problem(
                key="battery",
                severity=Severity.SLOWS,
                what=f"this machine runs on its battery ({charge:.0%})",
                costs="clocks are lowered, a training takes longer, and it ends with the charge",
                do="plug the power supply in",
            )
        )
    if swapped_bytes_s is not None and swapped_bytes_s >= SWAPS:
        found.append(
            Problem(
                key="swapping",
                severity=Severity.SLOWS,
                what=f"this machine swaps: {show_bytes(swapped_bytes_s)} a second go to its disk and back",
                costs="all that waits for swapped memory takes many times as long",
                do="end what takes memory (`top` shows it), or train with fewer workers and less data in memory",
            )
        )
    return found


def _swapped_elsewhere() -> int | None:
    import psutil

    with suppress(Exception):
        seen = psutil.swap_memory()
        return int(seen.sin + seen.sout)
    return None
