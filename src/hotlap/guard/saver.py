"""When to save, and saving beside the training: the copy is made between two steps, the files by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
        self._cost_s = 0.0
        self.saved = 0
        """Checkpoints that are whole on the disk."""
        self.spent_s = 0.0
        """Seconds that training stood still for saving."""

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint before the next step."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        waited = time.perf_counter() - self._last_s
        # A save that is under way is waited for by nobody: the next one comes when it is done.
        return waited >= max(LEAST_S, self._cost_s / COST_SHARE) and not self.busy

    @property
    def busy(self) -> bool:
        """Whether files are being written right now."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, export: Callable[[], Files], facts: dict[str, Any], *, wait: bool = False) -> None:
        """Copy the state now, write it beside the training. A failure is told and training goes on."""
        begun = time.perf_counter()
        self.finish()
        try:
            files = export()
        except OSError as error:
            self._complain(f"step {step} is not saved: {error}")
            self._last_s = time.perf_counter()
            return
        self._thread = threading.Thread(target=self._write, args=(step, files, facts), name="hotlap-save", daemon=True)
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
            if not isinstance(failure, OSError):
                raise failure
            reason = failure.strerror or str(failure)
            self._complain(f"a checkpoint could not be written: {reason}; training goes on, the last one is untouched")

    def _write(self, step: int, files: Files, facts: dict[str, Any]) -> None:
        begun = time.perf_counter()
        try:
            self._checkpoints.write(step, files, facts)
            self.saved += 1
        except BaseException as error:
            self._failure = error
        # On few cores writing takes time from training, so all of it counts as cost.
        self._cost_s = time.perf_counter() - begun
