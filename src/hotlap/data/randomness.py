"""The generators that code on the host draws from: seeding them, watching them, putting them back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch


def mix(*numbers: int) -> int:
    """A well-spread 63-bit seed out of several numbers (the finaliser of SplitMix64, folded)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class Generator(Protocol):
    """One of the host's global generators."""

    name: str
    """What users call it."""

    def state(self) -> Any:
        """A copy of its state."""

    def restore(self, state: Any) -> None:
        """Set it back."""

    def seed(self, number: int) -> None:
        """Begin a stream of its own for `number`."""

    def moved(self, before: Any, after: Any) -> bool:
        """Whether anything was drawn in between; looks at a few words, since that is asked for every batch."""


class _Python:
    name = "Python's random"

    def state(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, number: int) -> None:
        random.seed(number)

    def moved(self, before: Any, after: Any) -> bool:
        # Every draw moves the position, the last word; a whole round changes the first one.
        return bool(before[1][-1] != after[1][-1] or before[1][0] != after[1][0] or before[2] != after[2])


class _Numpy:
    name = "numpy.random"

    def state(self) -> Any:
        return np.random.get_state(legacy=False)

    def restore(self, state: Any) -> None:
        np.random.set_state(state)

    def seed(self, number: int) -> None:
        np.random.seed(number & 0xFFFFFFFF)

    def moved(self, before: Any, after: Any) -> bool:
        a, b = before["state"], after["state"]
        if before["bit_generator"] != "MT19937" or after["bit_generator"] != "MT19937":
            return repr(before) != repr(after)
        return bool(a["pos"] != b["pos"] or a["key"][0] != b["key"][0] or before["has_gauss"] != after["has_gauss"])


class _Torch:
    name = "torch's generator"

    def state(self) -> Any:
        return torch.default_generator.get_state()

    def restore(self, state: Any) -> None:
        torch.default_generator.set_state(state)

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)

    def moved(self, before: Any, after: Any) -> bool:
        return not torch.equal(before, after)


HOST: tuple[Generator, ...] = (_Python(), _Numpy(), _Torch())


class HostRandomness:
    """The states of Python's, numpy's and torch's generators on the host."""

    __slots__ = ("numpy", "python", "torch")

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = (generator.state() for generator in HOST)

    def restore(self) -> None:
        """Set the generators back to these states."""
        for generator, state in zip(HOST, (self.python, self.numpy, self.torch), strict=True):
            generator.restore(state)

    def same_as(self, other: HostRandomness) -> bool:
        """Whether no generator has moved from one to the other."""
        mine, theirs = (self.python, self.numpy, self.torch), (other.python, other.numpy, other.torch)
        return not any(g.moved(a, b) for g, a, b in zip(HOST, mine, theirs, strict=True))


def seed_host(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators on the host."""
    for generator in HOST:
        generator.seed(seed)


@contextmanager
def host_seeded(seed: int) -> Iterator[None]:
    """Seed the host's generators inside, and leave them as they were."""
    before = HostRandomness()
    seed_host(seed)
    try:
        yield
    finally:
        before.restore()
