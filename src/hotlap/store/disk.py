"""The system calls of a save, one function each: the only places where a crash can leave something incomplete.

`watched` lets a test interrupt before and after each of them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

from hotlap.core.errors import StoreError

Watcher = Callable[[str], None]
Piece = bytes | memoryview
_T = TypeVar("_T")

CHUNK = 4 * 1024 * 1024
"""Bytes per write: few enough that other threads can run."""

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)

_watcher: Watcher | None = None


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher("before write")`, `watcher("after write")` and so on around every system call of a save."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def _call(name: str, function: Callable[..., _T], *args: object) -> _T:
    if _watcher is not None:
        _watcher(f"before {name}")
    result = function(*args)
    if _watcher is not None:
        _watcher(f"after {name}")
    return result


def write_new(path: Path, pieces: Iterable[Piece]) -> tuple[int, str]:
    """Write a new file and sync it; returns its size and sha256."""
    digest, size = hashlib.sha256(), 0
    handle = _call("open", os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for chunk in _chunks(pieces):
            digest.update(chunk)
            size += len(chunk)
            while chunk:
                chunk = chunk[_call("write", os.write, handle, chunk) :]
        _call("sync", os.fsync, handle)
    finally:
        os.close(handle)
    return size, digest.hexdigest()


def _chunks(pieces: Iterable[Piece]) -> Iterator[memoryview]:
    """The same bytes in chunks of at most `CHUNK`: small pieces joined, large ones split."""
    waiting = bytearray()
    for piece in pieces:
        data = memoryview(piece).cast("B")
        if len(waiting) + len(data) < CHUNK:
            waiting += data
            continue
        if waiting:
            yield memoryview(bytes(waiting))
            waiting.clear()
        for start in range(0, len(data), CHUNK):
            yield data[start : start + CHUNK]
    if waiting:
        yield memoryview(bytes(waiting))


def make_folder(path: Path) -> None:
    """Make a new folder."""
    _call("make folder", os.mkdir, path)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder in one step, and sync that."""
    _call("rename", os.replace, old, new)
    sync_folder(new.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _call("sync folder", os.fsync, handle)
    except OSError as error:
        # Some network file systems cannot sync a folder; its files are written all the same.
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Rename a folder, then remove it, so that no reader finds half of it."""
    doomed = path if path.name.startswith(".old-") else path.with_name(f".old-{path.name}")
    if doomed != path:
        if os.path.lexists(doomed):
            _call("remove", _remove, doomed)
        rename(path, doomed)
    _call("remove", _remove, doomed)


def _remove(path: Path) -> None:
    """Remove a file, folder or link; the target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_checked(path: Path, size: int, sha256: str) -> bytes:
    """The bytes of a regular file, checked by size and sha256; StoreError says how they differ."""
    with _opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise StoreError(f"{path.name} has {found:,} bytes, not the {size:,} written")
        content = file.read()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(f"{path.name} differs from what was written (sha256)")
    return content


def read_small(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes; links are refused."""
    with _opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found > most:
            raise StoreError(f"{path.name} has {found:,} bytes; hotlap reads at most {most:,}")
        return file.read(most + 1)[:most]


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file, not a link, open for reading; raises StoreError for every error, also inside of `with`."""
    try:
        # Non-blocking: opening a pipe would wait forever for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise StoreError(f"{path.name} is not a regular file")
            yield file
    except StoreError:
        raise
    except FileNotFoundError:
        raise StoreError(f"{path.name} is missing") from None
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {error.strerror or error}") from None
