"""One epoch of a script's loader, while hotlap may change the feed in the middle of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hotlap.core.errors import TrainingError
from hotlap.core.plan import Feed
from hotlap.core.torch_private import ExceptionWrapper, LoaderIterator
from hotlap.data.batches import Batch
from hotlap.script.feed.index_batches import IndexStream, order_of

if TYPE_CHECKING:
    from hotlap.script.feed.loader_proxy import LoaderProxy


class EpochIterator(LoaderIterator):
    """The iterator that a script gets for `iter(loader)`, in place of torch's own (`made`).

    Until another feed is wanted, it only passes batches on. From then on all feeds draw from one stream of index
    batches, so that each feed continues where the one before stopped. Errors of the dataset appear as torch raises
    them. If a feed fails by itself, the script's own takes over from the same batch on.
    """

    def __init__(
        self, owner: LoaderProxy, made: Any, loader: DataLoader[Any], indices: IndexStream | None = None
    ) -> None:
        """Does not call torch's `__init__`, which draws; missing attributes come from `made`.

        `indices` is given if torch's workers were not started, so that `made` cannot make batches.
        """
        self._owner, self._made, self._indices = owner, made, indices
        self._ahead = batches_ahead(loader)
        self._batch_sampler = loader.batch_sampler
        # torch pins batches of workers in a thread of its own, which does not share the script's inference mode.
        self._is_pinned_outside = bool(owner.own.workers and owner.own.pinned)
        self._feeding: Iterator[Batch] = made
        self._opened = owner.own
        self._fault: Exception | None = None
        self._passes_on = False
        self.is_over = False
        """Whether all batches have been given out."""
        if indices is not None:
            self._change(indices)
        elif owner.wanted != owner.own:
            self._take_over()
        elif owner.kept_samples is not None:
            self._over_taken()

    def __getattr__(self, name: str) -> Any:
        if name == "_made":  # not set yet
            raise AttributeError(name)
        return getattr(self._made, name)

    def __next__(self) -> Batch:
        began = time.perf_counter()
        if self._indices is not None:
            self._owner.look()
        try:
            batch = next(self._feeding) if self._indices is None else self._produced(self._indices)
        except StopIteration:
            self.end()
            raise
        self._owner.gave(time.perf_counter() - began)
        return batch

    def __del__(self) -> None:
        if "is_over" in vars(self):
            self.end()

    @property
    def is_waiting(self) -> bool:
        """Whether batches of the feed before are still to be given out."""
        return self._indices is not None and self._indices.is_shut

    def turn(self) -> None:
        """Change to the wanted feed, once all pending batches have been given out."""
        if not self._passes_on and (self._owner.wanted != self._owner.feed or self.is_waiting):
            self._take_over()

    def _take_over(self) -> None:
        indices = self._over_taken()
        if indices.under_way:
            indices.is_shut = True
        else:
            self._change(indices)
            self._report(indices)

    def follow(self) -> None:
        """From now on track which samples are in the batches of the script's own feed."""
        if not self._passes_on:
            self._over_taken()

    def pass_on(self) -> None:
        """From now on pass on torch's iterator: the script has started it again, and draws from it elsewhere."""
        self._leave()
        self._indices, self._feeding, self._opened, self._passes_on = None, self._made, self._owner.own, True

    def release(self) -> None:
        """Return to the script's own feed at once; it makes again what another feed has pending."""
        if self._indices is not None and self._feeding is not self._made and not self.is_over:
            self._indices.put_back()
            self._change(self._indices)
            self._report(self._indices)

    # --- batches ---------------------------------------------------------------------------------

    def _produced(self, indices: IndexStream) -> Batch:
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
            indices.give()  # torch, too, continues with the next batch
            raise
        kept_samples = self._owner.kept_samples
        if kept_samples is not None and self._opened.kind == "loader":
            waited_s = time.perf_counter() - began if self._opened.workers else 0.0
            kept_samples.note(indices.coming, batch, waited_s)
        indices.give()
        if self._feeding is not self._made:
            self._made._num_yielded += 1
        if self._fault is not None:
            self._report(indices)
        return batch

    def _next(self, indices: IndexStream) -> Batch:
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
                del failure  # its traceback holds this frame, and would keep torch's iterator alive in a cycle

    def _rescued(self, indices: IndexStream, failure: Exception) -> Batch:
        """The batch that a feed failed to make, made by torch in this process; errors in that are the dataset's."""
        own, wrapped = self._owner.own, None
        if _is_direct(self._opened):  # torch has already tried in this process
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

    def _change(self, indices: IndexStream) -> None:
        self._leave()
        try:
            self._open(self._owner.wanted)
            self._owner.feed = self._owner.wanted
        except Exception as error:
            self._opened, self._fault = self._owner.wanted, error
            self._feeding = self._directly(indices)
        indices.reopen()

    def _open(self, feed: Feed) -> None:
        indices = self._over_taken()
        is_torchs = _is_direct(feed) and not self._owner.own.workers
        self._feeding = self._made if is_torchs else self._owner.fed(feed, indices)
        self._opened = feed

    def _directly(self, indices: IndexStream) -> Iterator[Batch]:
        """Batches made by torch in this process."""
        own = self._owner.own
        return self._owner.fed(Feed(kind="loader", pinned=own.pinned), indices) if own.workers else self._made

    def _leave(self) -> None:
        close = None if self._feeding is self._made else getattr(self._feeding, "close", None)
        try:
            if close is not None:
                close()
        except Exception as error:
            self._fault = error

    def _report(self, indices: IndexStream) -> None:
        """Report a failed feed, now that nothing is pending; the script's own follows, unless it failed itself."""
        fault, self._fault = self._fault, None
        if fault is not None:
            own, failed = self._owner.own, self._opened
            self._owner.wanted = own
            if failed != own:
                self._change(indices)
                self._fault = None
            else:
                self._opened = Feed(kind="loader", pinned=own.pinned)
            self._owner.failed(fault)

    def _over_taken(self) -> IndexStream:
        """The remaining index batches; from now on torch's iterator reads them through this, too."""
        if self._indices is None:
            made = self._made
            given = getattr(made, "_rcvd_idx", 0)
            self._indices = made._sampler_iter = IndexStream(
                order_of(self._batch_sampler, made._sampler_iter) or made._sampler_iter,
                ahead=self._ahead,
                batch_sampler=self._batch_sampler,
                given=given,
                under_way=getattr(made, "_send_idx", 0) - given,
            )
        return self._indices

    def end(self) -> None:
        """No batch is left, or the script has dropped the iterator."""
        if not self.is_over:
            self.is_over = True
            self._leave()
            if self._fault is not None:
                self._owner.failed(self._fault)
            self._owner.ended()


def batches_ahead(loader: DataLoader[Any]) -> int:
    """Index batches that torch reads before the first batch, with workers."""
    return (loader.prefetch_factor or 0) * loader.num_workers


def _as_in_worker(error: Exception, own: Feed, number: int) -> ExceptionWrapper:
    """An error of the dataset as torch raises it for the worker that makes this batch."""
    where = f"in DataLoader worker process {number % own.workers}"
    return ExceptionWrapper((type(error), error, error.__traceback__), where)  # type: ignore[no-untyped-call]


def _is_direct(feed: Feed) -> bool:
    return feed.kind == "loader" and not feed.workers
