"""One epoch of a script's loader, whichever feed makes its batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hotlap.core.errors import TrainingError
from hotlap.core.plan import Feed
from hotlap.data.batches import Batch
from hotlap.script.feed.holding import Learned
from hotlap.script.feed.indices import Indices, order_of


class Serves(Protocol):
    """Whoever knows which feed is wanted."""

    own: Feed
    feed: Feed
    wanted: Feed

    @property
    def learned(self) -> Learned | None:
        """What keeps samples as they come by, where something does."""

    def fed(self, feed: Feed, indices: Iterator[Any]) -> Iterator[Batch]:
        """The batches at these indices by a feed; nothing is read before the first is asked for."""

    def look(self) -> None:
        """Told that a batch is asked for: data that has changed comes by the script's own feed."""

    def gave(self, seconds: float) -> None:
        """Told that a batch has been made in so many seconds."""

    def failed(self, error: Exception) -> None:
        """Told that a feed failed, so that the script's own takes its place."""

    def ended(self) -> None:
        """Told that there is no more in this epoch, or nobody who wants it."""


class Served(_BaseDataLoaderIter):
    """What a script gets for `iter(loader)`: an iterator that stands in for torch's own (`made`).

    Until another feed than the script's own is wanted it only passes on. From then on all feeds draw from one stream of
    index batches, so that a feed goes on where the one before has ended. What the dataset raises comes out as torch
    raises it; a feed that fails otherwise is given up for the script's own, from the same batch on.
    """

    def __init__(self, serving: Serves, made: Any, loader: DataLoader[Any], indices: Indices | None = None) -> None:
        """Without torch's own `__init__`, which draws: what is not here is asked of `made`.

        `indices` where torch's workers were not started, so that `made` cannot make batches.
        """
        self._serving, self._made, self._indices = serving, made, indices
        self._ahead = batches_ahead(loader)
        self._batch_sampler = loader.batch_sampler
        # torch pins what comes from workers in a thread of its own, which knows nothing of the script's inference mode.
        self._is_pinned_outside = bool(serving.own.workers and serving.own.pinned)
        self._feeding: Iterator[Batch] = made
        self._opened = serving.own
        self._fault: Exception | None = None
        self._passes_on = False
        self.is_over = False
        """Whether it has given all of its batches."""
        if indices is not None:
            self._change(indices)
        elif serving.wanted != serving.own:
            self._take_over()
        elif serving.learned is not None:
            self._over_taken()

    def __getattr__(self, name: str) -> Any:
        if name == "_made":  # not there yet
            raise AttributeError(name)
        return getattr(self._made, name)

    def __next__(self) -> Batch:
        began = time.perf_counter()
        if self._indices is not None:
            self._serving.look()
        try:
            batch = next(self._feeding) if self._indices is None else self._produced(self._indices)
        except StopIteration:
            self.end()
            raise
        self._serving.gave(time.perf_counter() - began)
        return batch

    def __del__(self) -> None:
        if "is_over" in vars(self):
            self.end()

    @property
    def is_waiting(self) -> bool:
        """Whether batches are still to be given out that the feed before was asked for."""
        return self._indices is not None and self._indices.is_shut

    def turn(self) -> None:
        """Go over to the feed that is wanted, once all that is under way has been given out."""
        if not self._passes_on and (self._serving.wanted != self._serving.feed or self.is_waiting):
            self._take_over()

    def _take_over(self) -> None:
        indices = self._over_taken()
        if indices.under_way:
            indices.is_shut = True
        else:
            self._change(indices)
            self._report(indices)

    def follow(self) -> None:
        """Know from now on which samples are in the batches of the script's own feed."""
        if not self._passes_on:
            self._over_taken()

    def pass_on(self) -> None:
        """From now on give what torch's iterator gives: somebody else has begun it anew, and draws from it, too."""
        self._leave()
        self._indices, self._feeding, self._opened, self._passes_on = None, self._made, self._serving.own, True

    def release(self) -> None:
        """Go on with the script's own feed at once; what is under way by another one is asked for again."""
        if self._indices is not None and self._feeding is not self._made and not self.is_over:
            self._indices.put_back()
            self._change(self._indices)
            self._report(self._indices)

    # --- batches ---------------------------------------------------------------------------------

    def _produced(self, indices: Indices) -> Batch:
        indices.begin()
        began = time.perf_counter()
        try:
            if self._is_pinned_outside and torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    batch = self._next(indices)
            else:
                batch = self._next(indices)
        except StopIteration:
            raise
        except Exception:
            indices.give()  # torch, too, goes on with the one after
            raise
        learned = self._serving.learned
        if learned is not None and self._opened.kind == "loader":
            waited_s = time.perf_counter() - began if self._opened.workers else 0.0
            learned.note(indices.coming, batch, waited_s)
        indices.give()
        if self._feeding is not self._made:
            self._made._num_yielded += 1
        if self._fault is not None:
            self._report(indices)
        return batch

    def _next(self, indices: Indices) -> Batch:
        while True:
            try:
                return next(self._feeding)
            except StopIteration:
                if indices.is_shut:
                    self._change(indices)
                    continue
                if self._feeding is self._made or indices.are_over:
                    raise
                failure: Exception = TrainingError("a feed ended before its epoch")
            except Exception as error:
                if self._feeding is self._made:
                    raise
                failure = error
            try:
                return self._rescued(indices, failure)
            finally:
                del failure  # which holds this frame, so that torch's iterator would live on in a circle

    def _rescued(self, indices: Indices, failure: Exception) -> Batch:
        """The batch that a feed failed to make, made by torch in this process; what that raises is the dataset's."""
        own, wrapped = self._serving.own, None
        if _is_direct(self._opened):  # which torch made in this process already
            wrapped = _as_in_worker(failure, own, indices.given)
        else:
            self._leave()
            indices.put_back()
            indices.reopen()
            self._feeding = self._directly(indices)
            try:
                batch = next(self._feeding)
                self._fault = failure
                return batch
            except StopIteration:
                raise
            except Exception as error:
                self._change(indices)
                if not own.workers:
                    raise
                wrapped = _as_in_worker(error, own, indices.given)
        return wrapped.reraise()  # type: ignore[no-untyped-call]

    # --- feeds -----------------------------------------------------------------------------------

    def _change(self, indices: Indices) -> None:
        self._leave()
        try:
            self._open(self._serving.wanted)
            self._serving.feed = self._serving.wanted
        except Exception as error:
            self._opened, self._fault = self._serving.wanted, error
            self._feeding = self._directly(indices)
        indices.reopen()

    def _open(self, feed: Feed) -> None:
        indices = self._over_taken()
        is_torchs = _is_direct(feed) and not self._serving.own.workers
        self._feeding = self._made if is_torchs else self._serving.fed(feed, indices)
        self._opened = feed

    def _directly(self, indices: Indices) -> Iterator[Batch]:
        """Batches made by torch in this process."""
        own = self._serving.own
        return self._serving.fed(Feed(kind="loader", pinned=own.pinned), indices) if own.workers else self._made

    def _leave(self) -> None:
        close = None if self._feeding is self._made else getattr(self._feeding, "close", None)
        try:
            if close is not None:
                close()
        except Exception as error:
            self._fault = error

    def _report(self, indices: Indices) -> None:
        """Tell of a feed that failed, now that nothing is under way; the script's own follows, or failed itself."""
        fault, self._fault = self._fault, None
        if fault is not None:
            own, failed = self._serving.own, self._opened
            self._serving.wanted = own
            if failed != own:
                self._change(indices)
                self._fault = None
            else:
                self._opened = Feed(kind="loader", pinned=own.pinned)
            self._serving.failed(fault)

    def _over_taken(self) -> Indices:
        """The index batches that are left, which torch's own iterator reads by way of this from now on."""
        if self._indices is None:
            made = self._made
            given = getattr(made, "_rcvd_idx", 0)
            self._indices = made._sampler_iter = Indices(
                order_of(self._batch_sampler, made._sampler_iter) or made._sampler_iter,
                ahead=self._ahead,
                batch_sampler=self._batch_sampler,
                given=given,
                under_way=getattr(made, "_send_idx", 0) - given,
            )
        return self._indices

    def end(self) -> None:
        """There is no more to give, or nobody who wants it."""
        if not self.is_over:
            self.is_over = True
            self._leave()
            if self._fault is not None:
                self._serving.failed(self._fault)
            self._serving.ended()


def batches_ahead(loader: DataLoader[Any]) -> int:
    """How many index batches torch reads before it gives out the first batch, where it has workers."""
    return (loader.prefetch_factor or 0) * loader.num_workers


def _as_in_worker(error: Exception, own: Feed, number: int) -> ExceptionWrapper:
    """An error of the dataset as torch passes it on from the worker that makes the batch of this number."""
    where = f"in DataLoader worker process {number % own.workers}"
    return ExceptionWrapper((type(error), error, error.__traceback__), where)  # type: ignore[no-untyped-call]


def _is_direct(feed: Feed) -> bool:
    return feed.kind == "loader" and not feed.workers
