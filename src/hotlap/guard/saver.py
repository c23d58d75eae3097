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
FIRST_BYTES_S = 100e6
"""What the first save is thought to copy, hash and write in a second: a slow disk of a cloud. Most do better."""
FIRST_SYNCS_S = 0.1
"""What the first save is thought to wait for besides: a dozen syncs, on a disk that turns."""
CAUTION = 1.5
"""A save is allowed to take so many times what the ones before took, and the share still holds."""


class Saver:
    """Writes checkpoints of one training.

    `every` is a number of updates between two saves; None leaves it to what saving costs; 0 never saves.
    With None a save is made only where all saves, that one included, stay within 2 % of the time since the run
    began. Time and saves count from this process's beginning on: where each part of a resumed run keeps to its
    share, so does the whole, and nobody has to know how long the parts before took. `before_s` is what the run had
    taken when this was made, `size` about how many bytes a checkpoint has.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every: int | None,
        complain: Callable[[str], None],
        *,
        before_s: float = 0.0,
        size: int = 0,
    ) -> None:
        self._checkpoints, self._every, self._complain = checkpoints, every, complain
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._began_s = time.perf_counter() - before_s
        self._first_cost_s = FIRST_SYNCS_S + size / FIRST_BYTES_S
        self._last_s: float | None = None
        self._last_cost_s = 0.0
        self._whole_cost_s = 0.0
        self._last_step: int | None = None
        self.saved = 0
        """Checkpoints that are whole on the disk."""
        self.spent_s = 0.0
        """Seconds that training stood still for saving."""
        self.copying_s = 0.0
        """Seconds of copying, while training stood still."""
        self.writing_s = 0.0
        """Seconds that the thread was writing, beside the training or while that waited."""

    @property
    def cost_s(self) -> float:
        """Seconds that all saves took so far. On few cores writing takes time from training, so all of it counts."""
        return self.copying_s + self.writing_s

    @property
    def expected_s(self) -> float:
        """Seconds that the next save may take: by its size at first, then by what those before took."""
        if not self.saved:
            return self._first_cost_s
        return CAUTION * max(self._last_cost_s, self._whole_cost_s / self.saved)

    def due(self, step: int) -> bool:
        """Whether it is time for a checkpoint before the next step."""
        if self._every is not None:
            return self._every > 0 and step % self._every == 0
        # A save that is under way is waited for by nobody: the next one comes when it is done.
        if self._last_s is not None and (time.perf_counter() - self._last_s < LEAST_S or self.busy):
            return False
        return self._is_within_share()

    def due_at_end(self, step: int) -> bool:
        """Whether a checkpoint is to be made after the last step; waits for one that is under way."""
        if self._every is not None:
            return self._every > 0
        begun = time.perf_counter()
        self.finish()
        self.spent_s += time.perf_counter() - begun
        return step != self._last_step and self._is_within_share()

    def _is_within_share(self) -> bool:
        return self.cost_s + self.expected_s <= COST_SHARE * (time.perf_counter() - self._began_s)

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
            self.copying_s += time.perf_counter() - copying
            self._complain(f"step {step} is not saved: {error or type(error).__name__}")
        else:
            copied_s = time.perf_counter() - copying
            self.copying_s += copied_s
            self._thread = threading.Thread(
                target=self._write, args=(step, files, facts, copied_s), name="hotlap-save", daemon=True
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

    def _write(self, step: int, files: Files, facts: dict[str, Any], copied_s: float) -> None:
        begun = time.perf_counter()
        failure = None
        try:
            self._checkpoints.write(step, files, facts)
        except BaseException as error:
            # Without its trace, which would keep the copied state alive until the next save.
            failure = error.with_traceback(None)
        wrote_s = time.perf_counter() - begun
        self.writing_s += wrote_s
        self._failure = failure
        # One that failed may have ended early: what it took says nothing of the next.
        if failure is None:
            self._last_cost_s = copied_s + wrote_s
            self._whole_cost_s += self._last_cost_s
            self._last_step = step
            self.saved += 1
