"""The batches of a script's loader by any feed: the same to the bit, in the same order."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from hotlap.core.errors import PlanError, first_line
from hotlap.core.plan import Feed
from hotlap.core.torch_private import pin_memory
from hotlap.data.batches import Batch
from hotlap.data.dataset import as_source, loader_feed, own_collate
from hotlap.data.feeds import CudaCopier
from hotlap.data.order import HostRandomness
from hotlap.data.pure.proof import GRADIENTS, proof_of, reads_in_place, state_of, why_not_pure
from hotlap.data.pure.read_state import ReadState
from hotlap.data.resident import evenly_spread
from hotlap.data.sources import Source, tensors_in
from hotlap.script.feed.device_copies import Copy, DeviceCopies, Serve
from hotlap.script.feed.epoch import EpochIterator, batches_ahead
from hotlap.script.feed.feeds import (
    GatheredFeed,
    Iterate,
    LoaderClone,
    ResidentFeed,
    StreamedFeed,
)
from hotlap.script.feed.held_samples import HeldSamples, KeptSamples
from hotlap.script.feed.index_batches import IndexStream, generator_of, order_of, why_not_early
from hotlap.tuner.budget import check_allowed
from hotlap.tuner.gates import why_unlike

CHANGED = "the data changed during the run"
MOST_NOTED = 2**31
"""Bytes of arrays up to which hotlap notes what persistent workers start with; it reads all of them."""


LEAST_FETCHED = 0.05
"""Share of samples that must have been fetched to tell when all are there: processes take a moment to start."""


class LoaderProxy:
    """Replaces the iteration over one loader of a script.

    The script sees what it sees without hotlap: the same batches of the same types in the same order, and the same
    draws from the generators of Python, numpy and torch. The proxy does not keep the loader alive.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        device: torch.device,
        original_iter: Iterate,
        device_copies: DeviceCopies | None = None,
    ) -> None:
        """`original_iter` is torch's `DataLoader.__iter__`; `device_copies` answers copies to `device`."""
        self._loader, self._original_iter = weakref.ref(loader), original_iter
        self.device, self.device_copies = device, device_copies
        self._settle(loader)
        self.feed = self.wanted = self.own
        """The feed in force, and the latest one asked for."""
        self.epochs = 0
        """Epochs begun so far."""
        self.served = 0
        """Batches of the current epoch so far."""
        self.given = 0
        """Batches of all epochs so far."""
        self.on_batch: Callable[[float], Any] | None = None
        """Called after every batch with the host's seconds for it."""
        self.on_begin: Callable[[], Any] | None = None
        """Called before an epoch begins."""
        self.on_end: Callable[[], Any] | None = None
        """Called when an epoch has no more batches, or the script has dropped its iterator."""
        self.on_fault: Callable[[Exception], Any] | None = None
        """Called with a failure in here; the script continues with its own feed."""
        self.on_change: Callable[[Feed, str], Any] | None = None
        """Called with the feed that was given up because the data changed, and the reason."""
        self._why_changed: str | None = None
        self._state: ReadState | None = None
        self._loaders: dict[Feed, LoaderClone] = {}
        self._held: HeldSamples | None = None
        self._fetched_since: int | None = None
        """Batches that had been given when processes began to fetch samples."""
        self._epoch: weakref.ref[EpochIterator] | None = None
        self._is_closed = False
        self._at_start: ReadState | None = None
        """The data as of the start of workers that stay."""

    def _settle(self, loader: DataLoader[Any]) -> None:
        """Read the script's settings of its loader."""
        self._like = copy.copy(loader)
        vars(self._like)["_iterator"] = None
        self.own = _own_feed(loader)
        """The script's own feed."""
        self.batch_size: int | None = getattr(loader.batch_sampler, "batch_size", None)
        """Samples in a batch, if the loader has such a setting."""
        self._why_own_only = why_own_only(loader)
        self._source: Source | None = None

    @property
    def source(self) -> Source | None:
        """The source of samples; None if they have no index."""
        if self._source is None and self._why_own_only is None:
            self._source = self._new_source()
        return self._source

    @property
    def length(self) -> int | None:
        """Batches in an epoch, if the loader knows."""
        loader = self._loader()
        if loader is None:
            return None
        asked = loader._IterableDataset_len_called  # torch warns of datasets that give more than they were asked for
        try:
            return len(loader)
        except Exception:  # the user's class has none, or it raises
            return None
        finally:
            loader._IterableDataset_len_called = asked

    @property
    def waiting(self) -> bool:
        """Whether the wanted feed is not yet in force."""
        epoch = self._running()
        return self.wanted != self.feed or (epoch is not None and epoch.is_waiting)

    # --- for the script ----------------------------------------------------------------------

    def iterate(self) -> Iterator[Any]:
        """Replaces `iter(loader)`. A second iterator at the same time is torch's own."""
        loader = self._loader()
        assert loader is not None, "its caller holds it"
        begun = self.begin(loader)
        return begun if begun is not None else self.stand_in(loader, self._original_iter(loader))

    def begin(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Begin an epoch. None if torch's own iterator is needed: create it, and pass it to `stand_in`."""
        running = self._running()
        if running is not None:
            if self.length is None or self.served < self.length:
                if loader.persistent_workers:
                    running.pass_on()  # torch returns the same iterator, started again
                return None
            running.end()  # exhausted, but something keeps it alive, as Lightning does
        self.epochs, self.served = self.epochs + 1, 0
        self._tell(self.on_begin)
        self.feed = self.wanted  # no batch of an earlier epoch is pending
        try:
            self._look_again(loader)
            if self.own in self._loaders and not loader.persistent_workers:
                self._loaders.pop(self.own).close()  # as with torch, each epoch's workers see earlier writes
            if loader.persistent_workers and loader._iterator is None:
                self._note_start()
            if self._goes_without_workers(loader):
                return self._begun_without_workers(loader)
        except Exception as error:
            self.failed(error)
        return None

    def stand_in(self, loader: DataLoader[Any], made: Iterator[Any]) -> Iterator[Any]:
        """The iterator that the script gets for torch's own; torch's own while another epoch still runs."""
        if self._running() is not None:
            return made
        try:
            return self._noted(EpochIterator(self, made, loader))
        except Exception as error:
            self.failed(error)
            return made

    def _note_start(self) -> None:
        """Note the data with which workers that stay are about to start: they never see what is written later."""
        self._at_start = None
        with suppress(Exception):  # looking at the user's dataset may raise anything; then other feeds are refused
            if self._why_own_only is None and array_bytes(self._like.dataset) <= MOST_NOTED:
                self._at_start = state_of(self._new_source())

    def _goes_without_workers(self, loader: DataLoader[Any]) -> bool:
        """Whether torch would start or use workers although another feed makes the batches."""
        if not loader.num_workers or self._why_own_only is not None:
            return False
        if loader.persistent_workers and loader._iterator is None:
            return False  # they keep the data of their start, and may be needed once it has changed
        return self.feed != self.own

    def _begun_without_workers(self, loader: DataLoader[Any]) -> Iterator[Any]:
        generator = generator_of(loader.batch_sampler)
        before = HostRandomness()
        states = [(one, one.get_state()) for one in (loader.generator, generator) if one is not None]
        try:
            made, sampler = self._made_without_workers(loader)
            order = order_of(loader.batch_sampler, sampler)
            indices = IndexStream(order or sampler, ahead=batches_ahead(loader), batch_sampler=loader.batch_sampler)
            indices.begin()
            return self._noted(EpochIterator(self, made, loader, indices))
        except Exception:
            before.restore()
            for one, state in states:
                one.set_state(state)
            raise

    def _made_without_workers(self, loader: DataLoader[Any]) -> tuple[Any, Iterator[Any]]:
        """torch's iterators of the epoch and the sampler, after all draws that torch makes with workers."""
        begun = loader._iterator if loader.persistent_workers else None
        if begun is not None:  # persistent workers draw no new seed
            return begun, iter(loader._index_sampler)
        alone = copy.copy(loader)
        vars(alone).update(num_workers=0, prefetch_factor=None, timeout=0, persistent_workers=False)
        made: Any = self._original_iter(alone)
        made._reset(loader)  # with workers, torch starts the sampler twice
        return made, made._sampler_iter

    def _noted(self, epoch: EpochIterator) -> EpochIterator:
        self._epoch = weakref.ref(epoch)
        return epoch

    def _running(self) -> EpochIterator | None:
        epoch = None if self._epoch is None else self._epoch()
        return None if epoch is None or epoch.is_over else epoch

    def _look_again(self, loader: DataLoader[Any]) -> None:
        """Release everything if the script has changed its loader or its data since the last epoch."""
        if _own_feed(loader) != self.own or loader.collate_fn is not self._like.collate_fn:
            self._let_go()
            self._settle(loader)
            self.feed = self.wanted = self.own
            return
        reason = self._why_stale(thorough=True)
        if reason is not None:
            self._leave(reason)

    # --- for the tuner -----------------------------------------------------------------------

    def supports(self, feed: Feed) -> str | None:
        """Why a feed cannot make the batches; None if it can."""
        if feed == self.own:
            return None
        try:
            return self._why_own_only or self._why_changed or self._why_not(feed)
        except Exception as error:  # looking at the user's dataset may raise anything
            return f"hotlap could not inspect the data: {first_line(error)}"

    def use(self, feed: Feed) -> None:
        """Change to a feed with the next batch, or after the batches that workers are already making.

        Batches are in pinned memory exactly where the script's own loader pins them. If the feed holds samples, they
        are loaded here. Raises PlanError if the feed is not supported, and errors of loading; the feed then stays.
        """
        stale = self._why_stale(thorough=False) if feed != self.own else None
        if stale is not None:
            self._leave(stale)
        reason = self.supports(feed)
        if reason is not None:
            raise PlanError(reason)
        if feed != self.own:
            self._prepare(feed)
        if feed.kind in ("resident", "stream") and self.device_copies is not None:
            self.device_copies.install()
        self.wanted, self._is_closed = feed, False
        epoch = self._running()
        if epoch is None:
            self.feed = feed
        else:
            epoch.turn()

    def why_other(self, feed: Feed) -> str | None:
        """How a few batches of a feed differ from the script's own; None if they are the same."""
        if feed == self.own:
            return None
        reason = self.supports(feed)
        if reason is not None:
            return reason
        try:
            # In the script's training modes, whatever mode is active now.
            with torch.inference_mode(False), torch.enable_grad():
                return self._why_other(feed)
        except PlanError as error:
            return str(error)
        except Exception as error:
            return f"the feed failed in a trial: {first_line(error)}"

    def holding_s(self, feed: Feed | None = None) -> float:
        """Estimated seconds to change to a feed; without one, to the feed that holds the most here."""
        kind = feed.kind if feed is not None else "resident" if self.device.type == "cuda" else "gather"
        try:
            if self._why_own_only is not None or kind == "loader":
                return 0.0
            return self._holding.seconds(kind)
        except Exception:  # looking at the user's dataset may raise anything; then no feed is supported either
            return 0.0

    @property
    def kept_samples(self) -> KeptSamples | None:
        """The collector of passing samples, if there is one."""
        return self._held.kept_samples if self._held is not None else None

    @property
    def keeps_samples(self) -> bool:
        """Whether samples are kept or were: other feeds then start quickly."""
        return self._held is not None and (self._held.kept_samples is not None or self._held.column_batches is not None)

    def learn(self, epochs_left: float = math.inf) -> int | None:
        """Collect samples, in the background or as they pass, so that holding them later takes less time.

        Returns the batches until more of them are there: to the end of the epoch, or half of those until processes
        have fetched all. None if this saves nothing.
        """
        feed = Feed(kind="resident" if self.device.type == "cuda" else "gather")
        if self.own.kind != "loader" or self.supports(feed) is not None:
            return None
        assert self.source is not None  # a supported feed has a source
        if not self.source.computes or self._holding.column_batches is not None:
            return None
        self._remember_data()
        kept_samples = self._holding.learn(epochs_left)
        if kept_samples is None or kept_samples.is_over:
            return None
        if kept_samples.is_fetched:
            if self._fetched_since is None:
                self._fetched_since = self.given
            missing, since = kept_samples.missing, self.given - self._fetched_since
            return max(1, int(since * missing / (1 - missing) / 2)) if 1 - missing > LEAST_FETCHED else 1
        epoch = self._running()
        if epoch is not None:
            epoch.follow()
        return None if self.length is None else max(1, self.length - self.served)

    def tidy(self) -> None:
        """Release everything that belongs to feeds other than the one in force."""
        needed = (self.feed, self.wanted)
        for feed in [feed for feed in self._loaders if feed not in needed]:
            self._loaders.pop(feed).close()
        if self._held is not None:
            self._held.tidy(needed)
        if all(feed == self.own for feed in needed):
            self._state = None

    def close(self) -> None:
        """Release everything; a running epoch continues with the script's own feed."""
        self.wanted, self._is_closed = self.own, True
        epoch = self._running()
        if epoch is not None:
            epoch.release()
        self.feed = self.own
        self._let_go(but=self.own if epoch is not None else None)

    # --- for an epoch ------------------------------------------------------------------------

    def fed(self, feed: Feed, indices: Iterator[Any], serve: Serve | None = None) -> Iterator[Batch]:
        """The batches at these indices by a feed; reads nothing before the first is asked for.

        `serve` takes copies on the GPU; by default they answer the script.
        """
        if feed.kind == "loader":
            if feed not in self._loaders:
                self._loaders[feed] = LoaderClone(self._like, feed, self._original_iter)
            return self._loaders[feed].batches(indices)
        holding = self._holding
        assert holding.column_batches is not None, "hold the samples first"
        if feed.kind == "gather":
            return GatheredFeed(holding.column_batches, indices)
        if serve is None:
            assert self.device_copies is not None  # `supports` has checked that
            serve = self.device_copies.serve
        if feed.kind == "stream":
            copier, stages = CudaCopier(self.device), not self.own.pinned
            return StreamedFeed(holding.column_batches, indices, copier=copier, serve=serve, pinned=True, stages=stages)
        assert holding.on_device is not None, "hold the samples first"
        return ResidentFeed(
            holding.column_batches,
            indices,
            on_device=holding.on_device,
            device=self.device,
            serve=serve,
            is_same=holding.is_same,
        )

    def look(self) -> None:
        """Before each batch: if the data has changed, return to the script's own feed."""
        # The script's own workers, too, see changes of this epoch only in the next one.
        if self._state is not None and not self.own.workers:
            reason = self._why_stale(thorough=False)
            if reason is not None:
                self._leave(reason)

    def gave(self, seconds: float) -> None:
        """The epoch has made a batch, in so many seconds."""
        self.served, self.given = self.served + 1, self.given + 1
        try:  # not by `_tell`, since this is done for every batch
            if self.on_batch is not None:
                self.on_batch(seconds)
        except Exception as error:
            self._tell(self.on_fault, error)

    def failed(self, error: Exception) -> None:
        """A feed failed; the script's own takes its place."""
        self.feed = self.wanted = self.own
        self._tell(self.on_fault, error)

    def ended(self) -> None:
        """The epoch is over."""
        if self._is_closed:
            self._let_go()
        self._tell(self.on_end)

    def _tell(self, callback: Callable[..., Any] | None, *what: Any) -> None:
        if callback is None:
            return
        try:
            callback(*what)
        except Exception as error:
            if callback is not self.on_fault:
                self._tell(self.on_fault, error)

    # --- sources and checks ------------------------------------------------------------------

    def _new_source(self) -> Source:
        source = as_source(self._like.dataset, own_collate(self._like), loaded=True)
        source.in_workers = self._like.num_workers > 0
        return source

    @property
    def _holding(self) -> HeldSamples:
        if self._held is None:
            source = self.source
            assert source is not None  # without one, only the script's own feed is supported
            self._held = HeldSamples(source, self.device, self.own)
        return self._held

    def _why_not(self, feed: Feed) -> str | None:
        source = self.source
        assert source is not None  # without one, only the script's own feed is supported
        reason = why_not_pure(source) or why_no_samples(self._like.dataset)
        if self._state is None:
            reason = reason or self._why_not_as_started(thorough=False)
        if reason is not None:
            return reason
        if torch.get_default_device().type != "cpu":
            return f"torch's default device is {torch.get_default_device()}, so batches are made there"
        if feed.kind in ("resident", "stream"):
            if self.device.type != "cuda":
                return f"the script trains on the {self.device.type.upper()}"
            if self.device_copies is None:
                return "hotlap cannot answer the script's copies to its device"
            if not source.on_host:
                return "the data is on a GPU already"
        if feed.kind == "stream" or feed.workers:
            reason = why_not_early(self._like.batch_sampler)
            if reason is not None:
                return reason
        if feed.kind == "loader":
            proof = proof_of(source)
            if proof.seeds and not feed.workers:
                return "the dataset seeds torch's generators, which only workers keep to themselves"
            return GRADIENTS if proof.state.needs_gradients else None
        if source.own_collate is not None:
            return "the loader has its own collate function"
        return self._holding.why_not(feed)

    def _prepare(self, feed: Feed) -> None:
        """Prepare what a feed needs, and remember the state of the data."""
        self._remember_data()
        if feed.kind != "loader":
            self._holding.hold(feed)

    def _remember_data(self) -> None:
        if self._state is None:
            # The script may have replaced its dataset's tensors or rows since hotlap first looked.
            fresh = self._new_source()
            reason = why_not_pure(fresh) or self._why_not_as_started(thorough=True)
            if reason is not None:
                raise PlanError(reason)
            self._source, self._held, self._state = fresh, None, proof_of(fresh).state

    def _why_not_as_started(self, *, thorough: bool) -> str | None:
        """Why the data may not be what workers that stay were started with; None if it is."""
        loader = self._loader()
        if loader is None or not loader.persistent_workers or loader._iterator is None:
            return None
        if self._at_start is None:
            return "its workers are persistent, and hotlap could not note the data that they started with"
        changed = self._at_start.why_changed(thorough=thorough)
        return f"its workers are persistent, and since they started {changed}" if changed is not None else None

    def _why_other(self, feed: Feed) -> str | None:
        self._prepare(feed)
        source = self.source
        assert source is not None  # a supported feed has a source
        chosen = compared_indices(len(source), self.batch_size)
        copies: list[tuple[Tensor, Copy]] = []
        mine: LoaderClone | None = None
        if feed in (self.feed, self.wanted) and feed.kind == "loader":  # its workers may be busy
            mine = LoaderClone(self._like, feed, self._original_iter)
        seen = mine.batches(iter(chosen)) if mine is not None else self.fed(feed, iter(chosen), copies.extend)
        try:
            for index in chosen:
                check_allowed()
                truth = true_batch(source, self._like, index, pinned=self.own.pinned)
                reason = why_other_batch(truth, next(seen))
                if reason is not None:
                    return reason
            return why_other_copy(copies)
        finally:
            close = getattr(mine or seen, "close", None)
            if close is not None:
                close()

    def _why_stale(self, *, thorough: bool) -> str | None:
        """What has changed in the data since another feed was prepared; None if nothing seems to."""
        if self._state is None or self.source is None:
            return None
        # Persistent workers never see what is written after their start.
        live = (
            reads_in_place(self.source)
            and not self.own.persistent
            and all(feed.kind == "gather" or feed == self.own for feed in (self.feed, self.wanted))
        )
        try:
            return self._state.why_changed(thorough=thorough, live=live)
        except Exception as error:  # looking at the user's objects may raise anything
            return first_line(error)

    def _leave(self, reason: str) -> None:
        """The data has changed: return to the script's own feed for good."""
        feed, self._why_changed = self.wanted, f"{CHANGED}: {reason}"
        self.close()
        if feed != self.own:
            self._tell(self.on_change, feed, reason)

    def _let_go(self, but: Feed | None = None) -> None:
        """Release everything made for other feeds, except the workers of `but`."""
        for feed in [feed for feed in self._loaders if feed != but]:
            self._loaders.pop(feed).close()
        self._held = self._state = None


def _own_feed(loader: DataLoader[Any]) -> Feed:
    return loader_feed(loader, on_gpu=loader.pin_memory and torch.accelerator.is_available())


# --- checks of other feeds ---------------------------------------------------------------


COMPARED = 8
"""Most samples in each compared batch."""


def why_own_only(loader: DataLoader[Any]) -> str | None:
    """Why only the script's own feed can make a loader's batches, whatever its samples are; None if others can."""
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset determines the order of its samples itself"
    if isinstance(loader.dataset, MapDataPipe):
        return "only torch's own iterator can set up a DataPipe"
    if loader.batch_sampler is None:
        return "the loader makes no batches (batch_size=None)"
    if not getattr(loader, "in_order", True):
        return "the loader returns batches in order of completion (in_order=False)"
    if type(loader)._get_iterator is not DataLoader._get_iterator:
        return f"{type(loader).__name__} has its own iteration"
    return None


def array_bytes(dataset: Any) -> int:
    """Bytes of the numpy arrays that a dataset holds as attributes, also inside other datasets."""
    total = 0
    while dataset is not None:
        held = getattr(dataset, "__dict__", {})
        total += sum(value.nbytes for value in held.values() if isinstance(value, np.ndarray))
        dataset = held.get("dataset")
    return total


def why_no_samples(dataset: Any) -> str | None:
    """Why a dataset has no samples by number; None if it has. Calls `len(dataset)`."""
    try:
        return None if len(dataset) else "the dataset is empty"
    except Exception:  # the user's class has none, or it raises
        return f"{type(dataset).__name__} has no length"


# --- comparing batches -------------------------------------------------------------------


def compared_indices(length: int, batch_size: int | None) -> list[list[int]]:
    """Index batches to compare: the first samples, some of the whole data backwards, the last one, and one twice."""
    size = min(length, batch_size or COMPARED, COMPARED)
    return [list(range(size)), evenly_spread(length, COMPARED)[::-1], [length - 1], [0, length - 1, 0]]


def true_batch(source: Source, loader: DataLoader[Any], index: list[int], *, pinned: bool) -> Batch:
    """The batch that the script's own dataset and collate function make of these indices."""
    # Columns are views of the script's tensors, and may lack what those tensors have beside their values.
    dataset = source.for_probing() if source.computes else Source(loader.dataset)
    batch = loader.collate_fn(dataset.read(index))
    return pin_memory(batch) if pinned else batch


def why_other_batch(truth: Batch, seen: Batch) -> str | None:
    """How a batch differs from the true one in bits, types or memory layout; None if it does not."""
    reason = why_unlike(truth, seen, "the batch")
    if reason is not None:
        return reason
    pairs = zip(tensors_in(truth), tensors_in(seen), strict=True)
    return next((f"a tensor is {_facts(b)}, not {_facts(a)}" for a, b in pairs if _facts(a) != _facts(b)), None)


def _facts(tensor: Tensor) -> str:
    words = [type(tensor).__name__, f"on {tensor.device}", f"with strides {tensor.stride()}"]
    words += ["that requires gradients"] * tensor.requires_grad
    words += ["in pinned memory"] * (tensor.device.type == "cpu" and tensor.is_pinned())
    return " ".join(words)


def why_other_copy(pairs: Iterable[tuple[Tensor, Copy]]) -> str | None:
    """How a copy on the GPU differs from its original; None if none does."""
    for tensor, pending in pairs:
        on_device = pending.on_device()
        reason = why_unlike(tensor, on_device.cpu(), "the copy on the GPU")
        if reason is None and on_device.stride() != tensor.stride():
            reason = f"the copy on the GPU has strides {on_device.stride()}, not {tensor.stride()}"
        if reason is not None:
            return reason
    return None
