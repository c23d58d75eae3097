"""Files that a crash leaves whole: the old one or the new one, never half of one; and plans as files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotlap.core.errors import PlanError, StoreError
from hotlap.core.plan import Plan

MOST_TEXT_BYTES = 256 * 1024 * 1024


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new file beside `path`, sync it, and rename it to `path`."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            # mkstemp makes private files; the result gets the user's usual permissions.
            temporary.chmod(0o666 & ~_umask())
            _sync(temporary)
            temporary.replace(path)
            # Some network file systems cannot sync a folder; the file is in place all the same.
            with contextlib.suppress(OSError):
                _sync(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`."""
    write_atomically(path, lambda temporary: _write_plain(temporary, text))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the file at `path` by `content`."""

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def read_text(path: Path, most: int = MOST_TEXT_BYTES) -> str:
    """The text of a file of at most `most` bytes, without a byte order mark.

    Raises StoreError if the file is missing or not text.
    """
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise StoreError(f"cannot read {path}: it is not a text file") from None


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a regular file, also through a link; StoreError if there are more than `most`."""
    try:
        # Non-blocking, and regular files only: a pipe or device in an untrusted folder would never end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"cannot read {path}: it is not a regular file")
            if status.st_size > most:
                raise StoreError(f"cannot read {path}: it has {status.st_size:,} bytes; hotlap reads at most {most:,}")
            return file.read(most)
    except StoreError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise StoreError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except MemoryError:
        raise StoreError(f"cannot read {path}: its {status.st_size:,} bytes do not fit in memory") from None


def from_json(content: bytes, name: str) -> Any:
    """The value of a JSON file; StoreError if it is not JSON or nested too deeply."""
    try:
        return json.loads(content, parse_constant=_refused)
    except RecursionError:
        raise StoreError(f"{name} is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise StoreError(f"{name} is not JSON: {error}") from None


def _refused(word: str) -> Any:
    raise ValueError(f"it holds {word}")


def append_line(path: Path, line: str) -> None:
    """Append a line to a log in one write, so that lines never mix."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def finite(value: Any) -> Any:
    """`value` with null for NaN and infinity, which JSON cannot hold."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_plain(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _umask() -> int:
    # Reading the umask takes setting it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan as a text file."""
    write_text(Path(path), plan.to_text())


def load_plan(path: str | Path) -> Plan:
    """Read a plan file. Raises PlanError with every mistake in it, and StoreError if it cannot be read."""
    try:
        return Plan.from_text(read_text(Path(path)))
    except PlanError as error:
        raise PlanError(*(f"{path}: {problem}" for problem in error.problems)) from None
