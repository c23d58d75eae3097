"""One training per run folder: a lock that the system lets go of when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path

from hotlap.core.errors import StoreError

_held: dict[Path, int] = {}
"""Folders locked in this process, which has the number beside them: the system's lock is between processes only."""
_one_at_a_time = threading.Lock()


class RunLock:
    """Holds a run folder for this process. Raises StoreError where somebody else has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._owner = os.getpid()
        with _one_at_a_time:
            # A child has a copy of the list, but not its parent's locks.
            if _held.get(self._folder) == self._owner:
                raise StoreError(f"{folder} is in use by another training in this process; name another folder")
            self._handle = _locked(self._folder, folder)
            _held[self._folder] = self._owner
        with contextlib.suppress(OSError):  # on a full disk nobody learns the number, and the lock holds all the same
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"{self._owner}\n".encode())

    def release(self) -> None:
        """Let go; the file stays, since removing it would let two others in at once."""
        with _one_at_a_time:
            if self._handle >= 0 and self._owner == os.getpid():
                _held.pop(self._folder, None)
                os.close(self._handle)
                self._handle = -1


def _locked(folder: Path, shown: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(folder / "lock", flags, 0o666)
    except OSError as error:
        raise StoreError(f"cannot lock {shown}: {error.strerror or error}") from error
    try:
        # Not flock: loader workers would inherit that one, and hold it for seconds after a kill.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(handle, 20).decode(errors="replace").strip()
        os.close(handle)
        if not isinstance(error, (BlockingIOError, PermissionError)):
            raise StoreError(f"cannot lock {shown}: {error.strerror or error}") from error
        told = f"process {holder}" if holder.isdigit() else "another process"
        raise StoreError(f"{shown} is in use by {told}; wait for it, or name another folder") from None
    return handle
