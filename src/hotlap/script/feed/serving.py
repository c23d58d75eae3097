"""The batches of a script's loader, by whichever feed is wanted: the same to the bit, in the same order."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hotlap.core.errors import PlanError, first_line
from hotlap.core.plan import Feed
from hotlap.data.batches import Batch
from hotlap.data.dataset import as_source, loader_feed, own_collate
from hotlap.data.feeds import CudaCopier
from hotlap.data.order import HostRandomness
from hotlap.data.pure.proof import GRADIENTS, proof_of, reads_in_place, why_not_pure
from hotlap.data.pure.read_state import ReadState
from hotlap.data.sources import Source
from hotlap.script.feed.checks import (
    Compared,
    compared_indices,
    true_batch,
    why_no_samples,
    why_other_batch,
    why_own_only,
)
from hotlap.script.feed.epoch import Served, batches_ahead
from hotlap.script.feed.feeds import Gathered, Iterate, LikeLoader, Resident, Streamed
from hotlap.script.feed.holding import Holding, Learned
from hotlap.script.feed.indices import Indices, generator_of, order_of, why_not_early
from hotlap.script.feed.sending import Receives, Sending
from hotlap.tuner.budget import check_allowed

CHANGED = "the data changed during the run"


class Serving:
    """Stands in for the iteration of one loader of a script.

    The script sees what it would see without: the same batches of the same types in the same order, and the same draws
    from the generators of Python, numpy and torch. The loader is not kept alive.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        device: torch.device,
        original_iter: Iterate,
        sending: Sending | None = None,
    ) -> None:
        """`original_iter` is torch's own; `sending` answers what the script sends to `device`."""
        self._loader, self._original_iter = weakref.ref(loader), original_iter
        self.device, self.sending = device, sending
        self._settle(loader)
        self.feed = self.wanted = self.own
        """The feed in force, and the one that was asked for last."""
        self.epochs = 0
        """Epochs that were begun."""
        self.served = 0
        """Batches given out in the current epoch."""
        self.given = 0
        """Batches given out in all."""
        self.on_batch: Callable[[float], Any] | None = None
        """Told after every batch how many seconds the host took to make it."""
        self.on_begin: Callable[[], Any] | None = None
        """Told before an epoch begins."""
        self.on_end: Callable[[], Any] | None = None
        """Told that an epoch has no more batches, or that the script has let go of it."""
        self.on_fault: Callable[[Exception], Any] | None = None
        """Told of what went wrong in here; the script goes on with its own feed."""
        self.on_change: Callable[[Feed, str], Any] | None = None
        """Told of a feed that was left for the script's own since the data changed, and why."""
        self._why_changed: str | None = None
        self._state: ReadState | None = None
        self._loaders: dict[Feed, LikeLoader] = {}
        self._held: Holding | None = None
        self._epoch: weakref.ref[Served] | None = None
        self._is_closed = False

    def _settle(self, loader: DataLoader[Any]) -> None:
        """Note how the script has set its loader."""
        self._like = copy.copy(loader)
        vars(self._like)["_iterator"] = None
        self.own = _own_feed(loader)
        """The feed as the script has set it."""
        self.batch_size: int | None = getattr(loader.batch_sampler, "batch_size", None)
        """Samples in a batch, where the loader says so."""
        self._why_own_only = why_own_only(loader)
        self._source: Source | None = None

    @property
    def source(self) -> Source | None:
        """Where the samples come from; None where they do not come by index."""
        if self._source is None and self._why_own_only is None:
            self._source = self._new_source()
        return self._source

    @property
    def length(self) -> int | None:
        """Batches in an epoch, where the loader knows."""
        loader = self._loader()
        if loader is None:
            return None
        asked = loader._IterableDataset_len_called  # torch warns of datasets that were asked and give more
        try:
            return len(loader)
        except Exception:  # of a user's class, or for want of it
            return None
        finally:
            loader._IterableDataset_len_called = asked

    @property
    def waiting(self) -> bool:
        """Whether a feed was asked for that is not yet in force."""
        epoch = self._running()
        return self.wanted != self.feed or (epoch is not None and epoch.is_waiting)

    # --- what the script sees --------------------------------------------------------------------

    def iterate(self) -> Iterator[Any]:
        """Stands in for `iter(loader)`. Of two iterators at a time the second is torch's own."""
        loader = self._loader()
        assert loader is not None, "who iterates it holds it"
        begun = self.begin(loader)
        return begun if begun is not None else self.stand_in(loader, self._original_iter(loader))

    def begin(self, loader: DataLoader[Any]) -> Iterator[Any] | None:
        """Begin an epoch. None where torch's own iterator is needed: make one, and let `stand_in` have it."""
        running = self._running()
        if running is not None:
            if self.length is None or self.served < self.length:
                if loader.persistent_workers:
                    running.pass_on()  # torch gives the iterator that it made, begun anew
                return None
            running.end()  # nobody asked it for more, and somebody keeps it: Lightning, for one
        self.epochs, self.served = self.epochs + 1, 0
        self._tell(self.on_begin)
        self.feed = self.wanted  # of an epoch before nothing is under way
        try:
            self._look_again(loader)
            if self.own in self._loaders and not loader.persistent_workers:
                self._loaders.pop(self.own).close()  # as torch's, each epoch's workers see what was written before it
            if self._goes_without_workers(loader):
                return self._begun_without_workers(loader)
        except Exception as error:
            self.failed(error)
        return None

    def stand_in(self, loader: DataLoader[Any], made: Iterator[Any]) -> Iterator[Any]:
        """What the script gets for torch's own iterator; that itself, where an epoch is still under way."""
        if self._running() is not None:
            return made
        try:
            return self._noted(Served(self, made, loader))
        except Exception as error:
            self.failed(error)
            return made

    def _goes_without_workers(self, loader: DataLoader[Any]) -> bool:
        """Whether torch would start workers, or use those it has, for batches that come by another feed."""
        if not loader.num_workers or self._why_own_only is not None:
            return False
        if loader.persistent_workers and loader._iterator is None:
            return False  # they keep the data as it is when they are started, and may be needed once it has changed
        return self.feed != self.own

    def _begun_without_workers(self, loader: DataLoader[Any]) -> Iterator[Any]:
        generator = generator_of(loader.batch_sampler)
        before = HostRandomness()
        states = [(one, one.get_state()) for one in (loader.generator, generator) if one is not None]
        try:
            made, sampler = self._made_without_workers(loader)
            order = order_of(loader.batch_sampler, sampler)
            indices = Indices(order or sampler, ahead=batches_ahead(loader), batch_sampler=loader.batch_sampler)
            indices.begin()
            return self._noted(Served(self, made, loader, indices))
        except Exception:
            before.restore()
            for one, state in states:
                one.set_state(state)
            raise

    def _made_without_workers(self, loader: DataLoader[Any]) -> tuple[Any, Iterator[Any]]:
        """torch's iterator of an epoch and the sampler's, after all the draws that torch makes with workers."""
        begun = loader._iterator if loader.persistent_workers else None
        if begun is not None:  # which draws no new seed
            return begun, iter(loader._index_sampler)
        alone = copy.copy(loader)
        vars(alone).update(num_workers=0, prefetch_factor=None, timeout=0, persistent_workers=False)
        made: Any = self._original_iter(alone)
        made._reset(loader)  # with workers, the sampler is begun twice
        return made, made._sampler_iter

    def _noted(self, epoch: Served) -> Served:
        self._epoch = weakref.ref(epoch)
        return epoch

    def _running(self) -> Served | None:
        epoch = None if self._epoch is None else self._epoch()
        return None if epoch is None or epoch.is_over else epoch

    def _look_again(self, loader: DataLoader[Any]) -> None:
        """Let go of everything where the script has changed its loader or its data since."""
        if _own_feed(loader) != self.own or loader.collate_fn is not self._like.collate_fn:
            self._let_go()
            self._settle(loader)
            self.feed = self.wanted = self.own
            return
        reason = self._why_stale(thorough=True)
        if reason is not None:
            self._leave(reason)

    # --- what the tuner asks for -----------------------------------------------------------------

    def supports(self, feed: Feed) -> str | None:
        """Why the batches cannot come by a feed, or None where they can."""
        if feed == self.own:
            return None
        try:
            return self._why_own_only or self._why_changed or self._why_not(feed)
        except Exception as error:  # whatever the user's dataset makes of being looked at
            return f"the data could not be looked at: {first_line(error)}"

    def use(self, feed: Feed) -> None:
        """Make batches by a feed from the next one on, or once those are given out that workers were asked for.

        They are in page-locked memory where the script's own loader has them there, whatever the feed says.
        Where samples have to be held first, that is done here. Raises PlanError where the feed is not supported, and
        what holding the data raises; the feed in force is then as before.
        """
        stale = self._why_stale(thorough=False) if feed != self.own else None
        if stale is not None:
            self._leave(stale)
        reason = self.supports(feed)
        if reason is not None:
            raise PlanError(reason)
        if feed != self.own:
            self._prepare(feed)
        if feed.kind in ("resident", "stream") and self.sending is not None:
            self.sending.install()
        self.wanted, self._is_closed = feed, False
        epoch = self._running()
        if epoch is None:
            self.feed = feed
        else:
            epoch.turn()

    def why_other(self, feed: Feed) -> str | None:
        """What batches by a feed have other than the script's own, seen in a few; None where nothing."""
        if feed == self.own:
            return None
        reason = self.supports(feed)
        if reason is not None:
            return reason
        try:
            # As the script is where it trains, whatever mode it is in now.
            with torch.inference_mode(False), torch.enable_grad():
                return self._why_other(feed)
        except Exception as error:
            return f"the feed failed when it was tried: {first_line(error)}"

    def holding_s(self, feed: Feed | None = None) -> float:
        """About how many seconds going over to a feed takes; without one, to the one that holds most here."""
        kind = feed.kind if feed is not None else "resident" if self.device.type == "cuda" else "gather"
        try:
            if self._why_own_only is not None or kind == "loader":
                return 0.0
            return self._holding.seconds(kind)
        except Exception:  # whatever the user's dataset makes of being looked at; it is not supported either
            return 0.0

    @property
    def learned(self) -> Learned | None:
        """What keeps samples as they come by, where something does."""
        return self._held.learned if self._held is not None else None

    @property
    def keeps_samples(self) -> bool:
        """Whether samples are kept, or were: other feeds have them at hand."""
        return self._held is not None and (self._held.learned is not None or self._held.columned is not None)

    def learn(self) -> int | None:
        """Keep samples as they come by in the script's own batches, so that holding them takes less.

        Gives the batches until the end of the epoch, by which more of them are there; None where nothing is spared.
        """
        feed = Feed(kind="resident" if self.device.type == "cuda" else "gather")
        if self.own.kind != "loader" or self.supports(feed) is not None:
            return None
        assert self.source is not None  # it is supported
        if not self.source.computes or self._holding.columned is not None:
            return None
        self._remember_data()
        if self._holding.learn().is_over:
            return None
        epoch = self._running()
        if epoch is not None:
            epoch.follow()
        return None if self.length is None else max(1, self.length - self.served)

    def tidy(self) -> None:
        """Let go of all that belongs to other feeds than the one in force."""
        needed = (self.feed, self.wanted)
        for feed in [feed for feed in self._loaders if feed not in needed]:
            self._loaders.pop(feed).close()
        if self._held is not None:
            self._held.tidy(needed)
        if all(feed == self.own for feed in needed):
            self._state = None

    def close(self) -> None:
        """Let go of everything; an epoch that is under way goes on by the script's own feed."""
        self.wanted, self._is_closed = self.own, True
        epoch = self._running()
        if epoch is not None:
            epoch.release()
        self.feed = self.own
        self._let_go(but=self.own if epoch is not None else None)

    # --- what an epoch asks for ------------------------------------------------------------------

    def fed(self, feed: Feed, indices: Iterator[Any], sending: Receives | None = None) -> Iterator[Batch]:
        """The batches at these indices by a feed; nothing is read before the first is asked for."""
        sending = sending or self.sending
        if feed.kind == "loader":
            if feed not in self._loaders:
                self._loaders[feed] = LikeLoader(self._like, feed, self._original_iter)
            return self._loaders[feed].batches(indices)
        holding = self._holding
        assert holding.columned is not None, "it is held before it is used"
        if feed.kind == "gather":
            return Gathered(holding.columned, indices)
        assert sending is not None  # supports has seen to it
        if feed.kind == "stream":
            copier, stages = CudaCopier(self.device), not self.own.pinned
            return Streamed(holding.columned, indices, copier=copier, sending=sending, pinned=True, stages=stages)
        assert holding.there is not None, "it is held before it is used"
        return Resident(
            holding.columned,
            indices,
            there=holding.there,
            device=self.device,
            sending=sending,
            is_same=holding.is_same,
        )

    def look(self) -> None:
        """Told by an epoch that a batch is asked for: where the data has changed, the script's own feed makes it."""
        # Workers of the script's own, too, see in the next epoch what changes in this one.
        if self._state is not None and not self.own.workers:
            reason = self._why_stale(thorough=False)
            if reason is not None:
                self._leave(reason)

    def gave(self, seconds: float) -> None:
        """Told by an epoch that it has made a batch."""
        self.served, self.given = self.served + 1, self.given + 1
        self._tell(self.on_batch, seconds)

    def failed(self, error: Exception) -> None:
        """Told that something in here failed; the script's own feed takes its place."""
        self.feed = self.wanted = self.own
        self._tell(self.on_fault, error)

    def ended(self) -> None:
        """Told by an epoch that it is over."""
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

    # --- how -------------------------------------------------------------------------------------

    def _new_source(self) -> Source:
        source = as_source(self._like.dataset, own_collate(self._like), loaded=True)
        source.in_workers = self._like.num_workers > 0
        return source

    @property
    def _holding(self) -> Holding:
        if self._held is None:
            source = self.source
            assert source is not None  # or only the own feed would do
            self._held = Holding(source, self.device, self.own)
        return self._held

    def _why_not(self, feed: Feed) -> str | None:
        source = self.source
        assert source is not None  # or only the own feed would do
        reason = why_not_pure(source) or why_no_samples(self._like.dataset)
        if reason is not None:
            return reason
        if torch.get_default_device().type != "cpu":
            return f"torch's default device is {torch.get_default_device()}, and batches are made there"
        if feed.kind in ("resident", "stream"):
            if self.device.type != "cuda":
                return f"the script trains on the {self.device.type.upper()}"
            if self.sending is None:
                return "nothing answers for what the script sends to its device"
            if not source.on_host:
                return "the data is on a device already"
        if feed.kind == "stream" or feed.workers:
            reason = why_not_early(self._like.batch_sampler)
            if reason is not None:
                return reason
        if feed.kind == "loader":
            proof = proof_of(source)
            if proof.seeds and not feed.workers:
                return "the dataset seeds torch's generators, which workers alone keep to themselves"
            return GRADIENTS if proof.state.needs_gradients else None
        if source.own_collate is not None:
            return "the loader has a collate function of its own"
        return self._holding.why_not(feed)

    def _prepare(self, feed: Feed) -> None:
        """Have ready what a feed needs, and remember what the data was like."""
        self._remember_data()
        if feed.kind != "loader":
            self._holding.hold(feed)

    def _remember_data(self) -> None:
        if self._state is None:
            # Since it was first looked at, the script may have given its dataset other tensors or rows.
            fresh = self._new_source()
            reason = why_not_pure(fresh)
            if reason is not None:
                raise PlanError(reason)
            self._source, self._held, self._state = fresh, None, proof_of(fresh).state

    def _why_other(self, feed: Feed) -> str | None:
        self._prepare(feed)
        source = self.source
        assert source is not None  # it is supported
        chosen, copies = compared_indices(len(source), self.batch_size), Compared()
        mine: LikeLoader | None = None
        if feed in (self.feed, self.wanted) and feed.kind == "loader":  # whose workers may be busy
            mine = LikeLoader(self._like, feed, self._original_iter)
        seen = mine.batches(iter(chosen)) if mine is not None else self.fed(feed, iter(chosen), copies)
        try:
            for index in chosen:
                check_allowed()
                truth = true_batch(source, self._like, index, pinned=self.own.pinned)
                reason = why_other_batch(truth, next(seen))
                if reason is not None:
                    return reason
            return copies.why_other()
        finally:
            close = getattr(mine or seen, "close", None)
            if close is not None:
                close()

    def _why_stale(self, *, thorough: bool) -> str | None:
        """What has changed in the data since another feed than the own was prepared; None where nothing is seen."""
        if self._state is None or self.source is None:
            return None
        # Workers that stay never see what is written after they were started.
        live = (
            reads_in_place(self.source)
            and not self.own.persistent
            and all(feed.kind == "gather" or feed == self.own for feed in (self.feed, self.wanted))
        )
        try:
            return self._state.why_changed(thorough=thorough, live=live)
        except Exception as error:  # whatever the user's objects make of being looked at
            return first_line(error)

    def _leave(self, reason: str) -> None:
        """Leave the feed in force for the script's own, for good: the data is not what it was."""
        feed, self._why_changed = self.wanted, f"{CHANGED}: {reason}"
        self.close()
        if feed != self.own:
            self._tell(self.on_change, feed, reason)

    def _let_go(self, but: Feed | None = None) -> None:
        """Let go of all that was made for other feeds; of workers, not of those of `but`."""
        for feed in [feed for feed in self._loaders if feed != but]:
            self._loaders.pop(feed).close()
        self._held = self._state = None


def _own_feed(loader: DataLoader[Any]) -> Feed:
    return loader_feed(loader, on_gpu=loader.pin_memory and torch.accelerator.is_available())
