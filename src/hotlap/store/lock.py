"""One training per run folder: a lock that the system lets go of when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hotlap.core.errors import StoreError

_held: set[Path] = set()
"""Folders locked in this process: the system's lock is between processes only."""


class RunLock:
    """Holds a run folder for this process. Raises StoreError where somebody else has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        if self._folder in _held:
            raise StoreError(f"{folder} is in use by another training in this process; name another folder")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._handle = os.open(self._folder / "lock", flags, 0o666)
        except OSError as error:
            raise StoreError(f"cannot lock {folder}: {error.strerror or error}") from error
        try:
            # Not flock: loader workers would inherit that one, and hold it for seconds after a kill.
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = os.read(self._handle, 20).decode(errors="replace").strip()
            os.close(self._handle)
            told = f"process {holder}" if holder.isdigit() else "another process"
            raise StoreError(f"{folder} is in use by {told}; wait for it, or name another folder") from None
        except OSError as error:
            os.close(self._handle)
            raise StoreError(f"cannot lock {folder}: {error.strerror or error}") from error
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())
        _held.add(self._folder)

    def release(self) -> None:
        """Let go; the file stays, since removing it would let two others in at once."""
        if self._folder in _held:
            _held.discard(self._folder)
            os.close(self._handle)
