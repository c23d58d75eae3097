"""A Route is a way through the data: where a training stands, and the windows from there on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from hotlap.core.errors import TrainingError
from hotlap.core.plan import Plan
from hotlap.data.course import Course
from hotlap.data.feeds import Feeding, open_feed
from hotlap.data.order import Epoch
from hotlap.engine.step import Window


@dataclass(frozen=True)
class Place:
    """Where in the data a training stands: the window to come."""

    epoch: int = 0
    window: int = 0
    served: int = 0
    """Windows given out so far, over all epochs."""


class Route:
    """Windows of a course, in its order, brought as the plan in force says.

    The plan may change between any two windows: the next one is then brought the new way, from the same place.
    """

    def __init__(self, course: Course, plan: Callable[[], Plan], *, on_gpu: bool, ignored: int | None = None) -> None:
        self.course = course
        self.place = Place()
        self.epoch_windows = 0
        """Windows in the current epoch."""
        self._plan, self._on_gpu = plan, on_gpu
        self._all_count = ignored is not None and course.source.never_holds(ignored)
        self._feeding: Feeding | None = None
        self._version = 0
        self._left = False

    def reopen(self) -> None:
        """Bring the next window by another feed: the one at work is closed."""
        if self._feeding is not None:
            self._feeding.close()
            self._feeding = None
        self.recut()

    def recut(self) -> None:
        """Cut the next window anew, by the same feed."""
        self._version += 1

    def leave(self) -> None:
        """Give the route up for another one."""
        self._left = True
        self.reopen()

    def windows(self, *, epochs: int | None, steps: int | None, epoch_ended: Callable[[], None]) -> Iterator[Window]:
        """Windows from the current place on, until so many epochs are behind or so many windows were given out."""
        try:
            while epochs is None or self.place.epoch < epochs:
                number = self.place.epoch
                epoch = self.course.order.epoch(number)
                self.epoch_windows = len(epoch)
                version, expected = -1, self.place
                stream: Iterator[Window] = iter(())
                while self.place.epoch == number and self.place.window < len(epoch):
                    if steps is not None and self.place.served >= steps:
                        return
                    # A changed plan, or a place that was put back, begins a new stream.
                    if version != self._version or self.place != expected:
                        stream, version = self._stream(epoch, number), self._version
                    window = next(stream)
                    # The place moves before the step, so that between two steps it names the window to come.
                    expected = self.place = Place(number, self.place.window + 1, self.place.served + 1)
                    yield window
                    if self._left:
                        raise TrainingError("another feed was opened; a rig feeds from one at a time, so use two rigs")
                # Beyond its end, where a resumed training was allowed larger batches.
                if self.place.epoch == number and self.place.window >= len(epoch):
                    self.place = Place(number + 1, 0, self.place.served)
                    epoch_ended()
        finally:
            # A loop that was left by `break` leaves no worker behind.
            if not self._plan().feed.persistent:
                self.reopen()

    def _stream(self, epoch: Epoch, number: int) -> Iterator[Window]:
        """The epoch's windows from the current place on, under the plan in force."""
        course, plan = self.course, self._plan()
        if self._feeding is None:
            self._feeding = open_feed(
                course.source, plan.feed, seed=course.seed, on_gpu=self._on_gpu, extras=course.extras
            )
        feeding = self._feeding
        sizes: deque[list[int]] = deque()
        first, micro = self.place.window, plan.memory.micro_batch

        def asked() -> Iterator[Tensor]:
            for window in range(first, len(epoch)):
                indices = epoch.pieces(window, micro, tickets=feeding.tickets)
                sizes.append([len(piece) for piece in indices])
                yield from indices

        # Workers ask ahead; a window's sizes are known once its first piece is here.
        pieces = feeding.pieces(asked(), number)
        for piece in pieces:
            here = sizes.popleft()
            yield Window([piece, *islice(pieces, len(here) - 1)], here, self._all_count)
