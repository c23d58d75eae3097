"""The index batches of torch's own samplers, drawn as torch draws them, but many at a time and as tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

DRAWN_TOGETHER = 32
"""Places that torch's RandomSampler draws at a time where it puts each back."""
COUNTED_TOGETHER = 65536
"""Places in order that are written down at a time: data that is read in order may be longer than memory."""

_AS_IMPORTED = (SequentialSampler.__iter__, RandomSampler.__iter__)
"""How torch's samplers go about it; a script may put something else in their place."""


class Order:
    """What `iter(batch_sampler)` gives, without a step of Python for every sample.

    Whatever anybody can see is drawn at the moments at which torch draws it: from the process's generator as the first
    index batch is read, from one of the script's as its numbers are needed.
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self._size, self._drops_last = batch_sampler.batch_size, batch_sampler.drop_last
        sampler: Any = batch_sampler.sampler
        self._is_private = getattr(sampler, "generator", None) is None
        self._pieces = _pieces(sampler)
        self._left = torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def draws(self) -> bool:
        """Whether reading the next index batch may draw from a generator of the script's."""
        return not self._is_private and len(self._left) < self._size

    def read(self, most: int) -> tuple[Tensor, list[int]]:
        """The next index batches, at most so many, one after the other, and the size of each; none at the end."""
        size = self._size
        self._draw(size * most if self._is_private else size)
        count, rest = divmod(len(self._left), size)
        sizes = [size] * min(count, most)
        is_all = count < most if self._is_private else not count
        if is_all and rest and not self._drops_last:
            sizes.append(rest)
        taken, self._left = self._left[: sum(sizes)], self._left[sum(sizes) :]
        return taken, sizes

    def _draw(self, needed: int) -> None:
        have, found = len(self._left), [self._left]
        while have < needed:
            piece = next(self._pieces, None)
            if piece is None:
                break
            found.append(piece)
            have += len(piece)
        self._left = torch.cat(found) if len(found) > 1 else self._left


class Rest:
    """What is left of torch's own iterator over a sampler that draws nothing more that anybody can see."""

    draws = False

    def __init__(self, begun: Any) -> None:
        self._begun: Iterator[list[int]] = begun

    def read(self, most: int) -> tuple[Tensor, list[int]]:
        """The next index batches, at most so many, one after the other, and the size of each; none at the end."""
        found = list(islice(self._begun, most))
        sizes = [len(index) for index in found]
        return torch.from_numpy(np.fromiter(chain.from_iterable(found), np.int64, sum(sizes))), sizes


def order_of(batch_sampler: Any, begun: Any) -> Order | Rest | None:
    """What reads many index batches at a time in place of `begun`, an iterator of the batch sampler; None if nothing.

    Only torch's own samplers are known to leave no trace of it: those that build upon them may do anything.
    """
    if type(batch_sampler) is not BatchSampler or not isgenerator(begun):
        return None
    sampler: Any = batch_sampler.sampler
    is_torchs = begun.gi_code is BatchSampler.__iter__.__code__
    if not is_torchs or type(sampler) not in (SequentialSampler, RandomSampler):
        return None
    if getgeneratorstate(begun) == GEN_CREATED and type(sampler).__iter__ in _AS_IMPORTED and draws_as_torch():
        return Order(batch_sampler)
    # Without a generator of the script's, a seed is drawn from the process's at first, and all else from a private one.
    return Rest(begun) if getattr(sampler, "generator", None) is None else None


@cache
def draws_as_torch() -> bool:
    """Whether this torch draws as is known here, seen in a few short orders."""
    before = torch.get_rng_state()
    try:
        return all(
            _seen(Order, *settings) == _seen(iter, *settings)
            for settings in ((False, None, False), (False, 24, True), (True, 70, False), (True, 70, True))
        )
    except Exception:  # of a torch whose samplers are others
        return False
    finally:
        torch.set_rng_state(before)


def _seen(begin: Any, replacement: bool, count: int | None, by_generator: bool) -> list[Any]:
    """The index batches of an order and the generators after each of them."""
    torch.default_generator.manual_seed(1)
    generator = torch.Generator().manual_seed(2) if by_generator else None
    sampler = RandomSampler(range(9), replacement, count, generator)
    begun, seen = begin(BatchSampler(sampler, 4, drop_last=False)), []
    while True:
        index = begun.read(1)[0].tolist() if isinstance(begun, Order) else next(begun, [])
        generators = [torch.default_generator, *([] if generator is None else [generator])]
        seen.append((index, [one.get_state().numpy().tobytes() for one in generators]))
        if not index:
            return seen


def _pieces(sampler: Any) -> Iterator[Tensor]:
    """The places that a sampler gives, in as many pieces as it draws them in, each drawn as it is asked for."""
    length = len(sampler.data_source)
    if type(sampler) is SequentialSampler:
        for start in range(0, length, COUNTED_TOGETHER):
            yield torch.arange(start, min(length, start + COUNTED_TOGETHER), device="cpu")
        return
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    whole, rest = divmod(sampler.num_samples, DRAWN_TOGETHER if sampler.replacement else length)
    if sampler.replacement:
        for count in (*[DRAWN_TOGETHER] * whole, rest):
            yield torch.randint(length, (count,), generator=generator)
        return
    for _ in range(whole):
        yield torch.randperm(length, generator=generator)
    if rest or sampler.generator is not None:  # of an order of which nothing is used, only the draw can be seen
        yield torch.randperm(length, generator=generator)[:rest]
