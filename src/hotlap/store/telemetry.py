"""What a training leaves for others to look at while it runs: samples over time, and how it stands now.

`samples.jsonl` has a line for each sample and stays small: it thins itself out. `live.json` is replaced every few
seconds. Both may be a stranger's, or be cut short by a kill: the readers leave out what is not whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.core.terminal import clean
from hotlap.core.units import MIB
from hotlap.store.files import append_line, finite, read_bytes, write_text

SAMPLES, LIVE = "samples.jsonl", "live.json"
MOST_SAMPLES = 2048
"""Lines of `samples.jsonl` at which every other one goes."""
MOST_BYTES = 16 * MIB
"""A larger file is not hotlap's."""
LONGEST_TEXT, MOST_ITEMS, DEEPEST = 400, 1000, 6
"""Characters of a text, items of a list or object, and levels that are read from a file."""


class SampleFile:
    """Appends samples to `samples.jsonl`.

    Once there are `most`, every other one goes, and from then on samples are kept half as often. A training of any
    length thus has between half of `most` and `most`, evenly over its time.
    """

    def __init__(self, folder: Path, most: int = MOST_SAMPLES) -> None:
        self._path, self._most = folder / SAMPLES, most
        found = read_samples(folder)
        if found:  # a last line that a kill cut short would spoil the next one
            write_text(self._path, _lines(found))
        self._count, self._spacing_s = len(found), _spacing_s(found) if len(found) >= most // 2 else 0.0
        self.last_s = found[-1]["at"] if found else None
        """When the last sample was kept, in seconds since 1970; None before the first."""

    def add(self, sample: Mapping[str, Any]) -> None:
        """Append a sample, unless the last one is too fresh. Raises StoreError where the disk takes none."""
        at = float(sample["at"])
        if self.last_s is not None and 0 <= at - self.last_s < 0.9 * self._spacing_s:
            return
        append_line(self._path, json.dumps(sample))
        self._count, self.last_s = self._count + 1, at
        if self._count >= self._most:
            self._thin_out()

    def _thin_out(self) -> None:
        found = read_samples(self._path.parent)
        kept = [_joined(*pair) for pair in zip(found[::2], found[1::2], strict=False)]
        write_text(self._path, _lines(kept))
        self._count, self._spacing_s = len(kept), _spacing_s(kept)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The samples of a run, oldest first; none where it has none. Lines that are not whole samples are left out.

    Each has `at`, in seconds since 1970, and may have `step`, `gap_s` (seconds without a look before it), `host`
    and `torch` (figures by name), and `gpus` (figures by name, one object a GPU).
    """
    content = b""
    with suppress(StoreError):
        content = read_bytes(folder / SAMPLES, MOST_BYTES)
    return [sample for line in content.split(b"\n") if (sample := _object(line)) is not None and _is_sample(sample)]


def write_live(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace `live.json` by this state, at once and never half of it. Raises OSError where the disk takes none."""
    temporary = folder / f".{LIVE}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(finite(state)), encoding="utf-8")
        temporary.replace(folder / LIVE)  # not synced: a machine that has crashed is not watched
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_live(folder: Path) -> dict[str, Any] | None:
    """How a training stands, or stood last; None where its folder does not say.

    It has `pid` and `at`, in seconds since 1970. All texts in it are printable.
    """
    try:
        state = _object(read_bytes(folder / LIVE, MIB))
    except StoreError:
        return None
    if state is None or type(state.get("pid")) is not int or not _is_sample(state):
        return None
    return state


def still_runs(pid: int, at: float) -> bool:
    """Whether the process that had this number at that time, in seconds since 1970, still runs."""
    import psutil

    try:
        process = psutil.Process(pid)
        # A younger process has the number of one that is gone.
        return bool(process.create_time() <= at + 1 and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError, OverflowError, OSError):
        return False


def _object(line: bytes) -> dict[str, Any] | None:
    """An object of JSON with nothing in it that could harm a reader."""
    try:
        found = _harmless(json.loads(line), DEEPEST)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_sample(value: dict[str, Any]) -> bool:
    at = value.get("at")
    if not isinstance(at, (int, float)) or isinstance(at, bool) or not 0 <= at < 1e11:
        return False
    parts = [
        value.get("host", {}),
        value.get("torch", {}),
        *([gpus] if (gpus := value.get("gpus")) is not None else []),
    ]
    return all(isinstance(part, dict) for part in parts[:2]) and (
        gpus is None or (isinstance(gpus, list) and all(isinstance(gpu, dict) for gpu in gpus))
    )


def _harmless(value: Any, depth: int) -> Any:
    """The value with printable texts, finite numbers and a bounded size."""
    if isinstance(value, str):
        return clean(value[:LONGEST_TEXT])
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return value if abs(value) <= 1e18 else None  # nor nan; a whole number may have too many digits for a float
    if depth == 0:
        return None
    if isinstance(value, list):
        return [_harmless(one, depth - 1) for one in value[:MOST_ITEMS]]
    items = list(value.items())[:MOST_ITEMS]
    return {clean(name[:LONGEST_TEXT]): _harmless(one, depth - 1) for name, one in items}


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The second of two samples, which keeps the gap before the first."""
    gaps = [sample["gap_s"] for sample in (one, other) if isinstance(sample.get("gap_s"), (int, float))]
    return {**other, "gap_s": sum(gaps)} if gaps else other


def _spacing_s(samples: list[dict[str, Any]]) -> float:
    """The usual time between two samples."""
    steps = sorted(b["at"] - a["at"] for a, b in pairwise(samples))
    return max(0.0, steps[len(steps) // 2]) if steps else 0.0


def _lines(samples: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(sample) + "\n" for sample in samples)
