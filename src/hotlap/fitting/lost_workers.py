"""Workers of a loader that die: hotlap starts as many again at the same batch, then fewer, then none."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from hotlap.core.errors import first_line
from hotlap.core.ledger import Entry
from hotlap.core.torch_private import loader_signals
from hotlap.engine.rig import Rig

DIED: Final = ("is killed by signal", "exited unexpectedly")
"""What torch says of workers that have died."""
NO_SHARED_MEMORY: Final = ("shared memory", "unable to write to file </torch_", "unable to mmap", "Bus error")
"""What torch says of workers for which /dev/shm is too small."""
RECEIVING: Final = "resource_sharer.py"
"""The file of Python's that receives memory from another process."""
NEAR: Final = 100
"""Workers that die again within so many steps are started in smaller numbers."""


def is_lost(error: BaseException) -> bool:
    """Whether an error means that workers died, or that they have no shared memory for batches."""
    if isinstance(error, (ConnectionError, EOFError)):
        # A batch lies in memory of the worker that made it, which this process asks for.
        frames = traceback.extract_tb(error.__traceback__)
        return any(Path(frame.filename).name == RECEIVING for frame in frames)
    text = str(error)
    return "DataLoader" in text and any(words in text for words in (*DIED, *NO_SHARED_MEMORY))


class LostWorkers:
    """Answers the deaths of one training's workers. Samples stay the same, whichever process fetches them."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._last: int | None = None
        """The step at which workers died last."""

    def answer(self, error: BaseException) -> str:
        """Put a feed in force that may go on where workers died; what it is, in words."""
        rig, feed = self._rig, self._rig.plan.feed
        is_short = any(words in str(error) for words in NO_SHARED_MEMORY)
        is_again = self._last is not None and rig.steps - self._last < NEAR
        self._last = rig.steps
        workers = feed.workers // 2 if is_short or is_again else feed.workers
        said = first_line(error) if "DataLoader" in str(error) else "a worker died while it handed over a batch"
        why = f"{said}; {_words(workers)} from step {rig.steps:,} on"
        if is_short:
            why += "; /dev/shm is too small: enlarge it, as with docker run --shm-size=8g"
        if workers != feed.workers:
            smaller = {"workers": workers} if workers else {"workers": 0, "prefetch": None, "persistent": False}
            rig.use(replace(rig.plan, feed=replace(feed, **smaller)), why="workers died")
        rig.ledger.record(Entry(step=rig.steps, what="workers died", outcome="fault", plan=rig.plan, why=why))
        return why


def _words(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}" if workers else "no workers"


@contextmanager
def deaths_raised_by_the_feed() -> Iterator[None]:
    """Inside, the death of a worker is raised with the next batch. Torch would raise it in the middle of a step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = loader_signals
    was_set, before = signals._SIGCHLD_handler_set, signal.getsignal(signal.SIGCHLD)
    if was_set:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals._SIGCHLD_handler_set = True  # so that torch sets no handler of its own
    try:
        yield
    finally:
        signals._SIGCHLD_handler_set = was_set
        if was_set:
            signal.signal(signal.SIGCHLD, before)
