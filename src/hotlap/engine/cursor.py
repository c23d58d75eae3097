"""A Cursor moves through the data: it knows where a training is, and brings the windows from there on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hotlap.core.errors import TrainingError
from hotlap.core.plan import Feed, Plan
from hotlap.data.batches import Batch
from hotlap.data.dataset import OrderedDataset
from hotlap.data.feeds import Feeding, open_feed, within_cores
from hotlap.data.order import Epoch
from hotlap.data.pure.proof import proof_of, reads_in_place, state_of
from hotlap.data.pure.read_state import ReadState
from hotlap.data.resident import ResidentFeeding, hold_on_device, packed, time_to_hold, why_not_held
from hotlap.engine.step import Window
from hotlap.machine.cuda import free_for_torch

SEEN = 2
"""Windows that are kept of data that must not be fetched again."""


class Place(NamedTuple):
    """Where in the data a training is: its next window. (A plain tuple, since every step makes one.)"""

    epoch: int = 0
    window: int = 0
    served: int = 0
    """Windows given out so far, in all epochs."""


class Cursor:
    """Windows of a dataset, in its order, brought as the current plan asks.

    The plan may change between any two windows. The next window then comes the new way, from the same place.
    """

    def __init__(
        self, dataset: OrderedDataset, plan: Callable[[], Plan], *, device: torch.device, ignored: int | None = None
    ) -> None:
        self.dataset = dataset
        self.place = Place()
        self.epoch_windows = 0
        """Windows in the current epoch."""
        self._plan, self._device = plan, device
        self.keeps = False
        """Whether feeds of other plans stay open, until `release_other_plans`."""
        self._resident: dict[str, ResidentFeeding] = {}
        """Kept over changes of plan, by layout, since captures read the data at its address."""
        self._parked: dict[Feed, Feeding] = {}
        self.on_change: Callable[[str], None] | None = None
        """Called with the reason when data that was fetched earlier has changed."""
        self._state: ReadState | None = None
        self._seen: deque[Window] = deque(maxlen=SEEN)
        self._all_count = ignored is not None and dataset.source.never_holds(ignored)
        self.rank = 0
        """The part of each batch to bring, where the plan has several ranks share it."""
        self._feeding: Feeding | None = None
        self._version = 0
        self._left = False

    def reopen(self) -> None:
        """Bring the next window by another feed, and close the current one."""
        if self._feeding is not None:
            self._feeding.close()
            self._feeding = None
        self.recut()

    def change(self, before: Feed) -> None:
        """Bring the next window as the plan asks. The current feed, which was `before`, is parked for its plan's
        return."""
        if not self._resident and not self._parked:
            self._state = None  # the new feed decides whether the data has to be watched
        if self.keeps and self._feeding is not None:
            self._parked[before] = self._feeding
            self._feeding = None
        self.reopen()

    def release_other_plans(self) -> None:
        """Release the feeds of all plans but the current one."""
        self.keeps = False
        self._close_parked()
        plan = self._plan()
        needed = self._layout_held(plan) if plan.feed.kind == "resident" else None
        self._resident = {layout: feeding for layout, feeding in self._resident.items() if layout == needed}

    def _layout_held(self, plan: Plan) -> str:
        return plan.numerics.layout if self._device.type == "cuda" else "as given"

    def _is_memory_short(self) -> bool:
        """Whether the data in one more layout would take more than half of the free memory."""
        if self._device.type != "cuda":
            return False
        one = next(iter(self._resident.values()), None)
        if one is None:
            return False
        held_bytes = sum(t.numel() * t.element_size() for t in one.columns.tensors.values())
        return 2 * held_bytes > free_for_torch(self._device)

    def let_go(self) -> None:
        """Release data held on the device; it is fetched again when needed."""
        self.reopen()
        self._close_parked()
        self._resident = {}

    def _close_parked(self) -> None:
        for feeding in self._parked.values():
            feeding.close()
        self._parked.clear()

    def recut(self) -> None:
        """Cut the next window again, by the same feed."""
        self._version += 1

    def why_not_resident(self, reserve_bytes: int) -> str | None:
        """Why the data cannot be held on the device besides this reserve, or None where it can."""
        if self._resident:
            return None
        return why_not_held(self.dataset.source, self._device, reserve_bytes=reserve_bytes)

    def holding_s(self) -> float:
        """Seconds to hold the data on the device, about; 0 if it is there."""
        return 0.0 if self._resident else time_to_hold(self.dataset.source, self._device)

    def leave(self) -> None:
        """Close this cursor; another one takes its place."""
        self._left = True
        self.let_go()

    def windows(
        self,
        *,
        epochs: int | None,
        steps: int | None,
        epoch_ended: Callable[[], None],
        room: Callable[[], int] | None = None,
    ) -> Iterator[Window]:
        """Windows from the current place on, until this many epochs are done or this many windows were given out.

        If the plan replays several updates at once, a window holds as many, but never more updates than `room` allows.
        """
        try:
            while epochs is None or self.place.epoch < epochs:
                number = self.place.epoch
                epoch = self.dataset.order.epoch(number)
                self.epoch_windows = len(epoch)
                if epochs is None or number + 1 < epochs:
                    self.dataset.order.draw_ahead(number + 1)
                version, expected, count = -1, self.place, len(epoch)
                stream: Iterator[Window] = iter(())
                while (place := self.place).epoch == number and place.window < count:
                    if steps is not None and place.served >= steps:
                        return
                    # A changed plan, a restored place, or changed data starts a new stream.
                    is_new = version != self._version or place != expected
                    if self._is_stale(is_new, place) or is_new:
                        self.recut()  # other iterators over these windows have to start again too
                        stream, version = self._stream(epoch, number, steps, room), self._version
                    window = next(stream)
                    made = window.updates
                    if not self._may_look and window.pieces:
                        self._seen.append(window)
                    # The place moves before the step: between two steps it names the next window.
                    expected = self.place = Place(number, place.window + made, place.served + made)
                    yield window
                    if self._left:
                        raise TrainingError("another feed was opened; a rig feeds from one at a time, so use two rigs")
                # The place lies beyond the end if a resumed training was allowed larger batches.
                if self.place.epoch == number and self.place.window >= len(epoch):
                    self.place = Place(number + 1, 0, self.place.served)
                    epoch_ended()
        finally:
            # A loop that ends by `break` leaves no worker behind.
            if not self._plan().feed.persistent:
                self.reopen()

    # --- data that changes -----------------------------------------------------------------------

    @property
    def _may_look(self) -> bool:
        """Whether hotlap may fetch samples that the training has not asked for."""
        source = self.dataset.source
        return not source.computes or proof_of(source, may_draw=True).why_traces is None

    def _is_stale(self, is_new: bool, place: Place) -> bool:
        """Whether the data has changed since feeds were opened; if so, it is fetched again."""
        begins = is_new and not place.window
        if self._state is None:
            self._watch()
        elif not begins and self.dataset.feed.workers:
            return False  # the user's own workers also see changes of this epoch in the next one
        reason = self._why_stale(thorough=begins)
        if reason is None:
            return False
        was_held = bool(self._resident) or not self.dataset.source.computes
        self._renew()
        if was_held and self.on_change is not None:
            self.on_change(reason)
        return True

    def _why_stale(self, *, thorough: bool) -> str | None:
        if self._state is None:
            return None
        feed = self._plan().feed
        # Other ranks have copies of the data.
        reads_anew = feed.kind in ("gather", "loader") and not feed.workers and self._plan().execution.ranks == 1
        return self._state.why_changed(thorough=thorough, live=reads_anew and reads_in_place(self.dataset.source))

    def _renew(self) -> None:
        """Release what was fetched, and read the data as it is now."""
        self.let_go()
        self.dataset = self.dataset.renewed()
        self._watch()

    def _watch(self) -> None:
        """Watch what the samples depend on, if they come from columns or copies and not from the user's own feed."""
        source, feed = self.dataset.source, self._plan().feed
        is_copied = feed.kind == "resident" or (feed.kind == "loader" and feed != self.dataset.feed)
        self._state = state_of(source) if is_copied or not source.computes else None

    def _stream(self, epoch: Epoch, number: int, steps: int | None, room: Callable[[], int] | None) -> Iterator[Window]:
        """The epoch's windows from the current place on, under the current plan."""
        plan = self._plan()
        if self._feeding is None:
            self._feeding = self._opened(plan)
        feeding = self._feeding
        micro = plan.memory.micro_batch
        if plan.execution.ranks > 1:
            epoch = epoch.part(self.rank, plan.execution.ranks)
        if isinstance(feeding, ResidentFeeding):
            yield from self._held_windows(feeding, epoch, plan, steps, room)
            return
        yield from self._fetched(feeding, epoch, number, range(self.place.window, len(epoch)), micro)

    def _fetched(
        self, feeding: Feeding, epoch: Epoch, number: int, windows: Iterable[int], micro: int | None
    ) -> Iterator[Window]:
        """These windows of an epoch, by a feed that brings pieces."""
        cut: deque[tuple[int, list[int]]] = deque()

        def asked() -> Iterator[Tensor]:
            for window in windows:
                indices = epoch.pieces(window, micro, tickets=feeding.tickets)
                cut.append((window, [len(piece) for piece in indices]))
                yield from indices

        # Workers ask ahead. A window's sizes are known once its first piece is here.
        pieces = feeding.pieces(asked(), number)
        for piece in pieces:
            while not cut[0][1]:  # of a short batch a rank may get nothing
                yield Window([], [], self._all_count, of=epoch.samples_of_all(cut.popleft()[0]))
            window, here = cut.popleft()
            whole = [piece] if len(here) == 1 else [piece, *islice(pieces, len(here) - 1)]
            if self.dataset.bad is not None:
                whole, here = self.dataset.bad.thin(whole, here)
            yield Window(whole, here, self._all_count, of=epoch.samples_of_all(window))
        for window, _ in cut:
            yield Window([], [], self._all_count, of=epoch.samples_of_all(window))

    def _opened(self, plan: Plan) -> Feeding:
        dataset = self.dataset
        if plan.feed.kind == "resident":
            layout = self._layout_held(plan)
            if layout not in self._resident:
                if not self.keeps or self._is_memory_short():
                    self._resident = {}
                held = hold_on_device(dataset.source, self._device)
                if dataset.bad is not None:
                    dataset.bad.note("data", held.left_out)
                columns = packed(held, images_last=layout == "channels_last")
                self._resident[layout] = ResidentFeeding(columns, self._device, held.left_out)
            return self._resident[layout]
        return self._parked.pop(plan.feed) if plan.feed in self._parked else self._new(plan.feed)

    def _new(self, feed: Feed) -> Feeding:
        dataset, on_gpu = self.dataset, self._device.type == "cuda"
        feed = within_cores(feed, dataset.feed.workers)
        return open_feed(
            dataset.source, feed, seed=dataset.seed, on_gpu=on_gpu, device=self._device, extras=dataset.extras
        )

    def _held_windows(
        self,
        feeding: ResidentFeeding,
        epoch: Epoch,
        plan: Plan,
        steps: int | None,
        room: Callable[[], int] | None,
    ) -> Iterator[Window]:
        """Windows whose samples are on the device. They name rows; gathering these is part of the step."""
        epoch = feeding.held_of(epoch)
        feeding.begin(epoch.indices)
        micro, together = plan.memory.micro_batch, plan.execution.replay_steps
        window = self.place.window
        while window < len(epoch):
            updates = together
            if together > 1:
                free = min(
                    together if steps is None else steps - self.place.served, together if room is None else room()
                )
                if free < together or not self._are_alike(feeding, epoch, window, together, micro):
                    updates = 1
            yield self._held_window(feeding, epoch, window, micro, updates)
            window += updates

    @staticmethod
    def _are_alike(feeding: ResidentFeeding, epoch: Epoch, window: int, count: int, micro: int | None) -> bool:
        """Whether this many windows from here on have the same shapes."""
        if not epoch.are_alike(window, count, micro):
            return False
        # Samples of several sizes may make batches of other widths.
        bounds = [epoch.bounds(number, micro) for number in range(window, window + count)]
        mine = {tuple(feeding.at_width_of(a, b) for a, b in pairwise(one)) for one in bounds} if feeding.varies else ()
        return len(mine) < 2

    def _held_window(
        self, feeding: ResidentFeeding, epoch: Epoch, window: int, micro: int | None, updates: int
    ) -> Window:
        bounds = epoch.bounds(window, micro)
        cuts = [(a, b) for a, b in pairwise(bounds) if b > a]
        pieces: list[Batch] = [feeding.rows(a, b - a) for a, b in cuts]
        return Window(pieces, [b - a for a, b in cuts], self._all_count, updates, epoch.samples_of_all(window))

    @property
    def windows_here(self) -> int:
        """Windows in the current epoch, whether it has begun or not."""
        return len(self.dataset.order.epoch(self.place.epoch))

    def look(self, plan: Plan, windows: Iterable[int]) -> Generator[Window, None, None]:
        """Some windows of the current epoch, one update each, as `plan` would bring them.

        They come by a separate feed: the training's place and stream do not move. If fetching a sample may leave a
        trace, the training's last windows stand in. Raises TrainingError if there is none.
        """
        if not self._may_look:
            if not self._seen:
                raise TrainingError("fetching samples of this data may leave a trace, and the training has had none")
            yield from (self._seen[window % len(self._seen)] for window in windows)
            return
        number, micro = self.place.epoch, plan.memory.micro_batch
        epoch = self.dataset.order.epoch(number)
        if plan.feed.kind == "resident":
            if self._why_stale(thorough=False) is not None:
                self._renew()
            feeding = self._opened(plan)
            assert isinstance(feeding, ResidentFeeding)
            epoch = feeding.held_of(epoch)
            feeding.begin(epoch.indices)
            held = (self._held_window(feeding, epoch, window, micro, 1) for window in windows)
            yield from (window for window in held if window.pieces)
            return
        own = self._new(plan.feed)
        try:
            yield from (window for window in self._fetched(own, epoch, number, windows, micro) if window.pieces)
        finally:
            own.close()
