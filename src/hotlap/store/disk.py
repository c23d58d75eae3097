"""The system calls that a save makes, one function each: the only places where a crash can leave something half done.

`watched` lets a test stand before and after every one of them.
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
"""Bytes per write: small enough that other threads get their turn."""

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
    """Write a file that is not there yet and sync it; its size and sha256."""
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
    """The same bytes in chunks of one size: small pieces together, large ones cut."""
    waiting = bytearray()
    for piece in pieces:
        whole = memoryview(piece).cast("B")
        if len(waiting) + len(whole) < CHUNK:
            waiting += whole
            continue
        if waiting:
            yield memoryview(bytes(waiting))
            waiting.clear()
        for start in range(0, len(whole), CHUNK):
            yield whole[start : start + CHUNK]
    if waiting:
        yield memoryview(bytes(waiting))


def make_folder(path: Path) -> None:
    """Make a folder that is not there yet."""
    _call("make folder", os.mkdir, path)


def rename(old: Path, new: Path) -> None:
    """Give a file or folder its name in one step, and make that last."""
    _call("rename", os.replace, old, new)
    sync_folder(new.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _call("sync folder", os.fsync, handle)
    except OSError as error:
        # Some network file systems cannot sync a folder; what is in it is there all the same.
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def remove_folder(path: Path) -> None:
    """Remove a folder and all in it, under another name first, so that half of it is never taken for the whole."""
    doomed = path if path.name.startswith(".old-") else path.with_name(f".old-{path.name}")
    if doomed != path:
        if os.path.lexists(doomed):
            _call("remove", _remove, doomed)
        rename(path, doomed)
    _call("remove", _remove, doomed)


def _remove(path: Path) -> None:
    """Remove whatever has this name; what a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def read_checked(path: Path, size: int, sha256: str) -> bytes:
    """The bytes of a regular file, if they are those that were written; StoreError says how they differ."""
    with _opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise StoreError(f"{path.name} has {found:,} bytes, not the {size:,} written")
        content = file.read()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(f"{path.name} differs from what was written (sha256)")
    return content


def read_small(path: Path, most: int) -> bytes:
    """The bytes of a regular file that is no link and no larger than `most`."""
    with _opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found > most:
            raise StoreError(f"{path.name} has {found:,} bytes; at most {most:,} are read")
        return file.read(most + 1)[:most]


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file that is no link, open for reading; StoreError for all that goes wrong with it, inside too."""
    try:
        # Not blocking: opening a pipe would wait for its other end for ever.
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
