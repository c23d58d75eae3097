"""Numbers as people read them."""

from __future__ import annotations

import math
import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def show_bytes(n: float) -> str:
    """`1536` → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # Half a digit below the next unit is the next unit: 1024 KiB is 1 MiB.
        if abs(n) < 1023.5:
            return f"{n:.0f} {unit}" if unit == "B" or abs(n) >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def show_seconds(s: float) -> str:
    """`0.0123` → `12.3 ms`, `75` → `1 min 15 s`."""
    if s < 0:
        return f"-{show_seconds(-s)}"
    if s == 0 or not math.isfinite(s):
        return f"{s:g} s"
    # The limits lie where three digits would round up to the next unit.
    if s < 0.9995e-3:
        return f"{s * 1e6:.3g} µs"
    if s < 0.9995:
        return f"{s * 1e3:.3g} ms"
    if s < 59.95:
        return f"{s:.3g} s"
    whole = round(s)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def show_about(s: float) -> str:
    """Seconds that were estimated, in two digits: `52.13` → `about 52 s`."""
    return f"about {show_seconds(float(f'{s:.2g}'))}"


_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(seconds?|sec|s|minutes?|min|m|hours?|h|)\s*")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def read_seconds(duration: object) -> float:
    """`"15m"` → `900.0`; also 90, `"90"`, `"90s"`, `"1.5 h"` and `"1h 30m"`. Raises ValueError for anything else."""
    if isinstance(duration, (int, float)) and not isinstance(duration, bool):
        seconds = float(duration)
    else:
        parts = list(_DURATION.finditer(duration)) if isinstance(duration, str) and len(duration) <= 40 else []
        if not parts or "".join(part.group() for part in parts) != duration:
            raise ValueError(f"{duration!r:.40} is no time")
        if len(parts) > 1 and any(not part.group(2) for part in parts):
            raise ValueError(f"{duration!r:.40} is no time")
        seconds = sum(float(part.group(1)) * _SECONDS[part.group(2)[:1]] for part in parts)
    if not 0 < seconds < 1e9:
        raise ValueError(f"{duration!r:.40} is no time")
    return seconds


def show_rate(per_s: float) -> str:
    """`12345.6` → `12,346`; below 100, three digits."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
