"""Whether two runs came to the same: to the last bit, or as near as rounding lets them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.differential.running import Outcome

TIMES_DRIFT = 30.0
"""How much further than a run that was disturbed a figure may be off where a plan rounds otherwise."""
FLOOR = 2e-5
"""What it may be off in any case, as a fraction of the figure, or of the largest number in its tensor."""
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?|\bnan\b|\binf\b")
COUNTED = ("epoch ",)
"""How lines begin that count what a figure decides, right answers for one: off by one is rounding there."""

Facts = dict[str, Any]


def facts_of(outcome: Outcome) -> Facts:
    """All that is compared of a run: name → tensor, number, text or list."""
    facts: Facts = {"exit code": outcome.code}
    files = sorted(path for path in outcome.folder.rglob("*") if path.is_file())
    facts["files"] = [str(path.relative_to(outcome.folder)) for path in files]
    for name, lines in (("stdout", outcome.stdout), ("stderr", [_placeless(line) for line in outcome.stderr])):
        facts[f"{name} lines"] = len(lines)
        facts |= {f"{name} {number}": line for number, line in enumerate(lines)}
    for path in files:
        facts |= {f"{path.relative_to(outcome.folder)}{key}": value for key, value in _contents(path)}
    return facts


def _placeless(line: str) -> str:
    """A line without folders and addresses, which differ from run to run."""
    return re.sub(r"\b0x[0-9a-f]+", "0x", re.sub(r"/\S*/", "", line))


def _contents(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".pt":
        yield from _flat(torch.load(path, weights_only=True, map_location="cpu"), "")
    elif path.suffix == ".txt":
        yield from ((f":{number}", line) for number, line in enumerate(path.read_text().splitlines()))
    else:
        yield "", path.read_bytes()


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield f"{path} keys", [str(key) for key in value]
        for key, one in value.items():
            yield from _flat(one, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{path} length", len(value)
        for number, one in enumerate(value):
            yield from _flat(one, f"{path}.{number}")
    elif isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        yield f"{path} layout", str(value.layout)
        yield path, value.to_dense()  # a momentum of sparse gradients is sparse too
    else:
        yield path, value


def differences(mine: Facts, theirs: Facts) -> list[str]:
    """What differs to the last bit."""
    pairs = ((name, mine[name], theirs[name]) for name in mine if name in theirs)
    found = [
        f"{name}: {_shown(one)} / {_shown(other)}{_how_far(one, other)}"
        for name, one, other in pairs
        if not _is_same(one, other)
    ]
    return found + _missing(mine, theirs)


def beyond_rounding(
    mine: Facts, theirs: Facts, drifted: Sequence[Facts], *, times_drift: float = TIMES_DRIFT
) -> list[str]:
    """What differs by more than `times_drift` times what the disturbed runs differ by."""
    tolerances = _tolerances(mine, drifted)
    found = []
    for name, one in mine.items():
        if name not in theirs or _is_same(one, theirs[name]):
            continue
        other = theirs[name]
        distance, scale = _distance(one, other, counts=isinstance(one, str) and one.startswith(COUNTED))
        if isinstance(one, str):
            scale = _largest_fraction(one)
        allowed = times_drift * tolerances.get(name, 0.0) + FLOOR * scale
        if not distance <= allowed:
            found.append(f"{name}: {_shown(one)} / {_shown(other)}, off by {distance:.3g}, allowed {allowed:.3g}")
    return found + _missing(mine, theirs)


def _missing(mine: Facts, theirs: Facts) -> list[str]:
    lost, more = ([n for n in a if n not in b] for a, b in ((mine, theirs), (theirs, mine)))
    words = ((lost, "in the plain run alone"), (more, "under hotlap alone"))
    return [f"{', '.join(names[:3])}: {len(names)} figures {where}" for names, where in words if names]


def is_chaotic(mine: Facts, drifted: Sequence[Facts], *, far: float = 0.2) -> bool:
    """Whether a disturbed run takes another way: other lines, counts or numbers drawn, or figures `far` off."""
    for other in drifted:
        if mine.keys() != other.keys():
            return True
        for name in mine:
            if not _is_same(mine[name], other[name]):
                distance, scale = _distance(mine[name], other[name])
                if not distance < math.inf or distance > far * scale + far:
                    return True
    return False


def _tolerances(mine: Facts, drifted: Sequence[Facts]) -> dict[str, float]:
    """How far each figure drifts: of lines of one shape the furthest so far or soon, of tensors of one name any.

    A gradient that is zero but for rounding, that of a bias before a batch norm for one, has no drift to speak of by
    itself.
    """
    found = {
        name: max((_distance(value, other[name])[0] for other in drifted if name in other), default=0.0)
        for name, value in mine.items()
    }
    shapes: dict[str, list[str]] = {}
    tensors: dict[str, list[str]] = {}
    for name, value in mine.items():
        if isinstance(value, str):
            shapes.setdefault(name.split()[0] + NUMBER.sub("#", value), []).append(name)
        elif isinstance(value, torch.Tensor):
            words = [word for word in name.split(".") if not word.isdigit()]
            tensors.setdefault(words[-1], []).append(name)
    for names in tensors.values():
        furthest = max(found[name] for name in names)
        found |= dict.fromkeys(names, furthest)
    for names in shapes.values():
        ahead = [found[name] for name in names[3:]] + [0.0] * 3
        soon = (max(found[name], later) for name, later in zip(names, ahead, strict=False))
        found |= dict(zip(names, itertools.accumulate(soon, max), strict=True))
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        a, b = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(a, b)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)


def _distance(one: Any, other: Any, *, counts: bool = False) -> tuple[float, float]:
    """How far two figures are apart, and how large they are; infinitely where they are not of one kind."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
            return (0.0 if _is_same(one, other) else math.inf), 1.0
        if not one.numel():
            return 0.0, 1.0
        a, b = one.double(), other.double()
        both = a.isnan() & b.isnan() | (a == b)
        apart = torch.where(both, 0.0, (a - b).abs())
        largest = a.abs()[a.isfinite()].max().item() if a.isfinite().any() else 1.0
        return (math.inf if apart.isnan().any() else apart.max().item()), largest
    if isinstance(one, float) and isinstance(other, float):
        return (0.0 if _is_same(one, other) else abs(one - other)), abs(one)
    if isinstance(one, str) and isinstance(other, str):
        if NUMBER.sub("#", one) != NUMBER.sub("#", other):
            return math.inf, 1.0
        pairs = list(zip(_numbers(one), _numbers(other), strict=True))
        near = 1.0 if counts else 0.0
        apart = [abs(a - b) for a, b in pairs if a != b and not (near and a == int(a) and abs(a - b) <= near)]
        return max(apart, default=0.0), max((abs(a) for a, _ in pairs if math.isfinite(a)), default=1.0)
    return (0.0 if _is_same(one, other) else math.inf), 1.0


def _numbers(line: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(line)]


def _largest_fraction(line: str) -> float:
    """Of the numbers that a line shows with a point: how many steps or bytes there are says nothing of a loss."""
    sizes = [abs(float(number)) for number in NUMBER.findall(line) if "." in number or "e" in number]
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    text = str(value)
    return text if len(text) < 90 else f"{text[:90]}…"


def _how_far(one: Any, other: Any) -> str:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        distance, scale = _distance(one, other)
        return f", off by {distance:.3g} of {scale:.3g}"
    return ""
