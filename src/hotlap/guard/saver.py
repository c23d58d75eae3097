"""When to save, and saving beside the training: the copy is made between two steps, the files by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.store.checkpoints import Checkpoints
from hotlap.store.disk import Piece

Files = Mapping[str, Iterable[Piece]]

COST_SHARE = 0.02
"""At most this share of a run goes into saving, as far as hotlap chooses when."""
LEAST_S = 30.0
"""No more often than this, as far as hotlap chooses when: what a crash then loses is half a minute."""


class Saver:
    """Writes checkpoints of one training.

    `every` is a number of updates between two saves; None leaves it to what saving costs; 0 never saves.
    """

    def __init__(self, checkpoints: Checkpoints, every: int | None, complain: Callable[[str], None]) -> None:
        self._checkpoints, self._every, self._complain = checkpoints, every, complain
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._last_s = time.perf_counter()
        self._copied_s = 0.0
        self._wrote_s = 0.0
        self.saved = 0
        """Checkpoints that are whole on the disk."""
        self.spent_s = 0.0
        """Seconds that training stood still for saving."""
        self.writing_s = 0.0
        """Seconds that the thread was writing, beside the training or while that waited."""

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint before the next step."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        waited = time.perf_counter() - self._last_s
        # On few cores writing takes time from training, so all of it counts as cost.
        cost_s = self._copied_s + self._wrote_s
        # A save that is under way is waited for by nobody: the next one comes when it is done.
        return waited >= max(LEAST_S, cost_s / COST_SHARE) and not self.busy

    @property
    def busy(self) -> bool:
        """Whether files are being written right now."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, export: Callable[[], Files], facts: dict[str, Any], *, wait: bool = False) -> None:
        """Copy the state now, write it beside the training. A failure is told and training goes on."""
        begun = time.perf_counter()
        self.finish()
        copying = time.perf_counter()
        try:
            files = export()
        except (OSError, MemoryError) as error:
            self._complain(f"step {step} is not saved: {error or type(error).__name__}")
        else:
            self._copied_s = time.perf_counter() - copying
            self._thread = threading.Thread(
                target=self._write, args=(step, files, facts), name="hotlap-save", daemon=True
            )
            self._thread.start()
        if wait:
            self.finish()
        self._last_s = time.perf_counter()
        self.spent_s += self._last_s - begun

    def finish(self) -> None:
        """Wait for the files of the last save; tell if they could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, StoreError):
                self._complain(str(failure))
                return
            # Whatever it was, it happened beside the training, which is sound.
            reason = getattr(failure, "strerror", None) or f"{type(failure).__name__}: {failure}"
            self._complain(f"a checkpoint could not be written: {reason}; training goes on, the last one is untouched")

    def _write(self, step: int, files: Files, facts: dict[str, Any]) -> None:
        begun = time.perf_counter()
        try:
            self._checkpoints.write(step, files, facts)
            self.saved += 1
        except BaseException as error:
            # Without its trace, which would keep the copied state alive until the next save.
            self._failure = error.with_traceback(None)
        self._wrote_s = time.perf_counter() - begun
        self.writing_s += self._wrote_s
