"""Whether a dataset is pure: the same sample for the same index, however often, whenever and in whatever order."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import StoreError
from hotlap.data.randomness import HOST, seed_host
from hotlap.data.samples import Source
from hotlap.machine.kernels import first_line
from hotlap.store.keys import key_of

PROBED = 8
"""Samples that are asked for, spread over the dataset."""
DEPTH, OBJECTS, ENTRIES = 6, 2000, 64
"""How far a dataset's attributes are followed, how many objects, and how many entries of each list."""

_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_NO_HOME = (str, bytes, int, float, complex, type(None), Tensor, np.ndarray, type, types.ModuleType)


def why_not_pure(source: Source) -> str | None:
    """Why samples may differ from one asking to the next, or None where a few of them did not.

    A spread of samples is asked for three times, in other orders, one by one and together, with the global
    generators seeded otherwise each time. They have to be equal to the bit, and no generator may move: the global
    ones of Python, numpy, torch and CUDA, or one that the dataset keeps in its attributes. All of them are left as
    they were. A dataset that looks at the clock, at files that change, or at a counter that shows only after many
    samples cannot be found out this way. The answer is kept on the source.
    """
    if not source.computes:
        return None
    if "why_not_pure" not in source.probed:
        source.probed["why_not_pure"] = _probe(source)
    reason: str | None = source.probed["why_not_pure"]
    return reason


def spread(length: int, most: int = PROBED) -> list[int]:
    """At most so many indices, evenly spread from the first to the last."""
    count = min(length, most)
    return [k * (length - 1) // max(1, count - 1) for k in range(count)]


def _probe(source: Source) -> str | None:
    name, indices = type(source.samples).__name__, spread(len(source))
    if source.drawn:
        return f"{name} draws from {', '.join(source.drawn)}"
    seen: dict[int, str] = {}
    source = source.aside()
    with randomness_watched(source.samples) as watched:
        try:
            for seed, order in enumerate(_orders(indices)):
                seed_host(seed + 1)
                watched.begin()
                for index, sample in _asked(source, order):
                    digest = key_of(sample)
                    if seen.setdefault(index, digest) != digest:
                        return f"{name} gives another sample at index {index} when it is asked again"
                moved = watched.moved()
                if moved:
                    return f"{name} draws from {', '.join(moved)}"
        except StoreError as error:
            return f"samples of {name} cannot be compared: {error}"
        except Exception as error:
            kind = type(error).__name__
            return f"{name} failed when it was asked for samples: {kind}: {first_line(error)}"
    return None


def _orders(indices: list[int]) -> Iterator[list[list[int]]]:
    """What is asked for together: one by one, backwards so that counters show, and all at once in a third order.

    All at once also shows a dataset that gives the same memory out again and again.
    """
    yield [[index] for index in indices]
    yield [[index] for index in reversed(indices)]
    yield [[*indices[1::2], *indices[::2]]]


def _asked(source: Source, order: list[list[int]]) -> Iterator[tuple[int, Any]]:
    for together in order:
        yield from zip(together, source.read(together), strict=True)


class Watched:
    """All generators that samples might draw from: whether they moved, and their states to put back."""

    def __init__(self, dataset: Any) -> None:
        self._own = own_generators(dataset)
        self._first = self._states()
        self._host = [generator.state() for generator in HOST]
        self.begin()

    def begin(self) -> None:
        """Look from here on."""
        self._before = self._marks()

    def moved(self) -> list[str]:
        """What was drawn from since `begin`."""
        now = self._marks()
        return list(dict.fromkeys(name for (name, was), (_, is_) in zip(self._before, now, strict=True) if was != is_))

    def restore(self) -> None:
        """Put all of them back to where they were at first."""
        for generator, was in zip(HOST, self._host, strict=True):
            generator.restore(was)
        for (_, own, was), (_, _, now) in zip(self._first, self._states(), strict=True):
            # Only what has moved: a generator that a CUDA graph knows is better left alone.
            if key_of(was) != key_of(now):
                _put_back(own, was)

    def _marks(self) -> list[tuple[str, str]]:
        host = [(generator.name, key_of(generator.state())) for generator in HOST]
        return host + [(name, key_of(state)) for name, _, state in self._states()]

    def _states(self) -> list[tuple[str, Any, Any]]:
        mine = [("a generator of its own", own, state) for own in self._own for state in _state(own)]
        # Asking would start CUDA, so only where it runs already.
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.default_generators if started else ()
        return mine + [("torch's CUDA generator", generator, generator.get_state()) for generator in cuda]


@contextmanager
def randomness_watched(dataset: Any) -> Iterator[Watched]:
    """Watch all randomness that a dataset might draw from, and leave it as it was."""
    watched = Watched(dataset)
    try:
        yield watched
    finally:
        watched.restore()


def own_generators(dataset: Any) -> list[Any]:
    """Generators in the attributes of a dataset, of its transforms, and of what these hold in turn."""
    found: list[Any] = []
    seen: set[int] = set()
    level = [dataset]
    for _ in range(DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, _NO_HOME) or len(seen) >= OBJECTS:
                continue
            seen.add(id(value))
            if isinstance(value, _KINDS):
                found.append(value)
            else:
                below += _parts(value)
        level = below
    return found


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())[:ENTRIES]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)[:ENTRIES]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    slots: Sequence[str] = getattr(type(value), "__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)][:ENTRIES]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 -- asking is how one learns it
    except ValueError:
        return False
    return True


def _state(generator: Any) -> list[Any]:
    """Its state; none for one that has none, as the system's own."""
    if isinstance(generator, np.random.Generator):
        return [generator.bit_generator.state]
    if isinstance(generator, np.random.RandomState):
        return [generator.get_state(legacy=False)]
    try:
        return [generator.getstate() if isinstance(generator, random.Random) else generator.get_state()]
    except NotImplementedError:
        return []


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
